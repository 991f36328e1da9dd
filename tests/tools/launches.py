"""What one optimizer step and one token of an answer ask of a GPU, at real depth and width 32, on an imitated one.

    PYTHONPATH=tests python -m tools.launches [BACKBONE ...]

Launches do not depend on the width. Batches have 8 rows, in bfloat16, of different lengths unless the row says so.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers.imitated_gpu import Record
from helpers.steady_steps import workshop

from latent_sweep.backbones.architectures import random_model
from latent_sweep.backbones.loading import Backbone, assemble
from latent_sweep.backbones.registry import REGISTRY, BackboneSettings, Family

DEPTHS = {"t5-large": 24, "llama-2-7b": 32, "llama-3-8b": 32, "llama-2-13b": 40}


def shallow(name: str, depth: int, dtype: str = "bfloat16") -> Backbone:
    """A backbone of this name's family with so many layers (of T5 in each half) and the tiny one's widths."""
    known = REGISTRY[name]
    tiny = REGISTRY[f"tiny-{known.family}"]
    config: dict[str, Any] = {**tiny.config}
    if known.family == "t5":
        config |= {"num_layers": depth, "num_decoder_layers": depth}
    else:
        grouped = known.config["num_key_value_heads"] < known.config["num_attention_heads"]
        config |= {"num_hidden_layers": depth, "num_key_value_heads": 2 if grouped else config["num_attention_heads"]}
    family: Family = known.family
    model = random_model(family, config, getattr(torch, dtype))
    return assemble(BackboneSettings(name=f"tiny-{family}", dtype=dtype, device="cpu"), model, None)


@dataclass(frozen=True)
class Line:
    """A row of the table."""

    what: str
    counts: Mapping[str, float]
    above: float | None = None
    """Launches per adapted projection more than the bare backbone's, where that means anything."""

    def __str__(self) -> str:
        numbers = [self.counts[kind] for kind in ("launches", "syncs", "to_device", "to_device_later")]
        above = "" if self.above is None else f"{self.above:9.2f}"
        return f"{self.what:42}" + "".join(f"{number:9.5g}" for number in numbers) + above


HEADER = f"{'':42}{'launches':>9}{'syncs':>9}{'copies':>9}{'later':>9}{'above':>9}"


def table(name: str, depth: int) -> list[Line]:
    """Everything that is measured of a backbone."""
    lines = []
    with tempfile.TemporaryDirectory() as folder, workshop(shallow(name, depth), Path(folder)) as here:

        def add(what: str, found: Record, bare: Record | None = None) -> Record:
            counts, above = found.counts(), None
            if bare is not None:
                above = (counts["launches"] - bare.counts()["launches"]) / len(here.backbone.targets)
            lines.append(Line(what, counts, above))
            print(lines[-1], flush=True)
            return found

        kinds = ("apart",) if here.backbone.family == "t5" else ("apart", "prefix", "padded")
        for kind in kinds:
            of_kind = "" if kind == "apart" else f", {kind}"
            bare = add(f"bare backbone{of_kind}", here.bare_step(kind))
            for method in ("latent_lora", "seq_lora"):
                add(f"{method}{of_kind}", here.step(method, kind=kind), bare)
                if kind != "padded":
                    add(f"{method}, pack of 8{of_kind}", here.step(method, 8, kind), bare)
        for method in ("latent_lora", "seq_lora"):
            lines.append(Line(f"{method}, a token", here.token(method)))
            print(lines[-1], flush=True)
        # last: transformers leaves a hook behind that has all later steps go back to the embeddings
        for kind in kinds[:2]:
            of_kind = "" if kind == "apart" else f", {kind}"
            add(
                f"latent_lora, checkpointing{of_kind}", here.step("latent_lora", kind=kind, gradient_checkpointing=True)
            )
    return lines


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or DEPTHS:
        print(f"{name}, {DEPTHS[name]} layers\n{HEADER}")
        table(name, DEPTHS[name])
        print()


if __name__ == "__main__":
    main()
