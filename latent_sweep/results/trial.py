"""A trial of a sweep with its journal and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from latent_sweep.data.schema import BenchmarkSettings
from latent_sweep.labels import label, short_names
from latent_sweep.metrics.matrix import ScoreMatrix
from latent_sweep.results.definition import Measure, defined_measures, defined_metrics, learns_in_turn, trial_name
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.journal import Event, Stage, Status, final_metrics, stages, status
from latent_sweep.storage.trial_files import PREDICTIONS, corrupt_files, recorded_matrix


@dataclass(frozen=True, eq=False)
class TrialResults:
    """A trial's results. Its journal is read once, when needed, and raises StorageError if it is corrupt."""

    sweep: SweepFolder
    folder: TrialFolder

    @cached_property
    def events(self) -> list[Event]:
        return self.folder.events()

    @cached_property
    def stages(self) -> list[Stage]:
        return stages(self.events)

    @property
    def status(self) -> Status:
        return status(self.events)

    @property
    def is_finished(self) -> bool:
        return self.status == "finished" and len(self.stages) == self.folder.n_tasks

    @property
    def name(self) -> str:
        return trial_name(self.sweep, self.folder)

    @property
    def configuration(self) -> str:
        names = {axis: name for axis, name in short_names(self.sweep.axes).items() if axis != self.sweep.seed_axis}
        return label({name: self.folder.values.get(axis) for axis, name in names.items()})

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.stages[-1].scores) if self.stages else ()

    @property
    def matrix(self) -> ScoreMatrix:
        return recorded_matrix(self.stages)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest value of each metric, without undefined measures."""
        if not self.stages:
            return {}
        return defined_metrics(self.folder, self.stages, {**self.stages[-1].metrics, **final_metrics(self.events)})

    @property
    def learns_in_turn(self) -> bool:
        return learns_in_turn(self.folder, self.stages)

    @property
    def measures(self) -> tuple[Measure, ...]:
        return defined_measures(self.folder, self.stages)

    def benchmark(self) -> BenchmarkSettings:
        return BenchmarkSettings.model_validate(self.folder.settings["benchmark"])

    def predictions(self) -> dict[str, list[dict[str, Any]]] | None:
        """Return the predictions after the last task; None if a file does not match the journal."""
        if corrupt_files(self.folder.path, self.events):
            return None
        files = {task: self.folder.path / PREDICTIONS / f"{task}.jsonl" for task in self.tasks}
        return {task: [json.loads(line) for line in path.read_bytes().splitlines()] for task, path in files.items()}


def fitting(trials: Sequence[TrialResults], wanted: str) -> list[TrialResults]:
    """Return the trials with this id or name, else those whose id begins so, else those whose name has these words."""
    words = set(wanted.split())
    return (
        [trial for trial in trials if wanted in (trial.folder.trial_id, trial.name)]
        or [trial for trial in trials if trial.folder.trial_id.startswith(wanted)]
        or [trial for trial in trials if words <= set(trial.name.split())]
    )


def listed(trials: Sequence[TrialResults], most: int = 8) -> str:
    """List trials by id and name, a line each, for an error message."""
    lines = [f"\n  {trial.folder.trial_id}  {trial.name}" for trial in trials]
    return "".join(lines[:most]) + (f"\n  ... and {len(lines) - most} more" if len(lines) > most else "")
