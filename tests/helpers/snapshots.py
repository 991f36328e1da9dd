"""Whole texts kept as files: `make snapshots` rewrites them, so that a new wording is one diff to review."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "snapshots"


def check(name: str, text: str) -> None:
    """Compare a text with `tests/snapshots/NAME`; with UPDATE_SNAPSHOTS set, write it there instead."""
    path = FOLDER / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"no snapshot {name}; write it with `make snapshots`"
    assert text == path.read_text(encoding="utf-8"), f"differs from tests/snapshots/{name}"
