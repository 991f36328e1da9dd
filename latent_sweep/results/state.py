"""Where a sweep stands: its trials' journals, what its workers and its driver say they do, and whether it is driven.

One state for all who show it: the lines of a job's log, the screen of a terminal, `latent-sweep status`. It is read
from files, so that it can be looked at from anywhere; looking changes nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from latent_sweep.labels import label, short_names
from latent_sweep.results.progress import DRIVER, FOLDER
from latent_sweep.store.folders import SweepFolder, TrialFolder, driven_since, driver_of
from latent_sweep.store.journal import Event, Status, stages, status
from latent_sweep.sweep.tuning import tuning_name

Course = Literal["not started", "running", "interrupted", "ended"]

ENDED: tuple[Status, ...] = ("finished", "stopped", "failed")
ENOUGH = 3
"""Learned stages from which on the time left is estimated."""
DEVIATIONS = 2.0
"""Standard deviations on either side of the time left."""


@dataclass(frozen=True)
class Stage:
    """A task that a trial has learned and scored."""

    task: str
    tasks_seen: int
    reused: bool
    """Whether its snapshot was in the store."""
    seconds_train: float
    AP: float
    FM: float
    time: float
    """When it was done, in Unix seconds."""


@dataclass(frozen=True)
class TrialState:
    """Where a trial stands, by its journal."""

    trial_id: str
    name: str
    """Its settings that vary, for people."""
    n_tasks: int
    status: Status
    stages: tuple[Stage, ...]
    at_work: tuple[tuple[float, float], ...]
    """From when to when workers were at work on it, in Unix seconds; an attempt that was cut: to its last event."""
    message: str | None
    """Why it has failed or was stopped."""
    kind: str | None
    """Of its failure."""
    task: str | None
    """At which it has failed."""
    idle: bool
    """Whether its worker has failed or was lost, and no other has taken it up."""
    changed: float
    """When its last event was told; 0 where there is none."""

    @property
    def tasks_done(self) -> int:
        """Tasks that need no more work: of a trial that was stopped or has finished, all."""
        return self.n_tasks if self.status in ("finished", "stopped") else len(self.stages)


@dataclass(frozen=True)
class Running:
    """What a worker does with its pack."""

    trials: tuple[str, ...]
    """Names of its trials that have not ended."""
    doing: str
    task: str | None
    position: int | None
    """Of the task, 0-based."""
    n_tasks: int
    step: int
    """Of `steps`, 0 of 0 where nothing is counted: optimizer steps, or, of answering, tasks seen."""
    steps: int
    loss: float | None
    done: float
    """Share of the pack's tasks; learning a task is taken for nine tenths of it, answering for the last."""
    since: float
    """When it began this, in Unix seconds."""
    host: str
    pid: int
    gpus: str
    """Numbers of its GPUs on its host; empty where it has none, or none that Ray gave it."""
    workers: int


@dataclass(frozen=True)
class TimeLeft:
    """Seconds until all trials have ended, with the range that they are expected in."""

    seconds: float
    shortest: float
    longest: float


@dataclass(frozen=True)
class SweepState:
    """Where a sweep stands."""

    name: str
    place: str
    """Its folder."""
    tuning_of: str | None
    """The sweep whose candidates these trials are."""
    time: float
    """When this was found, in Unix seconds."""
    driver: str | None
    """The process that runs it; None where none does."""
    since: float
    """When its driver began, in Unix seconds; 0 without one."""
    driving: str | None
    """What the driver does, as long as no worker says what it does."""
    driving_since: float
    trials: tuple[TrialState, ...]
    running: tuple[Running, ...]

    @property
    def course(self) -> Course:
        """Whether it has begun, goes on, or is over; interrupted: trials have not ended, and nobody drives it."""
        if self.driver is not None:
            return "running"
        if all(trial.status in ENDED for trial in self.trials):
            return "ended"
        return "interrupted" if any(trial.changed for trial in self.trials) else "not started"

    @cached_property
    def counts(self) -> dict[Status, int]:
        """Trials by status, as far as there are some."""
        found = Counter(trial.status for trial in self.trials)
        order: tuple[Status, ...] = ("finished", "stopped", "failed", "running", "pending")
        return {status: found[status] for status in order if found[status]}

    @property
    def trials_done(self) -> int:
        """Trials that have finished or were stopped early."""
        return sum(trial.status in ("finished", "stopped") for trial in self.trials)

    @property
    def tasks(self) -> int:
        """Tasks of all trials."""
        return sum(trial.n_tasks for trial in self.trials)

    @property
    def tasks_done(self) -> int:
        """Tasks that need no more work."""
        return sum(trial.tasks_done for trial in self.trials)

    @property
    def learned(self) -> int:
        """Stages that were learned for this sweep."""
        return sum(not stage.reused for trial in self.trials for stage in trial.stages)

    @property
    def reused(self) -> int:
        """Stages whose snapshot was in the store."""
        return sum(stage.reused for trial in self.trials for stage in trial.stages)

    @property
    def failed(self) -> list[TrialState]:
        """The trials that have failed."""
        return [trial for trial in self.trials if trial.status == "failed"]

    @property
    def best(self) -> TrialState | None:
        """The trial with the highest AP so far, of those that have seen the most tasks: AP falls with their number."""
        begun = [trial for trial in self.trials if trial.stages]
        return max(begun, key=lambda trial: (len(trial.stages), trial.stages[-1].AP), default=None)

    @property
    def seconds_at_work(self) -> float:
        """How long workers were at work, at least one of them: pauses between runs do not count."""
        spans = sorted(span for trial in self.trials for span in trial.at_work)
        total, until = 0.0, float("-inf")
        for begin, end in spans:
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        return total

    @cached_property
    def left(self) -> TimeLeft | None:
        """How long it still takes, by the stages learned since its driver began; None where too little is known.

        Trials that have failed are tried again by another run, and count as done.
        """
        if self.driver is None:
            return None
        told = [(stage.time, stage.reused) for trial in self.trials for stage in trial.stages]
        ends = sorted(end for end in told if end[0] >= self.since)
        begun = [begin for trial in self.trials for begin, _ in trial.at_work if begin >= self.since]
        points = [(min(begun, default=self.since), False), *ends]
        gaps = [end - before for (before, _), (end, reused) in itertools.pairwise(points) if not reused]
        remaining = sum(trial.n_tasks - trial.tasks_done for trial in self.trials if trial.status not in ENDED)
        return time_left(gaps, remaining, self.time - ends[-1][0]) if ends else None

    def record(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        best = self.best
        return {
            "name": self.name,
            "place": self.place,
            "tuning_of": self.tuning_of,
            "time": self.time,
            "course": self.course,
            "driver": self.driver,
            "driving": self.driving,
            "counts": self.counts,
            "tasks": self.tasks,
            "tasks_done": self.tasks_done,
            "stages_learned": self.learned,
            "stages_reused": self.reused,
            "seconds_at_work": self.seconds_at_work,
            "seconds_left": asdict(self.left) if self.left else None,
            "best": None
            if best is None
            else {
                "trial_id": best.trial_id,
                "name": best.name,
                "AP": best.stages[-1].AP,
                "tasks_seen": len(best.stages),
            },
            "running": [asdict(running) for running in self.running],
            "failed": [
                {name: getattr(trial, name) for name in ("trial_id", "name", "kind", "message", "task")}
                for trial in self.failed
            ],
        }


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


def current(sweep: SweepFolder) -> SweepFolder:
    """Return the sweep, or the one with its candidates: where that is being run, or is all that there is."""
    tuning = SweepFolder(sweep.storage, tuning_name(sweep.name))
    sweep.storage.pull(tuning.path)
    if not tuning.exists:
        return sweep
    here = not sweep.exists or (driven_since(sweep) is None and driven_since(tuning) is not None)
    return tuning if here else SweepFolder(sweep.storage, sweep.name)  # it reads anew what a driver has written anew


class SweepWatch:
    """Looks at a sweep again and again, and reads only the journals that have changed since.

    Args:
        drives: whether this process drives the sweep.
    """

    def __init__(self, sweep: SweepFolder, drives: bool = False):
        self.sweep = sweep
        self._drives, self._began = drives, time.time()
        self._names = short_names(sweep.axes)
        self._known: dict[str, tuple[tuple[int, int], TrialState]] = {}

    def look(self) -> SweepState:
        """Return where the sweep stands now.

        Raises:
            StoreError: a journal is damaged, or the object store that tells who drives the sweep cannot be reached.
        """
        since = self._began if self._drives else driven_since(self.sweep)  # first: a journal tells its end before
        trials = tuple(map(self._trial, self.sweep))
        told = [] if since is None else [content for content in self._told() if content["time"] >= since]
        driving = _read(self.sweep.path / FOLDER / DRIVER) if since is not None else {}
        if driving and driving["time"] < max((content["time"] for content in told), default=since or 0.0):
            driving = {}  # an earlier driver's, or workers have told of more since
        return SweepState(
            name=self.sweep.name,
            place=str(self.sweep.path),
            tuning_of=self.sweep.tuning_of,
            time=time.time(),
            driver=None if since is None else "this process" if self._drives else driver_of(self.sweep),
            since=since or 0.0,
            driving=str(driving["doing"]) if "doing" in driving else None,
            driving_since=driving.get("time", 0.0),
            trials=trials,
            running=_workers(told, trials),
        )

    def _trial(self, trial: TrialFolder) -> TrialState:
        try:
            stat = trial.journal.path.stat()
            version = stat.st_size, stat.st_mtime_ns
        except OSError:
            version = 0, 0
        known = self._known.get(trial.trial_id)
        if known is None or known[0] != version:
            name = label({self._names[path]: value for path, value in trial.values.items()}) or trial.trial_id
            known = self._known[trial.trial_id] = version, _trial_state(trial, name)
        return known[1]

    def _told(self) -> list[dict[str, Any]]:
        """What workers say they do, the newest first."""
        paths = [path for path in sorted((self.sweep.path / FOLDER).glob("*.json")) if path.name != DRIVER]
        return sorted((content for path in paths if (content := _read(path))), key=lambda content: -content["time"])


def _workers(told: Sequence[Mapping[str, Any]], trials: Sequence[TrialState]) -> tuple[Running, ...]:
    """What each worker does that has trials left, by their names; of two that tell of one trial, the newer one."""
    left = {trial.trial_id: trial for trial in trials if trial.status not in ("finished", "stopped")}
    found = []
    for content in told:
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # not as we write it: for display only
            if (worker := _running(content, left)) is not None:
                found.append(worker)
                for trial_id in content["trials"]:
                    left.pop(trial_id, None)
    return tuple(sorted(found, key=lambda worker: worker.trials))


def _running(content: Mapping[str, Any], left: Mapping[str, TrialState]) -> Running | None:
    """What a worker says it does; None where its trials have ended, or it was lost since.

    Args:
        left: trials that have not ended, by trial id.
    """
    going = [left[i] for i in content["trials"] if i in left]
    going = [trial for trial in going if not (trial.idle and trial.changed > content["time"])]
    going = [trial for trial in going if trial.status != "failed"] or going  # before it is said that it is tried again
    if not going:
        return None
    doing, n_tasks, step, steps = str(content["doing"]), going[0].n_tasks, int(content["step"]), int(content["steps"])
    share = step / steps if steps else 0.0
    parts = {"learning": 0.9 * share, "fitting the router": 0.9, "answering": 0.9 + 0.1 * share}
    done = statistics.fmean(trial.tasks_done for trial in going) + parts.get(doing, 0.0)
    return Running(
        trials=tuple(trial.name for trial in going),
        doing=doing,
        task=None if content["task"] is None else str(content["task"]),
        position=None if content["position"] is None else int(content["position"]),
        n_tasks=n_tasks,
        step=step,
        steps=steps,
        loss=None if content["loss"] is None else float(content["loss"]),
        done=min(1.0, done / n_tasks),
        since=_moment(content["since"]),
        host=str(content["host"]),
        pid=int(content["pid"]),
        gpus=str(content["gpus"]),
        workers=int(content["workers"]),
    )


def _moment(seconds: Any) -> float:
    """Check a Unix time that is read from a file that nothing seals."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        raise ValueError(f"found {seconds!r}; expected Unix seconds")
    return float(seconds)


def _trial_state(trial: TrialFolder, name: str) -> TrialState:
    events = trial.events()
    last = events[-1] if events else {}
    found = status(events)
    failed = last if found == "failed" else {}
    return TrialState(
        trial_id=trial.trial_id,
        name=name,
        n_tasks=trial.n_tasks,
        status=found,
        stages=tuple(map(_stage, stages(events))),
        at_work=tuple(_spans(events)),
        message=failed.get("message") or (last.get("reason") if found == "stopped" else None),
        kind=failed.get("kind"),
        task=failed.get("task"),
        idle=last.get("event") in ("failed", "lost"),
        changed=last.get("time", 0.0),
    )


def _stage(event: Event) -> Stage:
    m = event["metrics"]
    seconds = m.get("seconds_train", 0.0)
    return Stage(event["task"], event["tasks_seen"], event["reused"], seconds, m["AP"], m["FM"], event["time"])


def _spans(events: Sequence[Event]) -> Iterator[tuple[float, float]]:
    """From when to when each attempt has told something."""
    starts = [number for number, event in enumerate(events) if event["event"] == "started"]
    for start, end in itertools.pairwise([*starts, len(events)]):
        yield events[start]["time"], events[end - 1]["time"]


def _read(path: Path) -> dict[str, Any]:
    """Read what somebody says they do, and when they said so; empty where it cannot be read: it is for display only."""
    try:
        content = json.loads(path.read_bytes())
        return content | {"time": _moment(content["time"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return {}
