"""How settings and their values are called where people read them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

METHOD_NAMES: Mapping[str, str] = {
    "latent_lora": "Latent-LoRA",
    "lfpt5": "LFPT5",
    "ewc": "EWC",
    "lwf": "LwF",
    "tasl": "TaSL",
    "kif_lora": "KIFLoRA",
    "seq_lora": "SeqLoRA",
    "inc_lora": "IncLoRA",
    "o_lora": "O-LoRA",
    "inf_lora": "InfLoRA",
    "gain_lora": "GainLoRA",
    "zero_shot": "Zero-shot",
    "joint_lora": "JointLoRA",
}
"""How papers write the methods, by the names that sweep files have."""

_READS_BETTER = {"ortho_lambda": "lambda", "components": "K"}


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Map dotted paths to short names for people: `method.ortho_lambda` -> `lambda`, `backbone.name` -> `backbone`.

    Paths whose short names collide keep their full path.
    """
    short = {path: _short_name(path) for path in paths}
    uses = Counter(short.values())
    return {path: name if uses[name] == 1 else path for path, name in short.items()}


def _short_name(path: str) -> str:
    *groups, last = path.split(".")
    if last == "name" and groups:
        return groups[-1]
    return _READS_BETTER.get(last, last)


def format_value(value: Any) -> str:
    """Write a setting as people do, floats in full; `-` for None, a setting that the trial does not read."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


def label(values: Mapping[str, Any]) -> str:
    """Write settings as `lambda=0.1 seed=0`; those that are None, not read by this trial, are left out."""
    return " ".join(f"{name}={format_value(value)}" for name, value in values.items() if value is not None)
