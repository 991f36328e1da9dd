"""Report tables as plain text, for a file or for a terminal of any width."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Sequence

from latent_sweep.report.tables import Section, Table, one_line

_GAP = "  "
_NARROWEST = 8


def terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def plain(sections: Sequence[Section], width: int | None = None) -> str:
    """Write sections as text, in lines of at most `width`. Tables that are too wide are split; nothing is truncated."""
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
    cells = [[one_line(cell.text) + " *" * cell.best for cell in row] for row in table.rows]
    rows = [list(map(one_line, table.header)), *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is None or _total(widths) <= width:
        return [_aligned(rows, widths)]
    keys, others = list(range(table.keys)), list(range(table.keys, len(widths)))
    _shrink(widths, keys, width - len(_GAP) - min(max((widths[i] for i in others), default=0), width // 2))
    room = width - _total([widths[i] for i in keys]) - len(_GAP) * bool(keys)
    parts: list[list[int]] = []
    for i in others:
        widths[i] = min(widths[i], max(_NARROWEST, room))
        if not parts or _total([widths[column] for column in (*parts[-1], i)]) > width:
            parts.append([*keys])
        parts[-1].append(i)
    return [_aligned([[row[i] for i in part] for row in rows], [widths[i] for i in part]) for part in parts]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * max(0, len(widths) - 1)


def _shrink(widths: list[int], columns: Sequence[int], room: int) -> None:
    while _total([widths[i] for i in columns]) > room:
        widest = max(columns, key=widths.__getitem__)
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    lines = []
    for row in rows:
        cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            lines.append(_GAP.join(map(str.ljust, line, widths)).rstrip())
        if row is rows[0]:
            lines.append(_GAP.join("-" * width for width in widths))
    return "\n".join(lines)


def _filled(text: str, width: int | None) -> str:
    line = one_line(text)
    return line if width is None else textwrap.fill(line, max(width, _NARROWEST), subsequent_indent="  ")
