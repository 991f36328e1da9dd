"""What a running pack tells: something begun, a step further, or a stage done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from latent_sweep.metrics import ScoreMatrix

Doing = Literal[
    "starting", "loading the backbone", "checking", "tokenising", "preparing", "fitting the router", "answering"
]
"""What takes a while without steps that could be counted.

`checking` is all that is tried before a task is learned (`preflight.py`); `preparing` is a method's own, before its
first step.
"""


@dataclass(frozen=True)
class Begun:
    """The pack has begun something, or is back at it."""

    doing: Doing
    position: int | None = None
    """Task it is about, 0-based; None where it is about all of them."""


@dataclass(frozen=True)
class Step:
    """The pack got a step further: an optimizer step was taken, or one of the tasks seen was scored."""

    position: int
    """Task being learned, 0-based."""
    doing: Literal["learning", "scoring"]
    step: int
    """Steps done, from 1."""
    steps: int
    losses: Mapping[str, float]
    """Terms of the loss; empty while scoring."""
    training_id: str
    """Of the member it is about."""


@dataclass(frozen=True)
class StageDone:
    """All trials of the pack have learned and scored one more task."""

    tasks_seen: int
    tasks_left: int
    matrices: Sequence[ScoreMatrix]
    """Score matrix so far, one per trial of the pack."""

    @property
    def average_performance(self) -> float:
        """AP so far, a mean over the pack's trials: what a scheduler compares."""
        return sum(matrix.average_performance() for matrix in self.matrices) / len(self.matrices)

    @property
    def forgetting(self) -> float:
        """FM so far, a mean over the pack's trials."""
        return sum(matrix.forgetting() for matrix in self.matrices) / len(self.matrices)

    def measures(self) -> dict[str, float]:
        """Return the measures that a scheduler is told."""
        return {
            "tasks_seen": self.tasks_seen,
            "tasks_left": self.tasks_left,
            "AP": self.average_performance,
            "FM": self.forgetting,
        }


Emit = Callable[[Begun | Step | StageDone], None]


def say_nothing(event: Begun | Step | StageDone) -> None:
    """Report nothing: of the workers of a group, the first one reports for all."""
