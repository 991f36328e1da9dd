"""The state of each trial by its journal, and their totals, both updated event by event.

A sweep may have ten thousand trials of fifteen stages. An observer that looks every second must not sum over all.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from latent_sweep.storage.journal import (
    Event,
    Failed,
    Lost,
    Stage,
    Started,
    Status,
    Stopped,
    is_from_worker,
    row_origin,
)

ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
ORDER: tuple[Status, ...] = ("finished", "running", "pending", "failed", "stopped")
ENOUGH = 3
"""Learned stages needed before the time left is estimated."""
RECENT = 1000
"""Number of newest stages that the estimate uses, at least."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StageState:
    """A task that a trial has learned and scored."""

    task: str
    tasks_seen: int
    lineage: str
    row: int
    """See `journal.row_origin`."""
    reused: bool
    AP: float
    FM: float
    time: float


@dataclass(frozen=True, slots=True)
class TrialState:
    """The state of a trial by its journal."""

    trial_id: str
    training_id: str
    name: str
    n_tasks: int
    status: Status = "pending"
    stages: tuple[StageState, ...] = ()
    at_work: tuple[Span, ...] = ()
    """When workers worked on it. An interrupted attempt ends at its last event."""
    message: str | None = None
    """Why it failed, was stopped or lost its worker."""
    kind: str | None = None
    task: str | None = None
    idle: bool = False
    """Whether its worker failed or was lost and no other has taken over."""
    changed: float = 0.0
    """Time of its last event; 0 without one."""

    @property
    def tasks_done(self) -> int:
        """Tasks that need no more work: all of them once it has been stopped."""
        return self.n_tasks if self.status in ("finished", "stopped") else len(self.stages)


def advanced(trial: TrialState, events: Iterable[Event]) -> TrialState:
    stages, at_work, last = {stage.tasks_seen: stage for stage in trial.stages}, list(trial.at_work), None
    for last in events:
        if isinstance(last, Started):
            at_work.append((last.time, last.time))
        elif at_work and is_from_worker(last):
            at_work[-1] = at_work[-1][0], last.time
        if isinstance(last, Stage):
            stage = _stage(last)
            if stage.tasks_seen in stages and stages[stage.tasks_seen].row != stage.row:  # see `journal.stages`
                stages = {seen: row for seen, row in stages.items() if seen < stage.tasks_seen}
            stages[stage.tasks_seen] = stage
    if last is None:
        return trial
    message = last.message if isinstance(last, (Failed, Lost)) else last.reason if isinstance(last, Stopped) else None
    return replace(
        trial,
        status=last.status,
        stages=tuple(stages[seen] for seen in sorted(stages)),
        at_work=tuple(at_work),
        message=message or None,
        kind=last.kind if isinstance(last, Failed) else None,
        task=last.task if isinstance(last, Failed) else None,
        idle=isinstance(last, (Failed, Lost)),
        changed=last.time,
    )


def counts_text(counts: Mapping[Status, int], driven: bool) -> str:
    """Without a driver, running trials are interrupted."""
    names = {"running": "running" if driven else "interrupted"}
    return ", ".join(f"{counts[status]} {names.get(status, status)}" for status in ORDER if counts.get(status))


def _stage(event: Stage) -> StageState:
    metrics = event.metrics
    lineage = sys.intern(event.lineage)  # many trials may share it
    key = event.task, event.tasks_seen, lineage, row_origin(event)
    return StageState(*key, event.reused, metrics["AP"], metrics["FM"], event.time)


class Tally:
    """Totals over the trials of a sweep, in its order, updated trial by trial."""

    def __init__(self, trials: Iterable[TrialState]):
        self.trials = list(trials)
        self.tasks = sum(trial.n_tasks for trial in self.trials)
        self._since = 0.0
        self._best: int | None = None
        self._sum()

    def advance(self, number: int, trial: TrialState) -> None:
        before, self.trials[number] = self.trials[number], trial
        counted, spans = {id(stage) for stage in before.stages}, zip(before.at_work, trial.at_work, strict=False)
        if len(counted & {id(stage) for stage in trial.stages}) < len(counted) or any(a > b for a, b in spans):
            self._sum()  # its journal was repaired, or a stage was computed again
            return
        self._remove(number, before)
        self._add(number, trial, counted)
        if self._best == number and _rank(trial) < _rank(before):
            self._best = self._ahead(range(len(self.trials)))

    def since(self, moment: float) -> None:
        """Estimate the time left from stages that ended after this moment only."""
        if moment != self._since:
            self._since = moment
            self._sum()

    @property
    def counts(self) -> dict[Status, int]:
        return {status: self._counts[status] for status in ORDER if self._counts[status]}

    @property
    def learned(self) -> int:
        """Distinct stages that were learned; trials of one training share them."""
        return len(self._learned)

    @property
    def failed(self) -> tuple[TrialState, ...]:
        return tuple(self.trials[number] for number in sorted(self._failed))

    @property
    def best(self) -> TrialState | None:
        """The trial with the highest AP among those that have seen the most tasks: AP falls with their number."""
        return None if self._best is None else self.trials[self._best]

    @property
    def seconds_at_work(self) -> float:
        """Seconds during which at least one worker worked; pauses between runs do not count."""
        return sum((end - begin for begin, end in self._at_work), 0.0)

    def seconds_left(self, now: float) -> float | None:
        """Estimate the time left by the mean gap between newest stages; None for fewer than `ENOUGH`, or at the end."""
        if not self._ends:
            return None
        gaps = [end - before for (before, _), (end, reused) in itertools.pairwise(self._ends) if not reused]
        first, reused = self._ends[0]
        if not self._cut and not reused:
            gaps.insert(0, first - (self._since if self._begun is None else self._begun))
        if len(gaps) < ENOUGH or not self._remaining:
            return None
        return max(0.0, self._remaining * statistics.fmean(gaps) - (now - self._ends[-1][0]))

    def _sum(self) -> None:
        self._counts: Counter[Status] = Counter()
        self._failed: set[int] = set()
        self.tasks_done, self.reused, self._remaining = 0, 0, 0
        self._learned: set[str] = set()
        self._at_work: list[Span] = []
        self._ends: list[tuple[float, bool]] = []
        self._cut = False
        self._begun: float | None = None
        self._best = None
        for number, trial in enumerate(self.trials):
            self._add(number, trial, set())

    def _remove(self, number: int, trial: TrialState) -> None:
        self._counts[trial.status] -= 1
        self._failed.discard(number)
        self.tasks_done -= trial.tasks_done
        self._remaining -= _remaining(trial)

    def _add(self, number: int, trial: TrialState, counted: set[int]) -> None:
        """Add a trial to the counts, and its stages except those counted before, by id."""
        self._counts[trial.status] += 1
        if trial.status == "failed":
            self._failed.add(number)
        self.tasks_done += trial.tasks_done
        self._remaining += _remaining(trial)
        for stage in trial.stages:
            if id(stage) not in counted:
                reused = stage.reused or stage.lineage in self._learned
                self.reused += reused
                if not reused:
                    self._learned.add(stage.lineage)
                if stage.time >= self._since:
                    insort(self._ends, (stage.time, stage.reused))
        if len(self._ends) > 2 * RECENT:
            del self._ends[:-RECENT]
            self._cut = True
        for span in trial.at_work:
            cover(self._at_work, span)
            if span[0] >= self._since:
                self._begun = span[0] if self._begun is None else min(self._begun, span[0])
        self._best = self._ahead([number] if self._best is None else sorted((self._best, number)))

    def _ahead(self, numbers: Iterable[int]) -> int | None:
        begun = (number for number in numbers if self.trials[number].stages)
        return max(begun, key=lambda number: _rank(self.trials[number]), default=None)


def _rank(trial: TrialState) -> tuple[int, float]:
    return len(trial.stages), trial.stages[-1].AP if trial.stages else 0.0


def _remaining(trial: TrialState) -> int:
    return 0 if trial.status in ENDED else trial.n_tasks - trial.tasks_done


def cover(spans: list[Span], span: Span) -> None:
    """Insert a span into sorted disjoint spans, merging those that it touches."""
    begin, end = span
    after = len(spans)
    while after and spans[after - 1][0] > end:
        after -= 1
    first = after
    while first and spans[first - 1][1] >= begin:
        first -= 1
        begin, end = min(begin, spans[first][0]), max(end, spans[first][1])
    spans[first:after] = [(begin, end)]
