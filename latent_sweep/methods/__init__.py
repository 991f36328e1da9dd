"""The methods, by name. To add one: write its file, and a line here."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import Method

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
    """The class registered under `name`.

    Raises:
        ConfigError: no method has this name; the message suggests the nearest.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known methods: {', '.join(sorted(METHODS))}"
        raise ConfigError(f"unknown method {name!r}; {hint}")
    module, _, attribute = METHODS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
