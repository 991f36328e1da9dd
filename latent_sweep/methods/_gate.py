"""GainLoRA's gate in training: its settings, where it starts, and how it stays closed for earlier prompts.

The formulas are in `latent_sweep.adapters.gate`. The official repository has T5 only: what is said here of Llama is
after a copy by others, and is not verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from latent_sweep.backbones.outputs import Example
from latent_sweep.errors import LatentSweepError
from latent_sweep.methods._gpm import (
    WHERE_MEMORY_IS_FULL,
    Design,
    GpmSettings,
    Snapshots,
    added_columns,
    check_rows,
    columns,
)
from latent_sweep.methods.protocol import TaskData
from latent_sweep.settings import FROM_PRESET, Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from latent_sweep.adapters.gate import Gate

PARTS = ("G1", "G2", "key")
"""What a gate consists of; each part has a memory of what it reads."""


class GateSettings(Settings):
    """The gate; what is left out is the preset's."""

    form: Literal["two_silu", "one_silu"] = Field("two_silu", json_schema_extra=FROM_PRESET)
    """SiLU after both maps as released for T5, or after the second alone, as in a copy by others for Llama."""
    width: int = Field(100, ge=1, json_schema_extra=FROM_PRESET)
    """Width between the two maps."""
    pooling: Literal["true_length", "padded"] = Field("true_length", json_schema_extra=FROM_PRESET)
    """Divide the sum of a prompt's embeddings by its own length, or by the longest's in its batch: then results depend
    on which rows come together, so on `training.micro_batch_size` too."""
    key_design: Design = Field("svd", json_schema_extra=FROM_PRESET)
    """The key starts as the leading direction of the new task's prompts outside of the memory, or random, projected."""
    rescale_rows: bool = Field(False, json_schema_extra=FROM_PRESET)
    """Whether rows get back, after each step's projection, the norm that they had before it, as released for T5: then
    gates open for earlier prompts, a little with every step."""


RELEASED_GATES: Mapping[str, Mapping[str, Any]] = {
    "t5": {"pooling": "padded", "rescale_rows": True},
    "llama": {"form": "one_silu", "width": 50, "key_design": "random_project"},
}
"""What the preset `official` fills in, by backbone family; the values for Llama rest on a copy by others."""


def gate_of(snapshot: Mapping[str, Tensor], settings: GateSettings, device: torch.device) -> Gate:
    """A snapshot's gate, on the device."""
    from latent_sweep.adapters.gate import Gate

    G1, G2, key = (snapshot[f"gate.{part}"].to(device) for part in PARTS)
    return Gate(G1, G2, key, settings.form)


class NewGate:
    """The gate of the task that is being learned.

    It starts with the maps of the previous gate, or drawn ones, and a key of its own outside of its memory.

    Args:
        table: the frozen embedding table, (vocabulary, d).
        task: its prompts are read.
        history: snapshots of the earlier tasks, which hold the columns that each added to the memories.

    Attributes:
        gate: its tensors are trained.

    Raises:
        DataError: the task has no rows.
        LatentSweepError: the key's memory leaves no direction.
    """

    def __init__(self, settings: GateSettings, gpm: GpmSettings, table: Tensor, task: TaskData, history: Snapshots):
        from latent_sweep.adapters.gate import Gate, Pooled, layers, new_key, new_maps

        check_rows(task)
        self._settings, self._gpm, self._task = settings, gpm, task
        self._pooled = Pooled(table, settings.pooling == "padded")
        d, w, device = table.shape[1], settings.width, table.device
        self._memory = {
            part: columns(history, f"gate.{part}", k).to(device) for part, k in zip(PARTS, (d, w, d), strict=True)
        }
        if self._memory["key"].shape[1] == d:
            raise LatentSweepError(
                f"task {task.name}: earlier prompts use all directions of the gate's key, and none is left for a new "
                f"one. {WHERE_MEMORY_IS_FULL}"
            )
        if history:
            before = gate_of(history[-1], settings, device)
            G1, G2 = before.G1, before.G2
        else:
            G1, G2 = (G.to(device) for G in new_maps(d, w, task.generator("gate")))
        *_, p2 = layers(self.pooled(task.rows), G1, G2, settings.form)
        key = new_key(p2, self._memory["key"], settings.key_design, gpm.energy, task.generator("key"))
        G1, G2, key = (part.clone().requires_grad_(True) for part in (G1, G2, key))
        self.gate = Gate(G1, G2, key, settings.form)
        self.begin_step()

    def pooled(self, rows: Sequence[Example]) -> Tensor:
        """Return the pooled embeddings that gates read of every row's prompt, (rows, d)."""
        return self._pooled([row["prompt_ids"] for row in rows])

    def parameters(self) -> dict[str, Tensor]:
        """Return both maps and the key, which are trained."""
        return {f"gate.{part}": getattr(self.gate, part) for part in PARTS}

    def begin_step(self) -> None:
        """Remember where the next optimizer step begins."""
        held = [part for part, M in self._memory.items() if M.shape[1]]
        self._before = {part: getattr(self.gate, part).detach().clone() for part in held}

    def project(self) -> None:
        """Take from each part's change in this step what lies in its memory: `P <- P - (P - P_before) M M^T`.

        As in the released code (`_inner_training_loop` of the T5 trainer): the optimizer's step, then the projection of
        its change, then, with `rescale_rows`, every row gets back the norm that the optimizer gave it. Rescaling moves
        rows inside of the memory too, and since the next step begins there, such drift adds up. Without it all this is
        linear, and equals, to rounding, the projection of the whole change since the task began.
        """
        import torch

        from latent_sweep.adapters.gpm import outside

        for part, before in self._before.items():
            P, M = getattr(self.gate, part), self._memory[part]
            with torch.no_grad():
                norms = P.norm(dim=-1, keepdim=True)
                P.copy_(before + outside(P - before, M))
                if self._settings.rescale_rows:
                    P.mul_(norms / P.norm(dim=-1, keepdim=True))
        self.begin_step()

    def finish(self) -> dict[str, Tensor]:
        """Return the gate's parts, and the columns that this task's prompts add to their memories."""
        import torch

        from latent_sweep.adapters.gpm import second_moment

        with torch.no_grad():
            read = self.gate.inputs(self.pooled(self._task.rows))
        moments = {f"gate.{part}": second_moment(x) for part, x in zip(PARTS, read, strict=True)}
        memory = {f"gate.{part}": M for part, M in self._memory.items()}
        own = {name: parameter.detach().cpu().clone() for name, parameter in self.parameters().items()}
        return own | added_columns(self._gpm, self._task, moments, memory)

    def facts(self) -> dict[str, float]:
        """Return the mean of the gate over the task's own prompts."""
        import torch

        with torch.no_grad():
            return {"gate_mean": float(self.gate(self.pooled(self._task.rows)).mean())}
