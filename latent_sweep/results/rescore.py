"""Recompute every entry of the score matrices from the saved predictions.

Reads a trial's journal, its `scores.json`, its saved predictions with their references and, if it is available, the
benchmark's data, whose references must be the same. Generates and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from latent_sweep.errors import ConfigError, DataError
from latent_sweep.metrics import Metric, ScoreMatrix, score_rows, takes_input
from latent_sweep.results.inputs import read_test_examples
from latent_sweep.results.trial import TrialResults
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.journal import Stage, final_metrics
from latent_sweep.storage.predictions import Answer, Answers, saved_answers
from latent_sweep.storage.trial_files import EPSILON, PREDICTIONS, SCORES, corrupt_files

MEASURES = ("AP", "FM")
ROUNDING = 1e4 * EPSILON
"""Tolerance of AP and FM: far below the digits of tables, far above rounding errors of sums."""


@dataclass(frozen=True)
class Cell:
    """An entry of a score matrix, stored and recomputed."""

    stage: int
    """Tasks seen."""
    task: str
    rows: int
    """Number of answers."""
    stored: float
    recomputed: float

    @property
    def agrees(self) -> bool:
        return abs(self.stored - self.recomputed) <= max(self.rows, 1) * EPSILON


@dataclass(frozen=True)
class Measure:
    """AP or FM, stored and recomputed."""

    stored: float | None
    recomputed: float | None
    """None if a stage that it needs could not be rescored."""

    @property
    def differs(self) -> bool:
        if self.stored is None or self.recomputed is None:
            return False
        return abs(self.stored - self.recomputed) > ROUNDING


@dataclass(frozen=True)
class Rescored:
    """The outcome of rescoring a trial."""

    trial_id: str
    name: str
    status: str
    cells: tuple[Cell, ...] = ()
    measures: Mapping[str, Measure] | None = None
    faults: tuple[str, ...] = ()
    """Other differences."""
    left_out: tuple[str, ...] = ()
    """Stored results that could not be rescored, with the reasons."""
    notes: tuple[str, ...] = ()

    @property
    def different(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if not cell.agrees)

    @property
    def equal(self) -> bool:
        """Whether every stored score was rescored and is the same."""
        return not (self.differs or self.left_out)

    @property
    def differs(self) -> bool:
        measures = (self.measures or {}).values()
        return bool(self.different or self.faults or any(measure.differs for measure in measures))

    def record(self) -> dict[str, Any]:
        return {
            "trial_id": self.trial_id,
            "name": self.name,
            "status": self.status,
            "equal": self.equal,
            "scored_again": len(self.cells),
            "differences": [asdict(cell) for cell in self.different],
            "measures": {name: asdict(measure) for name, measure in (self.measures or {}).items()},
            "faults": list(self.faults),
            "not_scored_again": list(self.left_out),
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        measures = (self.measures or {}).items()
        verdict = "NOT EQUAL" if self.differs else "equal" if self.equal else "equal as far as it could be rescored"
        counts = f"{len(self.cells)} scores of {sum(cell.rows for cell in self.cells)} answers recomputed"
        percentages = [f"{name} {100 * one.recomputed:.2f} %" for name, one in measures if one.recomputed is not None]
        yield f"{self.name}: {verdict}; {', '.join([counts, *percentages])}"
        for cell in self.different:
            values = f"stored {cell.stored!r}, recomputed {cell.recomputed!r}"
            yield f"  stage {cell.stage}, task {cell.task}, {cell.rows} examples: {values}"
        for name, measure in measures:
            if measure.differs:
                yield f"  {name}: stored {measure.stored!r}, recomputed {measure.recomputed!r}"
        yield from (f"  {fault}" for fault in self.faults)
        yield from (f"  not rescored: {reason}" for reason in self.left_out)
        yield from (f"  note: {note}" for note in self.notes)


def rescore(sweep: SweepFolder) -> list[Rescored]:
    """Rescore every trial of a sweep. Raises StorageError if `sweep.json` or a journal is corrupt."""
    return [_rescored(TrialResults(sweep, folder)) for folder in sweep]


def _rescored(trial: TrialResults) -> Rescored:
    path, n_tasks = trial.folder.path, trial.folder.n_tasks
    result = Rescored(trial.folder.trial_id, trial.name, trial.status)
    if not trial.stages:
        return replace(result, notes=(f"{result.status}, without a finished stage",))
    if result.status == "running":
        return replace(result, left_out=("the trial is running: its files may be ahead of its journal",))
    if damaged := corrupt_files(path, trial.events):
        faults = tuple(f"{damage.path} {damage.fault}" for damage in damaged)
        return replace(result, faults=faults, left_out=("its files are corrupt; see `latent-sweep verify --repair`",))
    if len(trial.stages) < n_tasks:
        result = replace(result, notes=(f"{result.status} after {len(trial.stages)} of {n_tasks} tasks",))
    try:
        return _Rescoring(trial).result(result)
    except (OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError) as error:
        fault = f"{path}: a file has an unexpected content: {type(error).__name__}: {error}"
        return replace(result, faults=(fault,), left_out=("its files could not be read",))


class _Rescoring:
    """The files of one trial. Methods raise `UNREADABLE` if one is missing or malformed."""

    def __init__(self, trial: TrialResults):
        self.trial, self.stages, self.tasks = trial, trial.stages, trial.tasks
        self.stored = trial.folder.read_json(SCORES)["scores"]
        lines = {task: _lines(trial.folder.path / PREDICTIONS / f"{task}.jsonl") for task in self.tasks}
        self.newest: Answers = {
            task: [Answer(line["prediction"], line["score"]) for line in own] for task, own in lines.items()
        }
        self.ids = {task: [line["id"] for line in own] for task, own in lines.items()}
        self.references = {task: [line["references"] for line in own] for task, own in lines.items()}
        self.settings = trial.benchmark()
        self._cache: dict[tuple[str, int, str], float] = {}
        """Scores by task, example and prediction: most answers are the same as at the stage before."""

    def result(self, blank: Rescored) -> Rescored:
        rows: dict[int, tuple[float, ...]] = {}
        cells, left_out = [], []
        for stage, answers in self._answers():
            if answers is None:
                left_out.append(f"stage {stage.tasks_seen}: its answers were not kept (run.keep_answers: last)")
            elif problem := self._unscorable({task: stage.scored_by[task] for task in answers}):
                left_out.append(f"stage {stage.tasks_seen}: {problem}")
            else:
                row = self._cells(stage, answers)
                cells += row
                rows[stage.tasks_seen] = tuple(cell.recomputed for cell in row)
        faults, notes = self._check_data()
        return replace(
            blank,
            cells=tuple(cells),
            measures=self._measures(rows),
            faults=tuple(faults),
            left_out=tuple(left_out),
            notes=(*blank.notes, *notes),
        )

    def _answers(self) -> Iterator[tuple[Stage, Answers | None]]:
        """Yield every stage with its answers, None if they were not kept; the newest answers are the predictions."""
        path = self.trial.folder.path
        kept = {stage.tasks_seen: dict(answers) for stage, answers in saved_answers(path, self.stages)}
        for stage in self.stages[:-1]:
            yield stage, kept.get(stage.tasks_seen)
        yield self.stages[-1], kept.get(len(self.stages), self.newest)

    def _unscorable(self, metrics: Mapping[str, Metric]) -> str | None:
        """Return why answers cannot be scored here: a missing metric, or missing inputs that it needs."""
        try:
            for task, metric in metrics.items():
                if takes_input(metric):
                    self._inputs(task)
        except (ConfigError, DataError) as error:
            return str(error)
        return None

    def _inputs(self, task: str) -> list[str]:
        """Return the inputs of a task's examples, which are not saved with the predictions."""
        examples = read_test_examples(self.settings, task)
        if examples.ids != self.ids[task]:
            raise DataError(f"task {task}: its metric needs inputs, and the benchmark's data has other examples")
        return examples.inputs

    def _cells(self, stage: Stage, answers: Answers) -> list[Cell]:
        cells = []
        for task, stored in zip(self.tasks[: stage.tasks_seen], self.stored[stage.tasks_seen - 1], strict=True):
            scores = self._scores(task, stage.scored_by[task], answers[task])
            cells.append(Cell(stage.tasks_seen, task, len(scores), stored, float(np.mean(scores))))
        return cells

    def _scores(self, task: str, metric: Metric, answers: Sequence[Answer]) -> list[float]:
        if len(answers) != len(self.references[task]):
            raise ValueError(f"task {task}: {len(answers)} answers for {len(self.references[task])} examples")
        keys = [(task, row, answer.prediction) for row, answer in enumerate(answers)]
        if new := [key for key in keys if key not in self._cache]:
            references = [self.references[task][row] for _, row, _ in new]
            inputs = self._inputs(task) if takes_input(metric) else None
            texts = None if inputs is None else [inputs[row] for _, row, _ in new]
            predictions = [prediction for *_, prediction in new]
            scores = score_rows(metric, predictions, references, self.settings.references, texts)
            self._cache |= dict(zip(new, map(float, scores), strict=True))
        return [self._cache[key] for key in keys]

    def _measures(self, rows: Mapping[int, tuple[float, ...]]) -> dict[str, Measure]:
        stored = final_metrics(self.trial.events)
        recomputed: dict[str, float] = {}
        if len(rows) == len(self.stages):
            recomputed = ScoreMatrix(self.tasks, tuple(rows[seen] for seen in sorted(rows))).measures()
        elif (last := rows.get(len(self.stages))) is not None:
            recomputed = {"AP": float(np.mean(last))}
        return {name: Measure(stored.get(name), recomputed.get(name)) for name in MEASURES}

    def _check_data(self) -> tuple[list[str], list[str]]:
        """Compare ids, references and metrics with the benchmark's data; return faults, and notes on missing data."""
        metrics = self.stages[-1].scored_by
        faults, notes = [], []
        for task in self.tasks:
            try:
                ids, _, references, metric = read_test_examples(self.settings, task)
            except (ConfigError, DataError) as error:
                notes.append(f"references of {task} were not compared with the benchmark's data: {error}")
                continue
            if metrics.get(task, metric) != metric:
                faults.append(f"task {task}: scored by {metrics[task]}; its benchmark has {metric}")
            if ids != self.ids[task]:
                faults.append(f"task {task}: the benchmark's data has other examples, by their ids")
            elif other := sum(map(list.__ne__, self.references[task], references)):
                faults.append(f"task {task}: {other} of {len(ids)} examples have other references than the benchmark's")
        return faults, notes


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # str.splitlines splits at more characters
