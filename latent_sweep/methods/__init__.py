"""The methods, by name. To add one here: write its file, and a line below; see `README.md` beside this file.

A method from outside is named `package.module:Class`; its module lies where Python looks, or in the working directory.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import get_args

from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import Combination, Method, MethodSettings
from latent_sweep.plugins import code_digest, imported

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

    Raises:
        ConfigError: as `method_class`.
    """
    if ":" not in name:
        return None
    method_class(name)
    return code_digest(name)


def _outside(name: str) -> type[Method]:
    found = imported(name, "the name of a method, or package.module:Class")
    where, (module, _, attribute) = f"found {name!r}", name.partition(":")
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"{where}; {module} has no class {attribute} derived from latent_sweep's Method")
    if not issubclass(getattr(found, "settings_class", object), MethodSettings):
        raise ConfigError(f"{where}; its settings_class must be a class derived from latent_sweep's MethodSettings")
    known = get_args(Combination)
    if not found.combinations or not set(found.combinations) <= set(known):
        raise ConfigError(f"{where}; combinations is {found.combinations!r}; expected some of {', '.join(known)}")
    if "gates" in found.combinations and found.gates is Method.gates:
        raise ConfigError(f"{where}; `gates` is among its combinations; expected a method gates(history, prompts), too")
    return found
