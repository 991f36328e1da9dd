"""One row of a task: what a record is by the names of its columns or by templates, and what is checked of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from latent_sweep.data.mapping import RecordReader
from latent_sweep.data.records import Repeating, kind_of
from latent_sweep.data.shapes import MESSAGES, nearest_shape, read_chat, shape_of
from latent_sweep.errors import DataError
from latent_sweep.security import quoted, redact

_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Example:
    """One example of a task."""

    id: str
    """The file's own id, or task, split and position where it has none."""
    input: str
    references: tuple[str, ...]
    """Every accepted answer, at least one. Scoring with `single_first` reads the first one."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Columns of its record with text that nothing reads."""

    @property
    def target(self) -> str:
        """The answer to train on: one reference, chosen by a hash of the row's id, so the same in every trial."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return self.references[int.from_bytes(digest[:8], "big") % len(self.references)]


def to_example(where: str, record: Any, default_id: str, reader: RecordReader | None) -> Example | None:
    """The row that a record is; None where it is none of those that are read.

    Args:
        where: place of the record, for errors.
        default_id: of a row that has none of its own.
        reader: reads records as a source says; None where the task has none.

    Raises:
        DataError: the record is not a row.
    """
    if isinstance(record, Repeating):
        raise DataError(f"{where}: {record.fault}")
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {kind_of(record)}; expected an object with `input` and `output`.")
    if reader is None:
        return _recognised(where, record, default_id)
    if not reader.fits(where, record):
        return None
    mapped = reader.mapped(where, record)
    if mapped is None:
        return _recognised(where, reader.named(where, record), default_id)
    return _whole_characters(where, Example(default_id, *mapped))


def _recognised(where: str, record: Mapping[str, Any], default_id: str) -> Example:
    """The row that a record is by the names of its columns."""
    shape, row_id = shape_of(record), record.get("id", default_id)
    if type(row_id) not in (str, int):
        raise DataError(f"{where}: `id` is {kind_of(row_id)}; expected a string or a whole number.")
    if shape is None and MESSAGES in record:
        if (chat := read_chat(record[MESSAGES])) is None:
            found = quoted(record[MESSAGES], 60)
            raise DataError(
                f"{where}: `{MESSAGES}` is {found}; expected a list of objects with the texts `role` (system, user or "
                "assistant) and `content`, two or more, the last one the assistant's."
            )
        return _whole_characters(where, Example(str(row_id), chat[0], (chat[1],), _unread(record, (MESSAGES,))))
    if shape is None:
        missing = "` and `".join(column for column in nearest_shape(record).columns if column not in record)
        raise DataError(
            f"{where}: `{missing}` missing; found the keys {sorted(record)}. Rename the columns, or read them by "
            "`input` and `output` templates in the task's `source`."
        )
    text, answer = shape.input_of(record), record[shape.answer]
    if not isinstance(text, str):
        raise DataError(f"{where}: `{shape.inputs[-1]}` is {kind_of(text)}; expected a string.")
    references = answer if isinstance(answer, list) else [answer]
    if not references or not all(isinstance(reference, str) for reference in references):
        raise DataError(
            f"{where}: `{shape.answer}` is {kind_of(answer)}: {quoted(answer, 60)}; expected a string or strings."
        )
    return _whole_characters(where, Example(str(row_id), text, tuple(references), _unread(record, shape.columns)))


ID_COLUMN = re.compile(r"(?i)(.*[_-])?(id|idx|index|guid|uuid)")
"""Columns that only number rows."""


def _unread(record: Mapping[str, Any], read: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns with text, or what holds text, that are not read and do more than number rows."""
    return _without_numbers(
        tuple(
            name
            for name, value in record.items()
            if name not in read and value and isinstance(value, (str, list, dict))
        )
    )


@lru_cache(maxsize=256)  # one tuple for all rows of a file
def _without_numbers(columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(column for column in columns if not ID_COLUMN.fullmatch(column))


def is_whole(text: str) -> bool:
    """Whether UTF-8 can hold a text: not half of a surrogate pair."""
    return text.isascii() or _HALF_PAIR.search(text) is None


def _whole_characters(where: str, row: Example) -> Example:
    if not all(map(is_whole, (row.id, row.input, *row.references))):
        raise DataError(f"{where}: found half of a surrogate pair, which UTF-8 cannot hold; expected whole characters.")
    return row


def is_labelled(row: Example) -> bool:
    """Whether a row's answers hold a letter or a digit."""
    return any(character.isalnum() for reference in row.references for character in reference)


def check_labels(where: str, row: Example, labels: tuple[str, ...]) -> None:
    """Hold a row's answers against the labels of its task.

    Raises:
        DataError: one is none of them.
    """
    unknown = [reference for reference in row.references if reference not in labels]
    if unknown and is_labelled(row):
        known = redact(", ".join(map(repr, labels)))
        raise DataError(
            f"{where}: the answer {quoted(unknown[0], 60)} is none of the task's labels: {known:.200}. "
            "Correct the row, or `labels` in the benchmark's file."
        )
