"""Finds what a method draws from generators that all code of a process shares, and what it validates on.

The loop seeds these generators before every step and at no other time. What a method draws elsewhere it takes from
`task.generator`, which is derived from seed, task and purpose: other draws differ from one try to the next.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from latent_sweep.backbones.batches import forward
from latent_sweep.backbones.outputs import Example
from latent_sweep.methods.protocol import Learner, Method
from latent_sweep.sweep.plan import Trial
from latent_sweep.testing.stages import Stages
from latent_sweep.training import loop, trainer

GENERATORS: Mapping[str, Callable[[], Any]] = {
    "torch's": lambda: torch.get_rng_state().numpy().tobytes(),
    "NumPy's": lambda: pickle.dumps(np.random.get_state()),
    "Python's": random.getstate,
}
"""The state of each generator that a process shares, as a value that can be compared."""

OUTSIDE_STEPS = ("examples", "after_step", "finish", "facts")
"""Members of a learner that are asked outside of the seeded part of a step."""


class Draws:
    """Which shared generators were drawn from, by the name of what drew."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Note draws within the block."""
        before = {generator: state() for generator, state in GENERATORS.items()}
        yield
        if drawn := {generator for generator, state in GENERATORS.items() if state() != before[generator]}:
            self.found.setdefault(name, set()).update(drawn)

    def watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its draws noted."""

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.watching(name):
                return function(*arguments, **named)

        return call


def validated_rows(stages: Stages, trial: Trial, position: int, held_out: Sequence[Example]) -> list[Example]:
    """Learn a stage with these held-out rows; return the rows that its epochs were chosen by, in order, each once."""
    read: list[Example] = []

    def record(backbone: Any, bank: Any, rows: Sequence[Example], *others: Any) -> Any:
        read.extend(row for row in rows if row not in read)
        return forward(backbone, bank, rows, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "forward", record)  # which epochs are chosen with
        stages.snapshot(trial, position, validation=held_out)
    return read


def shared_draws(stages: Stages, trial: Trial, position: int) -> dict[str, set[str]]:
    """Learn a stage, and return which shared generators its method draws from, by the member that draws.

    Draws of a step itself are those of `step`; they are repeated, but only where the method trains alone: a method that
    says so by `packable` may draw there.
    """
    draws, kind = Draws(), type(trial.method())
    begin, packable = kind.begin_task, trial.method().packable

    def begin_task(self: Method, task: Any, history: Sequence[Mapping[str, Tensor]]) -> Learner:
        with draws.watching("begin_task"):
            learner = begin(self, task, history)
        for name in OUTSIDE_STEPS:
            setattr(learner, name, draws.watched(name, getattr(learner, name)))
        return learner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "begin_task", begin_task)
        if packable:
            patch.setattr(loop, "_gradients", draws.watched("step", loop._gradients))
        stages.snapshot(trial, position)
    return draws.found
