"""Sections of a report as plain text, for a terminal of any width or for a file."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from latent_sweep.report.tables import Section, Table
from latent_sweep.security import spelled_out

_GAP = "  "
_NARROWEST = 8
"""Columns that a cell is never wrapped below."""

Lines = list[list[str]]
"""Of each cell of a row, its lines."""


def terminal_width() -> int | None:
    """Return the columns of the terminal that standard output goes to; None if it goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def plain(sections: Sequence[Section], width: int | None = None) -> str:
    """Write sections as text. Nothing is cut: a table that is too wide becomes several, one below the other.

    Args:
        width: columns of the terminal; None leaves all lines as long as they are.
    """
    parts = []
    for section in sections:
        parts.append(_filled(section.title, width))
        marks: list[str] = []
        if section.table is not None:
            parts += _tables(section.table, width)
            marks = ["* highest AP"] * any(cell.best for row in section.table.rows for cell in row)
        parts.append("\n".join(_filled(note, width) for note in [*marks, *section.notes]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _tables(table: Table, width: int | None) -> list[str]:
    """Write a table, in several parts where it is too wide; each begins with the columns that name its rows."""
    cells = [[_one_line(cell.text) + " *" * cell.best for cell in row] for row in table.rows]
    rows = [[_one_line(heading) for heading in table.header], *cells]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    if width is None or _total(widths) <= width:
        return [_aligned(rows, widths)]
    keys, others = list(range(table.keys)), list(range(table.keys, len(widths)))
    widest = max((widths[column] for column in others), default=0)
    _shrink(widths, keys, width - len(_GAP) - min(widest, width // 2))
    room = width - _total([widths[column] for column in keys]) - len(_GAP) * bool(keys)
    for column in others:
        widths[column] = min(widths[column], max(_NARROWEST, room))
    parts: list[list[int]] = []
    for column in others:
        if not parts or _total([widths[of] for of in (*parts[-1], column)]) > width:
            parts.append([*keys])
        parts[-1].append(column)
    return [_aligned([[row[of] for of in part] for row in rows], [widths[of] for of in part]) for part in parts]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * max(0, len(widths) - 1)


def _shrink(widths: list[int], columns: Sequence[int], room: int) -> None:
    """Narrow the widest of these columns until they fit, or all are as narrow as they may be."""
    while _total([widths[column] for column in columns]) > room:
        widest = max(columns, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    """Write rows below each other, the first one above a rule; a cell that is too long goes on in the next line."""
    written = []
    for row in rows:
        cells: Lines = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells), default=0)):
            line = (each[number] if number < len(each) else "" for each in cells)
            written.append(_GAP.join(text.ljust(size) for text, size in zip(line, widths, strict=True)).rstrip())
        if len(written) and row is rows[0]:
            written.append(_GAP.join("-" * size for size in widths))
    return "\n".join(written)


def _filled(text: str, width: int | None) -> str:
    line = _one_line(text)
    return line if width is None else textwrap.fill(line, max(width, _NARROWEST), subsequent_indent="  ")


def _one_line(text: str) -> str:
    return " ".join(spelled_out(text).split())
