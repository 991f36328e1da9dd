"""What a model is: a trial with its snapshots, what routing keeps of each task, where it comes from; no backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from latent_sweep.data.schema import TaskSpec
from latent_sweep.routing.gaussian import TaskGmm, TaskScatter
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.sweep.plan import Trial

if TYPE_CHECKING:
    from latent_sweep.routing.ngram import TaskNgrams

NOVELTY_QUANTILE = 0.99
"""A row is taken for one of no learned task where it lies farther out than this share of the held-out rows of the task
that it was routed to: one in a hundred of a task's own rows is refused."""


@dataclass(frozen=True, eq=False)
class Records:
    """What routing keeps of one task; what the way of mixing does not read is None."""

    mixture: TaskGmm | None = None
    scatter: TaskScatter | None = None
    ngrams: TaskNgrams | None = None


@dataclass(frozen=True, eq=False)
class LearnedTask:
    """One task of a model."""

    spec: TaskSpec
    snapshot: Snapshot
    records: Records
    farthest: float | None
    """The distance beyond which a row that was routed here belongs to no learned task; None where nothing is routed by
    a posterior, or where no held-out rows of the task were at hand."""


@dataclass(frozen=True)
class Origin:
    """Where a model comes from."""

    sweep: str
    trial_id: str
    name: str
    """The trial's settings that vary, or its id."""
    scores: Mapping[str, float]
    """By task, after the last one that the sweep has learned; fractions."""
    measures: Mapping[str, float]
    """AP, FM and BWT, fractions."""


@dataclass(frozen=True, eq=False)
class ModelContent:
    """All that a model is but for its backbone."""

    trial: Trial
    """As it was planned; tasks that were learned since are tasks of it."""
    learned: tuple[LearnedTask, ...]
    """In the order of learning."""
    largest_rank: int
    """Of the sweep: factors were computed for it."""
    origin: Origin

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of learning."""
        return tuple(task.spec.name for task in self.learned)

    @property
    def outside_module(self) -> str | None:
        """The module of a method from outside of the package; None for one of the package."""
        return self.trial.settings.method.name.partition(":")[0] if self.trial.method_source is not None else None

    def with_task(self, trial: Trial, task: LearnedTask) -> ModelContent:
        """Return the model with one more task.

        Args:
            trial: the model's, with that task at its end.
        """
        return replace(self, trial=trial, learned=(*self.learned, task))
