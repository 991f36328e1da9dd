"""Which trials stand for a sweep in pictures, and how they and their tasks are called there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latent_sweep.data.schema import BenchmarkSettings
from latent_sweep.errors import LatentSweepError
from latent_sweep.labels import label, short_names
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.journal import Event, stages, status
from latent_sweep.storage.trial_files import PREDICTIONS, corrupt_files

MOST_DRAWN = 3
"""Configurations that pictures show: more would be read by nobody."""

_LONGEST_TASK_NAME = 24
UNREADABLE = (LatentSweepError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading files raises where they hold something else than they should."""


def reason(error: BaseException) -> str:
    """Why a file could not be read, as a clause for people."""
    said = isinstance(error, (LatentSweepError, OSError))
    return str(error) if said else f"its files hold something else than expected ({type(error).__name__}: {error})"


@dataclass(frozen=True, eq=False)
class FinishedTrial:
    """A finished trial, with what pictures say of it."""

    folder: TrialFolder
    name: str
    """The settings that vary, as `lambda=0.1 seed=0`; the trial's id where none does."""
    configuration: str
    """The same without what repeats a configuration."""
    events: Sequence[Event]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of its tasks, in the order of learning."""
        return tuple(stages(self.events)[-1].scores)

    @property
    def metrics(self) -> Mapping[str, float]:
        """What its journal tells after the last task."""
        return stages(self.events)[-1].metrics

    def settings(self) -> Mapping[str, Any]:
        """Its settings, group by group, as they were resolved.

        Raises:
            ConfigError: they cannot be read.
        """
        return self.folder.settings()

    def benchmark(self) -> BenchmarkSettings:
        """Its benchmark's settings.

        Raises:
            ConfigError, LookupError, ValueError: they cannot be read.
        """
        return BenchmarkSettings.model_validate(self.settings()["benchmark"])

    def predictions(self) -> dict[str, list[dict[str, Any]]] | None:
        """The rows of its predictions after the last task, by task; None where a file is not as the journal says.

        Raises:
            OSError, ValueError: a file cannot be read.
        """
        if corrupt_files(self.folder.path, self.events):
            return None
        files = {task: self.folder.path / PREDICTIONS / f"{task}.jsonl" for task in self.tasks}
        return {task: [json.loads(line) for line in path.read_bytes().splitlines()] for task, path in files.items()}


def finished_trials(sweep: SweepFolder) -> list[FinishedTrial]:
    """Every finished trial of a sweep, in its order; nothing where the sweep cannot be read."""
    return list(_finished(sweep))


def _finished(sweep: SweepFolder) -> Iterator[FinishedTrial]:
    try:
        names, folders = short_names(sweep.axes), list(sweep)
    except UNREADABLE:
        return
    for folder in folders:
        if (found := _finished_trial(sweep, folder, names)) is not None:
            yield found


def finished_trial(sweep: SweepFolder, folder: TrialFolder) -> FinishedTrial | None:
    """One trial, or None where it has not finished or cannot be read."""
    try:
        return _finished_trial(sweep, folder, short_names(sweep.axes))
    except UNREADABLE:
        return None


def _finished_trial(sweep: SweepFolder, folder: TrialFolder, names: Mapping[str, str]) -> FinishedTrial | None:
    try:
        events = folder.events()
    except UNREADABLE:
        return None
    if status(events) != "finished" or len(stages(events)) < folder.n_tasks:
        return None
    values = {axis: folder.values.get(axis) for axis in names}
    name = label({names[axis]: value for axis, value in values.items()})
    repeated = label({names[axis]: value for axis, value in values.items() if axis != sweep.seed_axis})
    return FinishedTrial(folder, name or folder.trial_id, repeated, events)


def first_of_each(trials: Sequence[FinishedTrial], most: int = MOST_DRAWN) -> list[FinishedTrial]:
    """The first repetition of each configuration, of at most so many configurations."""
    found: dict[str, FinishedTrial] = {}
    for trial in trials:
        found.setdefault(trial.configuration, trial)
    return list(found.values())[:most]


def short_task_names(tasks: Sequence[str], longest: int = _LONGEST_TASK_NAME) -> list[str]:
    """Names of tasks with what is too long in their middle left out; names stay different from each other."""
    tail = longest // 3
    short = [t if len(t) <= longest else f"{t[: longest - tail - 1]}…{t[-tail:]}" for t in tasks]
    return [f"{name} ({i + 1})" if short.count(name) > 1 else name for i, name in enumerate(short)]
