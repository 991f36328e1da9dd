"""Tokenised rows as they lie in their cache: mapped into memory, and read column by column when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


class TokenizedExamples:
    """The rows of a folder that `write_folder` has written.

    `datasets` takes ten milliseconds to open such a folder, and copies its description at each look: a pack opens two
    for each task and looks at them at every stage.

    Args:
        folder: of the cache, whose name says what the rows are.
    """

    def __init__(self, folder: Path):
        import pyarrow

        self.folder = folder
        parts = [
            pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all() for path in sorted(folder.glob("*.arrow"))
        ]
        self._table = pyarrow.concat_tables(parts)

    def __getitem__(self, column: str) -> list[Any]:
        """Read a column: a value for every row."""
        found: list[Any] = self._table.column(column).to_pylist()
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield every row, its values by column."""
        for batch in self._table.to_batches():
            yield from batch.to_pylist()

    def largest(self) -> int:
        """Return the largest token id in prompts and targets; -1 without any."""
        import pyarrow.compute

        columns = (self._table.column(name) for name in ("prompt_ids", "target_ids"))
        found = [pyarrow.compute.max(pyarrow.compute.list_flatten(column)).as_py() for column in columns]
        return max((number for number in found if number is not None), default=-1)

    def longest_prompt(self) -> int:
        """Return the tokens of the longest prompt; 0 without any."""
        import pyarrow.compute

        return pyarrow.compute.max(pyarrow.compute.list_value_length(self._table.column("prompt_ids"))).as_py() or 0

    def empty(self, column: str) -> int | None:
        """Return the place (0-based) of the first row without a token in this column; None where all have some."""
        import pyarrow.compute

        lengths = pyarrow.compute.list_value_length(self._table.column(column))
        place: int = pyarrow.compute.index(lengths, 0).as_py()
        return None if place < 0 else place

    def __len__(self) -> int:
        """Return the number of rows."""
        found: int = self._table.num_rows
        return found
