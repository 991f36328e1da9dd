"""Where trials stand, each by its journal, and all of them together: kept up to date event by event.

A sweep may have ten thousand trials of fifteen stages: who looks every second adds what is new, and nothing is summed
over all of them again.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from latent_sweep.storage.journal import Event, Status, row_of, status, told_by_worker

ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
ORDER: tuple[Status, ...] = ("finished", "running", "pending", "failed", "stopped")
"""In which trials are counted for people."""
ENOUGH = 3
"""Learned stages from which on the time left is estimated."""
RECENT = 1000
"""Stages that it is estimated by, the newest ones, at least as far as there are some."""
DEVIATIONS = 2.0
"""Standard deviations on either side of the time left."""

Span = tuple[float, float]
"""From when to when, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A task that a trial has learned and scored."""

    task: str
    tasks_seen: int
    lineage: str
    """Of its snapshot: trials that have learned it together tell each of it."""
    row: int
    """As `journal.row_of` has it."""
    reused: bool
    """Whether its snapshot was in the store."""
    seconds_train: float
    AP: float
    FM: float
    time: float
    """When it was done, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class TrialState:
    """Where a trial stands, by its journal."""

    trial_id: str
    training_id: str
    """Trials that share a training have it in common, and the stages that they tell of."""
    name: str
    """Its settings that vary, for people."""
    n_tasks: int
    status: Status = "pending"
    stages: tuple[Stage, ...] = ()
    at_work: tuple[Span, ...] = ()
    """From when to when workers were at work on it, in Unix seconds; an attempt that was cut: to what it told last."""
    message: str | None = None
    """Why it has failed, was stopped or has lost its worker; None where nothing was recorded."""
    kind: str | None = None
    """Of its failure."""
    task: str | None = None
    """At which it has failed."""
    idle: bool = False
    """Whether its worker has failed or was lost, and no other has taken it up."""
    changed: float = 0.0
    """When its last event was told; 0 where there is none."""

    @property
    def tasks_done(self) -> int:
        """Tasks that need no more work: of a trial that was stopped or has finished, all."""
        return self.n_tasks if self.status in ("finished", "stopped") else len(self.stages)


def advanced(trial: TrialState, events: Iterable[Event]) -> TrialState:
    """Return where a trial stands after more events of its journal."""
    told, at_work, last = {stage.tasks_seen: stage for stage in trial.stages}, list(trial.at_work), None
    for last in events:
        if last["event"] == "started":
            at_work.append((last["time"], last["time"]))
        elif at_work and told_by_worker(last):
            at_work[-1] = at_work[-1][0], last["time"]
        if last["event"] == "stage":
            stage = _stage(last)
            if stage.tasks_seen in told and told[stage.tasks_seen].row != stage.row:  # as `journal.stages` has it
                told = {seen: row for seen, row in told.items() if seen < stage.tasks_seen}
            told[stage.tasks_seen] = stage
    if last is None:
        return trial
    found = status([last])
    failed = last if found == "failed" else {}
    ended = last if found == "failed" or last["event"] == "lost" else {}
    return replace(
        trial,
        status=found,
        stages=tuple(told[seen] for seen in sorted(told)),
        at_work=tuple(at_work),
        message=ended.get("message") or (last.get("reason") if found == "stopped" else None),
        kind=failed.get("kind"),
        task=failed.get("task"),
        idle=last["event"] in ("failed", "lost"),
        changed=last["time"],
    )


def counts_text(counts: Mapping[Status, int], driven: bool) -> str:
    """Say how many trials there are of each status; one that nobody drives any more is interrupted."""
    names = {"running": "running" if driven else "interrupted"}
    return ", ".join(f"{counts[status]} {names.get(status, status)}" for status in ORDER if counts.get(status))


def _stage(event: Event) -> Stage:
    m = event["metrics"]
    seconds = m.get("seconds_train", 0.0)
    lineage = sys.intern(event["lineage"])  # for many trials may tell of one
    what = event["task"], event["tasks_seen"], lineage, row_of(event)
    return Stage(*what, event["reused"], seconds, m["AP"], m["FM"], event["time"])


@dataclass(frozen=True)
class TimeLeft:
    """Seconds until all trials have ended, with the range that they are expected in."""

    seconds: float
    shortest: float
    longest: float


def time_left(gaps: Sequence[float], remaining: int, waited: float) -> TimeLeft | None:
    """Estimate how long the remaining stages take, from the times between the ends of those before them.

    Stages end one after another, however many workers there are. With n gaps of mean m and standard deviation s, the
    remaining R take R m; were gaps drawn independently, that sum would deviate by s sqrt(R), and R times the mean of n
    by s R / sqrt(n). The range is two standard deviations of both together on either side, s sqrt(R + R^2 / n). Later
    stages answer for more tasks, which the spread holds in part.

    Args:
        gaps: seconds before the end of each stage that was learned, since the end before it.
        remaining: stages.
        waited: seconds since the last end; they are off what is left.

    Returns:
        None for fewer than `ENOUGH` gaps, and where nothing remains.
    """
    if len(gaps) < ENOUGH or not remaining:
        return None
    mean, spread = statistics.fmean(gaps), statistics.stdev(gaps)
    around = DEVIATIONS * spread * math.sqrt(remaining + remaining**2 / len(gaps))
    found = [max(0.0, remaining * mean + shift - waited) for shift in (0.0, -around, around)]
    return TimeLeft(*found)


class Tally:
    """What all trials of a sweep add up to, trial by trial.

    Args:
        trials: where they stand, in the sweep's order.
    """

    def __init__(self, trials: Iterable[TrialState]):
        self.trials = list(trials)
        self.tasks = sum(trial.n_tasks for trial in self.trials)
        self._since = 0.0
        self._best: int | None = None
        self._sum()

    def advance(self, number: int, trial: TrialState) -> None:
        """Have the trial of this number stand there now."""
        before, self.trials[number] = self.trials[number], trial
        known, spans = {id(stage) for stage in before.stages}, zip(before.at_work, trial.at_work, strict=False)
        if len(known & {id(stage) for stage in trial.stages}) < len(known) or any(a > b for a, b in spans):
            self._sum()  # something else is told of it than before: its folder was mended, or a stage told again
            return
        self._remove(number, before)
        self._add(number, trial, known)
        if self._best == number and _rank(trial) < _rank(before):
            self._best = self._ahead(range(len(self.trials)))

    def since(self, moment: float) -> None:
        """Estimate the time left by the stages learned since then, in Unix seconds."""
        if moment != self._since:
            self._since = moment
            self._sum()

    @property
    def counts(self) -> dict[Status, int]:
        """Trials by status, as far as there are some."""
        return {status: self._counts[status] for status in ORDER if self._counts[status]}

    @property
    def learned(self) -> int:
        """Stages that were learned; what trials of one training tell of the same stage counts once."""
        return len(self._learned)

    @property
    def failed(self) -> tuple[TrialState, ...]:
        """The trials that have failed."""
        return tuple(self.trials[number] for number in sorted(self._failed))

    @property
    def best(self) -> TrialState | None:
        """The trial with the highest AP so far, of those that have seen the most tasks: AP falls with their number."""
        return None if self._best is None else self.trials[self._best]

    @property
    def seconds_at_work(self) -> float:
        """How long workers were at work, at least one of them: pauses between runs do not count."""
        return sum((end - begin for begin, end in self._at_work), 0.0)

    def left(self, now: float) -> TimeLeft | None:
        """How long it still takes, by the newest stages learned since the driver began; None where too little is known.

        Trials that have failed are tried again by another run, and count as done.
        """
        if not self._ends:
            return None
        gaps = [end - before for (before, _), (end, reused) in itertools.pairwise(self._ends) if not reused]
        first, reused = self._ends[0]
        if not self._cut and not reused:
            gaps.insert(0, first - (self._since if self._begun is None else self._begun))
        return time_left(gaps, self._remaining, now - self._ends[-1][0])

    def _sum(self) -> None:
        """Add everything up anew."""
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
        """Take away what a trial adds to sums; what it has told so far stays."""
        self._counts[trial.status] -= 1
        self._failed.discard(number)
        self.tasks_done -= trial.tasks_done
        self._remaining -= _remaining(trial)

    def _add(self, number: int, trial: TrialState, known: set[int]) -> None:
        """Add what a trial adds, and tells beyond the stages that are known."""
        self._counts[trial.status] += 1
        if trial.status == "failed":
            self._failed.add(number)
        self.tasks_done += trial.tasks_done
        self._remaining += _remaining(trial)
        for stage in trial.stages:
            if id(stage) not in known:
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
        """The first of these trials that is ahead of the others."""
        begun = (number for number in numbers if self.trials[number].stages)
        return max(begun, key=lambda number: _rank(self.trials[number]), default=None)


def _rank(trial: TrialState) -> tuple[int, float]:
    return len(trial.stages), trial.stages[-1].AP if trial.stages else 0.0


def _remaining(trial: TrialState) -> int:
    return 0 if trial.status in ENDED else trial.n_tasks - trial.tasks_done


def cover(spans: list[Span], span: Span) -> None:
    """Add a span to spans that are apart from each other and in order; those that it touches become one with it."""
    begin, end = span
    after = len(spans)
    while after and spans[after - 1][0] > end:
        after -= 1
    first = after
    while first and spans[first - 1][1] >= begin:
        first -= 1
        begin, end = min(begin, spans[first][0]), max(end, spans[first][1])
    spans[first:after] = [(begin, end)]
