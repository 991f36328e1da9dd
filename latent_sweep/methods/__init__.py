"""The methods, by name. To add one: write its file, and a line here."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping

from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import Method

METHODS: Mapping[str, str] = {
    "latent_lora": "latent_sweep.methods.latent_lora:LatentLora",
    "gain_lora": "latent_sweep.methods.gain_lora:GainLora",
    "inf_lora": "latent_sweep.methods.inf_lora:InfLora",
    "inc_lora": "latent_sweep.methods.inc_lora:IncLora",
    "joint_lora": "latent_sweep.methods.joint_lora:JointLora",
    "o_lora": "latent_sweep.methods.o_lora:OLora",
    "seq_lora": "latent_sweep.methods.seq_lora:SeqLora",
    "ewc": "latent_sweep.methods.ewc:Ewc",
    "kif_lora": "latent_sweep.methods.kif_lora:KifLora",
    "lfpt5": "latent_sweep.methods.lfpt5:Lfpt5",
    "lwf": "latent_sweep.methods.lwf:Lwf",
    "tasl": "latent_sweep.methods.tasl:Tasl",
    "zero_shot": "latent_sweep.methods.zero_shot:ZeroShot",
}


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
