"""What lies outside of the package and is named `package.module:Name`: how it is imported, and what names its code."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

from latent_sweep.errors import ConfigError


def imported(name: str, expected: str) -> Any:
    """What `package.module:Name` stands for; None where the module has nothing of this name.

    The module lies where Python looks, or in the working directory.

    Args:
        expected: what messages say that a name may be.

    Raises:
        ConfigError: it is no such name, or the module cannot be imported.
    """
    where = f"found {name!r}"
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        raise ConfigError(f"{where}; expected {expected}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there, `python -m` does
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the module does when it is imported
        advice = "Correct it there"
        if module.endswith(".py"):
            advice = f"Write {module.removesuffix('.py')}:{attribute}"
        elif isinstance(error, ModuleNotFoundError):
            advice = "It must be installed, or lie below the working directory of the driver and of every worker"
        raise ConfigError(f"{where}; {module} cannot be imported ({_said(error)}). {advice}") from error


def code_digest(name: str) -> str:
    """Content hash of the code behind a name that is imported.

    It covers the module, or where that lies in a package, every Python file of the package: whatever the code may
    import from there can change what it does.

    Raises:
        ConfigError: it lies in no file, so that nothing would tell of a change.
    """
    module = sys.modules[name.partition(":")[0]]
    files = sorted(path for folder in _package_folders(name) for path in folder.rglob("*.py"))
    if not files and getattr(module, "__file__", None) is None:
        raise ConfigError(
            f"found {name!r}; {module.__name__} is built into Python, and no file tells when it changes. Call it from "
            "a function in a file of your own, and name that"
        )
    files = files or [Path(str(module.__file__))]
    return _digest(tuple((str(path), path.stat().st_mtime_ns) for path in files))


def code_paths(name: str) -> list[Path]:
    """Where the code lies behind a name that was imported: its module's file, or the folder of the whole package."""
    return _package_folders(name) or [Path(str(sys.modules[name.partition(":")[0]].__file__))]


def _package_folders(name: str) -> list[Path]:
    """Folders of the outermost package of an imported module; none where it lies in no package."""
    package = sys.modules[name.partition(":")[0].partition(".")[0]]
    return [Path(folder) for folder in getattr(package, "__path__", ())]


@lru_cache(maxsize=256)
def _digest(files: tuple[tuple[str, int], ...]) -> str:
    digest = hashlib.sha256()
    top = os.path.commonpath([os.path.dirname(name) for name, _ in files])
    for name, _ in files:
        content = Path(name).read_bytes()
        digest.update(f"{os.path.relpath(name, top)}:{len(content)}:".encode() + content)
    return digest.hexdigest()[:16]


def _said(error: Exception) -> str:
    """What an error says, and the line of code that raised it, where that is not the import itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if "importlib" in frame.filename else f" in {frame.filename}, line {frame.lineno}"
    return f"{type(error).__name__}: {error}{place}"
