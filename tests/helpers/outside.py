"""A plugin module for one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def outside_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Iterator[str]:
    """Yield its name, which is unique per test because Python imports a name once."""
    module = f"outside_{folder.name}".replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    yield module
    sys.modules.pop(module, None)
