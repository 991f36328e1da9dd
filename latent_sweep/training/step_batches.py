"""The batches of one optimizer step: of this step, or in memory that every replay of a recorded step reads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from latent_sweep.backbones.batches import Batch, collate
from latent_sweep.backbones.layouts import Padded, to_device
from latent_sweep.training.engine import Engine
from latent_sweep.training.micro_batches import MicroBatch, denominator, micro_batches
from latent_sweep.training.trainer import Trainer


class StepBatches:
    """The batches of one step of several trainers, `ahead` of the current one, one per forward pass, on the device.

    With `rounded`, lengths are rounded up and denominators are tensors on the device, as a recorded step needs them.
    """

    def __init__(self, trainers: Sequence[Trainer], engine: Engine, ahead: int = 0, rounded: bool = False):
        self.trainers = list(trainers)
        self.backbone, self.rounded = engine.backbone, rounded
        settings = [trainer.settings for trainer in trainers]
        rows = [[trainer.rows[i] for i in trainer.batch(trainer.step + ahead)] for trainer in trainers]
        self.sizes = list(map(len, rows))
        divisors = [denominator(own, s) for own, s in zip(rows, settings, strict=True)]
        self.denominators: Sequence[float | Tensor] = divisors
        if rounded:
            self.divisors = to_device(np.array(divisors, np.float32), self.backbone.device)
            self.denominators = self.divisors.unbind()
        chunks = [micro_batches(own, s.micro_batch_size, engine.group) for own, s in zip(rows, settings, strict=True)]
        self.passes = list(itertools.zip_longest(*chunks, fillvalue=MicroBatch(())))
        self._collated = {index: (self._uniform(index), self._collate(index)) for index in range(len(self.passes))}

    def _uniform(self, index: int) -> bool:
        """Whether the last adaptation of each trainer in this pass was the same for all its rows."""
        parts = zip(self.trainers, self.passes[index], strict=True)
        return all(trainer.uniform for trainer, part in parts if part.rows)

    def _collate(self, index: int) -> Batch:
        rows = [part.rows for part in self.passes[index] if part.rows]
        return collate(rows, self.backbone, self._uniform(index), self.rounded)

    def take(self, index: int) -> Batch:
        """Return the batch of a pass and drop it; collate it again if `_uniform` has changed."""
        uniform, batch = self._collated.pop(index)
        return batch if uniform == self._uniform(index) else self._collate(index)


class FixedBatches:
    """The batches of a step, which can be taken more than once, and replaced by others of the same shapes."""

    def __init__(self, batches: StepBatches):
        self.trainers, self.backbone = batches.trainers, batches.backbone
        self.sizes, self.passes = batches.sizes, batches.passes
        self._divisors, self.denominators = batches.divisors, batches.denominators
        self._batches = [batches.take(index) for index in range(len(self.passes))]

    def take(self, index: int) -> Batch:
        batch = self._batches[index]
        layout = batch.inputs.get("layout")
        return (
            replace(batch, inputs={**batch.inputs, "layout": layout.unused()}) if isinstance(layout, Padded) else batch
        )

    @property
    def shapes(self) -> tuple[Any, ...] | None:
        """What a replay cannot change: shapes, types, and rows and labels per run; None for layouts with indices."""
        if not all(isinstance(batch.inputs.get("layout"), Padded) for batch in self._batches):
            return None
        rows = [[(len(part.rows), part.counts) for part in of_pass] for of_pass in self.passes]
        runs = [[*batch.counts, *(batch.targets or ())] for batch in self._batches]
        tensors = [(tensor.shape, tensor.dtype) for tensor in self.tensors()]
        return repr(rows), repr(runs), tuple(self.sizes), tuple(tensors)

    def tensors(self) -> list[Tensor]:
        inputs = [t for batch in self._batches for t in (*batch.inputs.values(), batch.labels, batch.keep)]
        return [t for t in (self._divisors, *inputs) if isinstance(t, Tensor)]

    def fill(self, other: FixedBatches) -> None:
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new, non_blocking=True)
