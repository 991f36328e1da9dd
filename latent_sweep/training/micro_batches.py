"""The passes that a batch is cut into, and what its summed loss is divided by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latent_sweep.backbones.outputs import Example
from latent_sweep.sweep.schema import TrainingSettings
from latent_sweep.training.worker_group import WorkerGroup

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass of a trainer."""

    rows: Sequence[Example]
    counts: bool = True
    """False for filler rows: a worker with no rows left computes them while others still have a pass."""

    def counted(self, terms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return terms if self.counts else {name: 0.0 * term for name, term in terms.items()}


def micro_batches(rows: Sequence[Example], size: int | None, group: WorkerGroup) -> list[MicroBatch]:
    """Split this worker's share of a batch into passes of at most `size` rows; all workers get the same number."""
    largest = group.largest_share(len(rows))
    size, own = size or largest, group.share(rows)
    passes = [MicroBatch(own[start : start + size]) for start in range(0, len(own), size)]
    return passes + [MicroBatch(rows[:1], counts=False)] * (math.ceil(largest / size) - len(passes))


def denominator(rows: Sequence[Example], settings: TrainingSettings) -> float:
    """Return the divisor of a batch's summed cross-entropy (A5)."""
    targets = sum(len(row["target_ids"]) for row in rows)
    return {"token_mean": targets, "sequence_mean": len(rows), "sum": 1}[settings.loss_reduce]
