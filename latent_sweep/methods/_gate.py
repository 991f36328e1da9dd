"""GainLoRA's gate in training: its settings, where it starts, and how it stays closed for earlier prompts.

The formulas are in `latent_sweep.adapters.gate`. methods/README.md names the commits that the presets reproduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from latent_sweep.backbones.outputs import Example
from latent_sweep.errors import ConfigError, LatentSweepError
from latent_sweep.methods._gpm import (
    RELEASED_CHUNKS,
    WHERE_MEMORY_IS_FULL,
    GpmSettings,
    Snapshots,
    added_columns,
    check_rows,
    columns,
    statistics_batches,
)
from latent_sweep.methods.protocol import TaskData
from latent_sweep.settings import FROM_PRESET, LEFT_OUT_AT_DEFAULT, Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from latent_sweep.adapters.gate import Gate, KeyDesign

PARTS = ("G1", "G2", "key")
"""What a gate consists of; each part has a memory of what it reads."""


class GateSettings(Settings):
    """The gate; what is left out is the preset's."""

    form: Literal["two_silu", "one_silu"] = Field("two_silu", json_schema_extra=FROM_PRESET)
    """SiLU after both maps as released for T5, or after the second alone, as released for Llama."""
    width: int = Field(100, ge=1, json_schema_extra=FROM_PRESET)
    """Width between the two maps."""
    pooling: Literal["true_length", "padded"] = Field("true_length", json_schema_extra=FROM_PRESET)
    """Divide the sum of a prompt's embeddings by its own length, or by the longest's in its batch: then results depend
    on which rows come together, so on `training.micro_batch_size` too, and the memories are read from the batches that
    `gpm.batch_size`, `gpm.max_batches` and `gpm.group_by_length` make."""
    key_design: Literal["svd", "random_project", "svd_then_random"] = Field("svd", json_schema_extra=FROM_PRESET)
    """The key starts as the leading direction of the new task's prompts outside of the memory (`svd`), or random,
    projected (`random_project`). `svd_then_random`: so at the first task, and later in a random direction there."""
    chunks: int = Field(1, ge=1, json_schema_extra=FROM_PRESET | LEFT_OUT_AT_DEFAULT)
    """Stretches of equal length that the inputs of G1 and of the key are split into, each with a memory of its own.
    None is the preset's."""
    rescale_rows: bool = Field(False, json_schema_extra=FROM_PRESET)
    """Whether rows get back, after each step's projection, the norm that they had before it, as released for T5: then
    gates open for earlier prompts, a little with every step."""


RELEASED_GATES: Mapping[str, Mapping[str, Any]] = {
    "t5": {"pooling": "padded", "rescale_rows": True, "chunks": RELEASED_CHUNKS["t5"]},
    "llama": {
        "form": "one_silu",
        "width": 50,
        "pooling": "padded",
        "key_design": "random_project",
        "chunks": RELEASED_CHUNKS["llama"],
    },
}
"""What the preset `official` fills in, by backbone family."""


@dataclass(frozen=True)
class Stretch:
    """Dimensions of what a part of a gate reads that have a memory of their own."""

    name: str
    """Of the memory."""
    part: str
    dimensions: slice

    @property
    def length(self) -> int:
        """Return how many dimensions it has."""
        return self.dimensions.stop - self.dimensions.start


def stretches(d: int, w: int, chunks: int) -> list[Stretch]:
    """Split what a gate of width w reads; G2's input is always whole.

    Raises:
        ConfigError: the embedding width d cannot be divided by `chunks`.
    """
    if d % chunks:
        raise ConfigError(
            f"method.gate.chunks: embeddings of {d} dimensions cannot be split into {chunks} equal stretches; give a "
            f"divisor of {d}"
        )
    found = []
    for part, length, count in zip(PARTS, (d // chunks, w, d // chunks), (chunks, 1, chunks), strict=True):
        for i in range(count):
            name = f"gate.{part}" if count == 1 else f"gate.{part}.{i}"
            found.append(Stretch(name, part, slice(i * length, (i + 1) * length)))
    return found


def _key_design(settings: GateSettings, position: int) -> KeyDesign:
    """Return how the key of the task at this position is made."""
    if settings.key_design == "svd_then_random":
        return "random_direction" if position else "svd"
    return settings.key_design


def gate_identity(settings: Mapping[str, Any], position: int) -> dict[str, Any]:
    """Return what learning the task at this position reads of an identity of the gate.

    Rows are rescaled and keys drawn from the second task on. `padded` has a version: memories were once pooled by 32
    rows in the order of the data, and are now by the batches that inputs are read in.
    """
    unread = {"rescale_rows"} if position == 0 else set()
    identity = {name: value for name, value in settings.items() if name not in unread}
    if position == 0 and identity["key_design"] == "svd_then_random":
        identity["key_design"] = "svd"
    return identity | ({"padded": 2} if identity["pooling"] == "padded" else {})


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
        ConfigError: the embeddings cannot be split into `chunks` equal stretches.
    """

    def __init__(self, settings: GateSettings, gpm: GpmSettings, table: Tensor, task: TaskData, history: Snapshots):
        from latent_sweep.adapters.gate import Gate, Pooled, layers, new_key, new_maps

        check_rows(task)
        self._settings, self._gpm, self._task = settings, gpm, task
        self._pooled = Pooled(table, settings.pooling == "padded")
        d, w, device = table.shape[1], settings.width, table.device
        self._stretches = stretches(d, w, settings.chunks)
        self._memory = {s.name: columns(history, s.name, s.length).to(device) for s in self._stretches}
        of_key = [self._memory[s.name] for s in self._stretches if s.part == "key"]
        if all(M.shape[1] == len(M) for M in of_key):
            raise LatentSweepError(
                f"task {task.name}: earlier prompts use all directions of the gate's key, and none is left for a new "
                f"one. {WHERE_MEMORY_IS_FULL}"
            )
        if history:
            before = gate_of(history[-1], settings, device)
            G1, G2 = before.G1, before.G2
        else:
            G1, G2 = (G.to(device) for G in new_maps(d, w, task.generator("gate")))
        *_, p2 = layers(self._pooled_for_memory(), G1, G2, settings.form)
        key = new_key(p2, of_key, _key_design(settings, task.position), gpm.energy, task.generator("key"))
        G1, G2, key = (part.clone().requires_grad_(True) for part in (G1, G2, key))
        self.gate = Gate(G1, G2, key, settings.form)
        self.begin_step()

    def pooled(self, rows: Sequence[Example]) -> Tensor:
        """Return the pooled embeddings that gates read of every row's prompt, (rows, d)."""
        return self._pooled([row["prompt_ids"] for row in rows])

    def _pooled_for_memory(self) -> Tensor:
        """Return p0 of the task's rows for statistics, (rows, d); if padded, of each of the memory's batches."""
        import torch

        rows = self._task.rows
        if self._settings.pooling == "true_length":
            return self.pooled(rows)
        batches = [[rows[i]["prompt_ids"] for i in batch] for batch in statistics_batches(self._gpm, self._task)]
        return torch.cat([self._pooled(batch, together=len(batch)) for batch in batches])

    def parameters(self) -> dict[str, Tensor]:
        """Return both maps and the key, which are trained."""
        return {f"gate.{part}": getattr(self.gate, part) for part in PARTS}

    def begin_step(self) -> None:
        """Remember where the next optimizer step begins."""
        held = {s.part for s in self._stretches if self._memory[s.name].shape[1]}
        self._before = {part: getattr(self.gate, part).detach().clone() for part in PARTS if part in held}

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
            P = getattr(self.gate, part)
            with torch.no_grad():
                norms = P.norm(dim=-1, keepdim=True)
                for s in [s for s in self._stretches if s.part == part]:
                    own = before[..., s.dimensions]
                    P[..., s.dimensions] = own + outside(P[..., s.dimensions] - own, self._memory[s.name])
                if self._settings.rescale_rows:
                    P.mul_(norms / P.norm(dim=-1, keepdim=True))
        self.begin_step()

    def finish(self) -> dict[str, Tensor]:
        """Return the gate's parts, and the columns that this task's prompts add to their memories."""
        import torch

        from latent_sweep.adapters.gpm import second_moment

        with torch.no_grad():
            read = dict(zip(PARTS, self.gate.inputs(self._pooled_for_memory()), strict=True))
        moments = {s.name: second_moment(read[s.part][:, s.dimensions]) for s in self._stretches}
        own = {name: parameter.detach().cpu().clone() for name, parameter in self.parameters().items()}
        return own | added_columns(self._gpm, self._task, moments, self._memory)

    def facts(self) -> dict[str, float]:
        """Return the mean of the gate over the task's own prompts."""
        import torch

        with torch.no_grad():
            return {"gate_mean": float(self.gate(self.pooled(self._task.rows)).mean())}
