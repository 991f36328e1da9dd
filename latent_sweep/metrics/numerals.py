r"""Numbers as answers write them: the last one of a text, read whole.

A number is read by these rules:

- Digits right after a letter of an alphabet with capitals belong to a word: `m2`, `CO2` and `v1.2` hold no number.
- Digits and what joins two of them (`.`, `,`, `:`, `/`, `^`, `'`, `-`, a no-break or thin space) are one number, with
  a sign where no letter or digit stands before it. Letters after it are a unit: `25 km2` is 25.
- `3/4` and `\frac{3}{4}` are fractions and `1 3/4` is 1.75. `1e-3`, `1.5 x 10^3` and `1.5*10**3` have an exponent.
  `07:05:00` is the clock time 7:05.
- Of a comma and a point in one number, the last one is the decimal mark and the other one groups.
- Commas alone group where each stands before exactly three digits and the first group is not 0 (`1,234`). Else a single
  comma is the decimal mark (`0,50`, `0,123`). A single point is always the decimal mark (`1.234`); several group.
- Apostrophes, no-break and thin spaces group. An ordinary space does not.
- Everything else that digits and joiners make (dates, ranges, powers, `1,2,3`) is compared as it is written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

Number = Fraction | str
"""A value, a clock time as `7:05`, or the writing of what has no value."""

_LONGEST = 300
"""Characters of a number that has a value; a longer one is compared as it is written."""

_CASED = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u03ff\u0400-\u04ff_"
_MINUS = "\\-\u2212\u2013"
_SPACES = "\u00a0\u2009\u202f"
_MONEY = "[$\u20ac\u00a3\u00a5]?"
_EXPONENT = rf"[eE][+{_MINUS}]?(?=\d+(?![{_CASED}]))"
_TIMES = r"\s?(?:[x*\u00d7\u00b7]|\\times)\s?10(?:\^|\*\*)\{?"
_NUMBER = re.compile(
    rf"[{_CASED}]\d+(?:\.\d+)*"  # a word
    rf"|(?P<sign>(?<!\w)[{_MINUS}](?={_MONEY}\.?\d))?{_MONEY}(?P<body>0[xX][0-9a-fA-F]+"
    r"|\d+ \d+/\d+(?![/\d])"
    rf"|\d+(?:(?:[.,:/^'{_SPACES}{_MINUS}]|{_EXPONENT})\d+)*(?:{_TIMES}[+{_MINUS}]?\d+\}}?)?"
    rf"|(?<![\w.])\.\d+(?:{_EXPONENT}\d+)?)"
)
_LATEX_FRACTION = re.compile(r"(\d?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_VULGAR_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_RAISED = re.compile("(?<=[0-9])[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")

_CLOCK = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?")
_PARTS = re.compile(r"(?:(\d+) )?([^ /]+)/([^ /]+)")
_POWER = re.compile(rf"(.+?){_TIMES}([+-]?\d{{1,3}})\}}?")
_GROUPED = re.compile(r"[1-9]\d{0,2}([,.' ])\d{3}(?:\1\d{3})*")
_PLAIN = re.compile(r"(\d*\.?\d+)(?:[eE]([+-]?\d{1,3}))?")


def last_number(text: str) -> Number | None:
    """Return the last number of a text by the rules of this module; None if there is none."""
    writing = _last_writing(text)
    return None if writing is None else _value(writing)


def lacks_value(text: str) -> bool:
    """Return whether the last number of a text has no value, so that it is compared as it is written."""
    writing = _last_writing(text)
    return writing is not None and _value(writing) == writing and _CLOCK.fullmatch(writing) is None


def ambiguous_numbers(texts: Sequence[str]) -> list[str]:
    """Return the texts whose last number could also be read in another way.

    These are `1,234` if other texts have a decimal comma (`0,50`), `1.234` if other texts group by points (`1.234.567`
    or `1.234,50`), and numbers with an ordinary space before three digits (`1 234`).
    """
    writings = {text: (_last_writing(text) or "").lstrip("-") for text in dict.fromkeys(texts)}
    decimal_commas = any(
        re.fullmatch(r"[\d.]+,\d+", each) and not _GROUPED.fullmatch(each) for each in writings.values()
    )
    grouping_points = any(re.fullmatch(r"\d+(\.\d{3})+(,\d+|\.\d{3})", each) for each in writings.values())
    marks = "," * decimal_commas + "." * grouping_points
    either = re.compile(rf"[1-9]\d{{0,2}}[{marks}]\d{{3}}" if marks else "(?!)")
    spaced = re.compile(r"(?<![\w.,])[1-9]\d{0,2}(?: \d{3})+(?![\w.,]*\d)\D*$")
    return [text for text in texts if either.fullmatch(writings[text]) or spaced.search(text)]


def _last_writing(text: str) -> str | None:
    """Return the last number as it is written, without currency, with ASCII signs and spaces."""
    text = _VULGAR_FRACTION.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = text.replace("\\!", "").replace("{,}", ",").replace("\u2019", "'").replace("\u2044", "/")
    text = _LATEX_FRACTION.sub(lambda found: f"{found[1]}{' ' * bool(found[1])}{found[2]}/{found[3]}", text)
    text = _RAISED.sub(lambda found: "^" + unicodedata.normalize("NFKC", found[0]), text)
    numbers = [found for found in _NUMBER.finditer(text) if found["body"]]
    if not numbers:
        return None
    sign, body = numbers[-1]["sign"], numbers[-1]["body"]
    return "-" * bool(sign) + re.sub(f"[{_MINUS}]", "-", re.sub(f"[{_SPACES}]", " ", body))


def _value(writing: str) -> Number:
    """Return the value of a number, or its writing if it has none."""
    negative = writing.startswith("-")
    body = writing[1:] if negative else writing
    if clock := _CLOCK.fullmatch(body):
        hours, minutes, seconds = clock.groups()
        return f"{'-' * negative}{int(hours)}:{minutes}" + (f":{seconds}" if seconds not in (None, "00") else "")
    value = _quotient(body) if len(body) <= _LONGEST else None
    if value is None:
        return writing
    return -value if negative else value


def _quotient(body: str) -> Fraction | None:
    """Return the value of a decimal, a fraction or a mixed number; None for anything else."""
    found = _PARTS.fullmatch(body)
    if found is None:
        return _decimal(body)
    whole, above, below = (_decimal(part) for part in (found[1] or "0", found[2], found[3]))
    return None if whole is None or above is None or not below else whole + above / below


def _decimal(text: str) -> Fraction | None:
    """Return the value of digits with marks and an exponent; None for anything else."""
    exponent = 0
    if power := _POWER.fullmatch(text):
        text, exponent = power[1], int(power[2])
    mantissa, _, own_exponent = text.lower().partition("e")
    found = _PLAIN.fullmatch(_pointed(mantissa) + "e" * bool(own_exponent) + own_exponent)
    return Fraction(found[1]) * Fraction(10) ** (int(found[2] or 0) + exponent) if found else None


def _pointed(text: str) -> str:
    """Return digits without grouping marks and with a decimal point; text that groups otherwise stays as it is."""
    if _PLAIN.fullmatch(text):
        return text
    if _GROUPED.fullmatch(text):
        return re.sub("[,.' ]", "", text)
    head, mark, tail = text.rpartition("," if text.rfind(",") > text.rfind(".") else ".")
    if (groups := _GROUPED.fullmatch(head)) and groups[1] != mark:
        head = head.replace(groups[1], "")
    return f"{head}.{tail}" if mark and head.isdecimal() else text
