"""Sections of a report as LaTeX tables for a paper: captions and labels, booktabs, numbers in math mode.

They need `\\usepackage{booktabs, graphicx}` and nothing else. A table that is wider than the text is scaled down; what
explains it stands below it, inside its float.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from latent_sweep.labels import METHOD_NAMES
from latent_sweep.report.tables import Cell, Section, Table
from latent_sweep.security import spelled_out

_HEADINGS = {"lambda": r"$\lambda$", "K": "$K$", "epsilon": r"$\varepsilon$", "n": "$n$", "its settings": "settings"}
_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "[": "{[}",  # behind the line break of a table it would begin an argument
    "]": "{]}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_MISSING = "--"
_FITTING = r"\ifdim\width>\linewidth\linewidth\else\width\fi"
"""The width of a table's own, but at most that of the text."""


def latex(sections: Sequence[Section], name: str) -> str:
    """Write sections as LaTeX: a float for each table, comments for what has none.

    Args:
        name: of the sweep, for captions and labels.
    """
    parts = [r"% needs \usepackage{booktabs, graphicx}"]
    for section in sections:
        if section.table is None:
            parts.append("\n".join(f"% {_one_line(f'{section.title}: {note}')}" for note in section.notes))
        else:
            parts.append(_float(section, section.table, name))
    return "\n\n".join(parts) + "\n"


def _float(section: Section, table: Table, name: str) -> str:
    caption = section.title if name in section.title else f"{section.title}, sweep {name}"
    if any(cell.best for row in table.rows for cell in row):
        caption += "; the highest AP is bold"
    label = re.sub(r"[^a-z0-9]+", "-", f"{name}-{section.name}".lower()).strip("-")
    notes = [_sentence(note) for note in section.notes]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_text(_capital(caption))}.}}",
            rf"\label{{tab:{label}}}",
            r"\small",
            rf"\resizebox{{{_FITTING}}}{{!}}{{%",
            _tabular(table) + "}",
            *([r"\par\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {' '.join(notes)}}}"] if notes else []),
            r"\end{table}",
        ]
    )


def _tabular(table: Table) -> str:
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.header)
    numeric = [_is_numeric(column) for column in columns]
    body = [
        " & ".join(
            _cell(cell, heading, number) for cell, heading, number in zip(row, table.header, numeric, strict=True)
        )
        for row in table.rows
    ]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{''.join('r' if number else 'l' for number in numeric)}}}",
            r"\toprule",
            " & ".join(map(_heading, table.header)) + r" \\",
            r"\midrule",
            *(row + r" \\" for row in body),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _is_numeric(column: Sequence[Cell]) -> bool:
    """Whether a column holds numbers alone, and what stands for a missing one."""
    return any(cell.size is not None for cell in column) and all(
        cell.size is not None or cell.text == "-" for cell in column
    )


def _cell(cell: Cell, heading: str, number: bool) -> str:
    if cell.text == "-":
        return _MISSING
    if number:
        return _numbers(_one_line(cell.text), cell.best)
    return METHOD_NAMES[cell.text] if heading == "method" and cell.text in METHOD_NAMES else _text(cell.text)


def _numbers(text: str, best: bool) -> str:
    """Write `42.00 ± 2.65`, `+0.81 [-1.37, +2.99] n.s.`, `64 to 68` or `1/3` in math mode."""
    numbers = [_math(found) for found in _NUMBER.findall(text)]
    if best:
        numbers[0] = rf"\mathbf{{{numbers[0]}}}"
    between = _NUMBER.split(text)
    written = "".join(map("".join, zip(map(_between, between), [*numbers, ""], strict=True)))
    return f"${written}$"


_BETWEEN = {"±": r"\pm", " to ": r"\mbox{--}", " n.s.": r"\ \mathrm{n.s.}", " [": r"\ [", "%": r"\%"}


def _between(text: str) -> str:
    """Write what stands between the numbers of a cell in math mode."""
    for found, math in _BETWEEN.items():
        text = text.replace(found, math)
    return text


def _math(number: str) -> str:
    """Write a number as math has it: `1e-05` as a power of ten, commas between thousands without a space."""
    mantissa, _, exponent = number.partition("e")
    mantissa = mantissa.replace(",", "{,}")
    if not exponent:
        return mantissa
    power = f"10^{{{int(exponent)}}}"
    return power if mantissa in ("1", "1.0") else rf"{mantissa} \times {power}"


def _heading(name: str) -> str:
    return _HEADINGS.get(name, _text(name.replace("_", " ")))


def _text(text: str) -> str:
    """Escape a text; in settings such as `method=o_lora lambda=-1` names of methods and numbers read as in a paper."""
    words = []
    for word in _one_line(text).split(" "):
        name, equals, value = word.partition("=")
        known = word.removeprefix("method=").rstrip(",;:")
        if known in METHOD_NAMES:
            words.append(METHOD_NAMES[known] + word.removeprefix("method=").removeprefix(known))
        elif equals and _NUMBER.fullmatch(value):
            words.append(f"{_HEADINGS.get(name, _escaped(name))}=${_math(value)}$")
        elif _NUMBER.fullmatch(number := word.rstrip(",;:")) and (word[0] in "+-" or "e" in number):
            words.append(f"${_math(number)}$" + word.removeprefix(number))
        else:
            words.append(_escaped(word))
    return " ".join(words)


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


def _sentence(note: str) -> str:
    text = _text(note)
    return text if text.endswith(".") else f"{text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _one_line(text: str) -> str:
    return " ".join(spelled_out(text).split())
