"""The methods, by name. To add one here: write its file, and a line below; see `README.md` beside this file.

A method from outside is named `package.module:Class`; its module lies where Python looks, or in the working directory.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import Method, MethodSettings

METHODS: Mapping[str, str] = {
    "latent_lora": "latent_sweep.methods.latent_lora:LatentLora",
    "lfpt5": "latent_sweep.methods.lfpt5:Lfpt5",
    "ewc": "latent_sweep.methods.ewc:Ewc",
    "lwf": "latent_sweep.methods.lwf:Lwf",
    "tasl": "latent_sweep.methods.tasl:Tasl",
    "kif_lora": "latent_sweep.methods.kif_lora:KifLora",
    "seq_lora": "latent_sweep.methods.seq_lora:SeqLora",
    "inc_lora": "latent_sweep.methods.inc_lora:IncLora",
    "o_lora": "latent_sweep.methods.o_lora:OLora",
    "inf_lora": "latent_sweep.methods.inf_lora:InfLora",
    "gain_lora": "latent_sweep.methods.gain_lora:GainLora",
    "zero_shot": "latent_sweep.methods.zero_shot:ZeroShot",
    "joint_lora": "latent_sweep.methods.joint_lora:JointLora",
}

DEFAULT = "latent_lora"
"""What a sweep file that names no method runs."""


def method_class(name: str) -> type[Method]:
    """The class of a method: registered under this name, or `package.module:Class` from outside.

    Raises:
        ConfigError: no method has this name (the message suggests the nearest), or a module from outside cannot be
            imported, or holds no such method.
    """
    if ":" in name:
        return _outside(name)
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        known = f"known methods: {', '.join(sorted(METHODS))}, or package.module:Class for one from outside"
        hint = f"did you mean {near[0]!r}?" if near else known
        raise ConfigError(f"unknown method {name!r}; {hint}")
    module, _, attribute = METHODS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def source_of(name: str) -> str | None:
    """Content hash of the code of a method from outside; None for a registered one, whose `version` tells.

    It covers the module, or where that lies in a package, every Python file of the package: whatever the method may
    import from there can change what it learns and answers.

    Raises:
        ConfigError: as `method_class`.
    """
    if ":" not in name:
        return None
    method_class(name)
    module = sys.modules[name.partition(":")[0]]
    package = sys.modules[module.__name__.partition(".")[0]]
    folders = [Path(folder) for folder in getattr(package, "__path__", ())]
    files = sorted(path for folder in folders for path in folder.rglob("*.py")) or [Path(module.__file__ or "")]
    return _digest(tuple((str(path), path.stat().st_mtime_ns) for path in files))


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


def _outside(name: str) -> type[Method]:
    where = f"found {name!r}"
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        raise ConfigError(f"{where}; expected the name of a method, or package.module:Class")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not look there, `python -m` does
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the module does when it is imported
        advice = "Correct it there"
        if module.endswith(".py"):
            advice = f"Write {module.removesuffix('.py')}:{attribute}"
        elif isinstance(error, ModuleNotFoundError):
            advice = "It must be installed, or lie below the working directory of the driver and of every worker"
        raise ConfigError(f"{where}; {module} cannot be imported ({_said(error)}). {advice}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{where}; {module} has no class {attribute} derived from latent_sweep's Method")
    if not issubclass(getattr(found, "settings_class", object), MethodSettings):
        raise ConfigError(f"{where}; its settings_class must be a class derived from latent_sweep's MethodSettings")
    return found
