"""Where a sweep stands: its trials' journals, what its workers and its driver say they do, and whether it is driven.

One state for all who show it: the lines of a job's log, the screen of a terminal, `latent-sweep status`. It is read
from files, so that it can be looked at from anywhere; looking changes nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from latent_sweep.errors import StoreError
from latent_sweep.labels import label, short_names
from latent_sweep.monitor.progress import DRIVING, WORKING
from latent_sweep.results.trial_states import ENDED, Tally, TimeLeft, TrialState, advanced
from latent_sweep.storage.files import NO_FILE, FileState, read_json_or_nothing, state_of
from latent_sweep.storage.folders import SweepFolder, TrialFolder, driven_since, driver_of, tuning_name
from latent_sweep.storage.heartbeat import FOLDER, telling_of, told_journals
from latent_sweep.storage.journal import START, Place, Status

ROUND = 60
"""Looks within which the journals of all trials are looked at, whoever tells of them."""

Course = Literal["not started", "running", "interrupted", "ended"]


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

    counts: dict[Status, int]
    """Trials by status, as far as there are some."""
    tasks: int
    """Tasks of all trials."""
    tasks_done: int
    """Tasks that need no more work."""
    learned: int
    """Stages that were learned for this sweep."""
    reused: int
    """Stages whose snapshot was in the store."""
    failed: tuple[TrialState, ...]
    """The trials that have failed."""
    best: TrialState | None
    """The trial with the highest AP so far, of those that have seen the most tasks: AP falls with their number."""
    seconds_at_work: float
    """How long workers were at work, at least one of them: pauses between runs do not count."""
    left: TimeLeft | None
    """How long it still takes, by the stages learned since its driver began; None where too little is known."""

    @property
    def course(self) -> Course:
        """Whether it has begun, goes on, or is over; interrupted: trials have not ended, and nobody drives it."""
        if self.driver is not None:
            return "running"
        if sum(self.counts.get(status, 0) for status in ENDED) == len(self.trials):
            return "ended"
        return "not started" if self.counts.get("pending") == len(self.trials) else "interrupted"

    @property
    def trials_done(self) -> int:
        """Trials that have finished or were stopped early."""
        return self.counts.get("finished", 0) + self.counts.get("stopped", 0)

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
            "lost": [
                {name: getattr(trial, name) for name in ("trial_id", "name", "message")}
                for trial in self.trials
                if self.course == "interrupted" and trial.status == "running"
            ],
            "failed": [
                {name: getattr(trial, name) for name in ("trial_id", "name", "kind", "message", "task")}
                for trial in self.failed
            ],
        }


def current(sweep: SweepFolder) -> SweepFolder:
    """Return the sweep, or the one with its candidates: where that is being run, or is all that there is."""
    tuning = SweepFolder(sweep.storage, tuning_name(sweep.name))
    sweep.storage.pull(tuning.path)
    if not tuning.exists:
        return sweep
    here = not sweep.exists or (driven_since(sweep) is None and driven_since(tuning) is not None)
    return tuning if here else SweepFolder(sweep.storage, sweep.name)  # it reads anew what a driver has written anew


class SweepWatch:
    """Looks at a sweep again and again, and reads only what journals have more than before.

    Of a sweep that is driven, it looks at those journals that somebody tells of; at each look also at some of the
    others, so that what nobody could tell of any more is seen within `ROUND` looks.

    Args:
        drives: whether this process drives the sweep.
    """

    def __init__(self, sweep: SweepFolder, drives: bool = False):
        self.sweep = sweep
        self._drives, self._began = drives, time.time()
        self._trials: list[TrialFolder] = []
        self._numbers: dict[str, int] = {}
        self._known: list[tuple[FileState, Place]] = []
        self._tally = Tally([])
        self._driven: float | None = None
        self._told: dict[Path, tuple[FileState, dict[str, Any]]] = {}
        self._round = 0

    def look(self) -> SweepState:
        """Return where the sweep stands now.

        Raises:
            StoreError: a journal is damaged, or the object store that tells who drives the sweep cannot be reached.
        """
        since = self._began if self._drives else driven_since(self.sweep)  # first: a journal tells its end before
        told = self._read_told()
        if not self._trials:
            self._begin()
        everything = since is None or since != self._driven
        for number in range(len(self._trials)) if everything else self._moved(told):
            self._look_at(number)
        self._driven = since
        self._tally.since(since or 0.0)
        now, tally = time.time(), self._tally
        working, driving = ([], {}) if since is None else _said(told, since)
        return SweepState(
            name=self.sweep.name,
            place=str(self.sweep.path),
            tuning_of=self.sweep.tuning_of,
            time=now,
            driver=None if since is None else "this process" if self._drives else driver_of(self.sweep),
            since=since or 0.0,
            driving=str(driving["doing"]) if "doing" in driving else None,
            driving_since=driving.get("time", 0.0),
            trials=tuple(tally.trials),
            running=_workers(working, tally.trials, self._numbers),
            counts=tally.counts,
            tasks=tally.tasks,
            tasks_done=tally.tasks_done,
            learned=tally.learned,
            reused=tally.reused,
            failed=tally.failed,
            best=tally.best,
            seconds_at_work=tally.seconds_at_work,
            left=None if since is None else tally.left(now),
        )

    def _begin(self) -> None:
        names = short_names(self.sweep.axes)

        def pending(trial: TrialFolder) -> TrialState:
            name = label({names[path]: value for path, value in trial.values.items()}) or trial.trial_id
            return TrialState(trial.trial_id, trial.training_id, name, trial.n_tasks)

        self._trials = list(self.sweep)
        self._numbers = {trial.trial_id: number for number, trial in enumerate(self._trials)}
        self._known = [(NO_FILE, START)] * len(self._trials)
        self._tally = Tally(map(pending, self._trials))

    def _moved(self, told: Sequence[Mapping[str, Any]]) -> list[int]:
        """Numbers of the trials whose journals somebody tells of, and of those whose turn it is."""
        written = set(telling_of(self.sweep.path).written()).union(*map(told_journals, told))
        self._round = (self._round + 1) % ROUND
        turn = range(self._round, len(self._trials), ROUND)
        return [*(self._numbers[trial_id] for trial_id in written if trial_id in self._numbers), *turn]

    def _look_at(self, number: int) -> None:
        """Read what the journal of a trial has more than before."""
        trial, (known, place) = self._trials[number], self._known[number]
        version = state_of(trial.journal.path)
        if version == known:
            return
        state = self._tally.trials[number]
        try:
            if version.size < place.offset:
                raise StoreError(f"{trial.journal.path}: shorter than before")
            events, place = trial.journal.read_on(place)
        except StoreError:  # another journal lies there now, or this one is damaged
            state = TrialState(state.trial_id, state.training_id, state.name, state.n_tasks)
            events, place = trial.journal.read_on(START)
        self._known[number] = version, place
        self._tally.advance(number, advanced(state, events))

    def _read_told(self) -> list[dict[str, Any]]:
        """What the processes of the sweep tell."""
        paths = sorted((self.sweep.path / FOLDER).glob("*.json"))
        found = {}
        for path in paths:
            version = state_of(path)
            known = self._told.get(path)
            if known is None or known[0] != version:
                known = version, read_json_or_nothing(path)
            found[path] = known
        self._told = found
        return [content for _, content in found.values() if isinstance(content, dict)]


def _said(told: Sequence[Mapping[str, Any]], since: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What workers say they do, the newest first, and what the driver says; both since it began."""

    def said(part: str) -> list[dict[str, Any]]:
        found = []
        for content in told:
            with suppress(KeyError, TypeError, ValueError, OverflowError):  # not as we write it: for display only
                one = {"host": content["host"], "pid": content["pid"]} | content[part]
                found.append(one | {"time": _moment(one["time"])})
        return sorted((one for one in found if one["time"] >= since), key=lambda one: -one["time"])

    working, driving = said(WORKING), said(DRIVING)
    newest = working[0]["time"] if working else since
    return working, driving[0] if driving and driving[0]["time"] >= newest else {}


def _workers(
    told: Sequence[Mapping[str, Any]], trials: Sequence[TrialState], numbers: Mapping[str, int]
) -> tuple[Running, ...]:
    """What each worker does that has trials left, by their names; of two that tell of one trial, the newer one."""
    named = [trials[numbers[i]] for content in told for i in _strings(content.get("trials")) if i in numbers]
    left = {trial.trial_id: trial for trial in named if trial.status not in ("finished", "stopped")}
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


def _strings(found: Any) -> list[str]:
    """The texts in what should be a list of them."""
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


def _moment(seconds: Any) -> float:
    """Check a Unix time that is read from a file that nothing seals."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        raise ValueError(f"found {seconds!r}; expected Unix seconds")
    return float(seconds)
