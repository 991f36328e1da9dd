"""Are the scores those of the answers? Every entry of a score matrix is computed again from the answers that are kept.

Read are a trial's journal, its `scores.json`, its kept answers, the references beside its predictions and, where it is
at hand, the benchmark's own data, which must hold the same references. Nothing is generated and nothing is changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from latent_sweep.data.schema import BenchmarkSettings
from latent_sweep.errors import ConfigError, DataError
from latent_sweep.metrics import Metric, RefsPolicy, ScoreMatrix, score_rows, takes_input
from latent_sweep.results.definition import trial_name
from latent_sweep.results.inputs import benchmark_rows
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.journal import Event, Stage, final_metrics, stages, status
from latent_sweep.storage.predictions import Answer, Answers, saved_answers
from latent_sweep.storage.trial_files import EPSILON, PREDICTIONS, SCORES, corrupt_files

MEASURES = ("AP", "FM")
ROUNDING = 1e4 * EPSILON
"""What AP and FM may differ by: far below anything that a table shows, far above what the order of a sum does."""


@dataclass(frozen=True)
class Cell:
    """One entry of a score matrix, as it is stored and as the answers give it."""

    stage: int
    """Tasks seen."""
    task: str
    rows: int
    """Answers behind it."""
    stored: float
    recomputed: float

    @property
    def agrees(self) -> bool:
        """Whether both are the same, but for the order in which a machine sums."""
        return abs(self.stored - self.recomputed) <= max(self.rows, 1) * EPSILON


@dataclass(frozen=True)
class Measure:
    """AP or FM, as the trial's journal tells it and as the recomputed scores give it."""

    stored: float | None
    """None where the journal tells none."""
    recomputed: float | None
    """None where a stage that it reads could not be scored again."""

    @property
    def differs(self) -> bool:
        """Whether both are there and are not the same."""
        if self.stored is None or self.recomputed is None:
            return False
        return abs(self.stored - self.recomputed) > ROUNDING


@dataclass(frozen=True)
class Rescored:
    """One trial, scored again."""

    trial_id: str
    name: str
    status: str
    cells: tuple[Cell, ...] = ()
    """Every entry that was scored again."""
    measures: Mapping[str, Measure] | None = None
    faults: tuple[str, ...] = ()
    """What else differs."""
    left_out: tuple[str, ...] = ()
    """What is stored and could not be scored again, and why."""
    notes: tuple[str, ...] = ()
    """What is no fault, and worth knowing."""

    @property
    def different(self) -> tuple[Cell, ...]:
        """The entries whose stored score is not that of the answers."""
        return tuple(cell for cell in self.cells if not cell.agrees)

    @property
    def equal(self) -> bool:
        """Whether every score that is stored was computed again and is the same."""
        return not (self.differs or self.left_out)

    @property
    def differs(self) -> bool:
        """Whether anything that was looked at is not as it is stored."""
        measures = (self.measures or {}).values()
        return bool(self.different or self.faults or any(measure.differs for measure in measures))

    def record(self) -> dict[str, Any]:
        """The trial as JSON."""
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
        """The trial for people: what differs, what was left out, and what was looked at."""
        found = "NOT EQUAL" if self.differs else "equal" if self.equal else "equal as far as it could be scored again"
        yield f"{self.name}: {found}; {self._looked_at()}"
        for cell in self.different:
            found = f"stored {cell.stored!r}, recomputed {cell.recomputed!r}"
            yield f"  stage {cell.stage}, task {cell.task}, {cell.rows} rows: {found}"
        for name, measure in (self.measures or {}).items():
            if measure.differs:
                yield f"  {name}: stored {measure.stored!r}, recomputed {measure.recomputed!r}"
        yield from (f"  {fault}" for fault in self.faults)
        yield from (f"  not scored again: {reason}" for reason in self.left_out)
        yield from (f"  note: {note}" for note in self.notes)

    def _looked_at(self) -> str:
        known = [
            f"{name} {100 * measure.recomputed:.2f} %"
            for name, measure in (self.measures or {}).items()
            if measure.recomputed is not None
        ]
        rows = sum(cell.rows for cell in self.cells)
        return ", ".join([f"{len(self.cells)} scores of {rows} answers computed again", *known])


def rescore(sweep: SweepFolder) -> list[Rescored]:
    """Score every trial of a sweep again, from the answers that it has kept.

    Raises:
        StorageError: `sweep.json` or a journal is damaged.
    """
    return [_rescored(sweep, trial) for trial in sweep]


def _rescored(sweep: SweepFolder, trial: TrialFolder) -> Rescored:
    events = trial.events()
    told, result = stages(events), Rescored(trial.trial_id, trial_name(sweep, trial), status(events))
    if not told:
        return replace(result, notes=(f"{result.status}, without a finished stage: there is nothing to score again",))
    if result.status == "running":
        return replace(result, left_out=("the trial is running, and its files may be ahead of its journal",))
    if found := corrupt_files(trial.path, events):
        faults = tuple(f"{damage.path} {damage.fault}" for damage in found)
        return replace(result, faults=faults, left_out=("its files are damaged; see `latent-sweep verify --repair`",))
    notes = []
    if len(told) < trial.n_tasks:
        notes.append(f"{result.status} after {len(told)} of {trial.n_tasks} tasks; the others have no scores")
    try:
        return _Rescoring(trial, told, result, notes).result(events)
    except (OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError) as error:
        fault = f"{trial.path}: a file holds something else than it should: {type(error).__name__}: {error}"
        return replace(result, faults=(fault,), left_out=("its files could not be read",))


class _Rescoring:
    """One trial's files as read, to score its stages again.

    Raises:
        OSError, ConfigError, ValueError, LookupError, TypeError, AttributeError: a file is missing, or holds something
            else than it should.
    """

    def __init__(self, trial: TrialFolder, told: Sequence[Stage], blank: Rescored, notes: list[str]):
        self.trial, self.told, self.blank, self.notes = trial, told, blank, notes
        self.tasks = list(told[-1].scores)
        self.stored = trial.read_json(SCORES)["scores"]
        lines = {task: _lines(trial.path / PREDICTIONS / f"{task}.jsonl") for task in self.tasks}
        self.newest: Answers = {
            task: [Answer(line["prediction"], line["score"]) for line in found] for task, found in lines.items()
        }
        self.ids = {task: [line["id"] for line in found] for task, found in lines.items()}
        self.references = {task: [line["references"] for line in found] for task, found in lines.items()}
        self.settings = BenchmarkSettings.model_validate(trial.settings()["benchmark"])
        self.known: dict[tuple[str, int, str], float] = {}
        """Scores by task, row and prediction: most answers are those of the stage before."""

    def result(self, events: Sequence[Event]) -> Rescored:
        """Score what can be scored again."""
        rows: dict[int, tuple[float, ...]] = {}
        cells, left_out = [], []
        for event, answers in self._answers():
            seen = event.tasks_seen
            if answers is None:
                left_out.append(
                    f"stage {seen}: its answers were not kept (run.keep_answers: last, or an earlier version)"
                )
            elif not (metrics := event.scored_by):
                left_out.append(f"stage {seen}: an earlier version scored it, and does not say by which metrics")
            elif problem := self._unscorable({task: metrics[task] for task in answers}):
                left_out.append(f"stage {seen}: {problem}")
            else:
                found = self._cells(event, answers, metrics)
                cells += found
                rows[seen] = tuple(cell.recomputed for cell in found)
        return replace(
            self.blank,
            cells=tuple(cells),
            measures=self._measures(rows, events),
            faults=tuple(self._data_faults()),
            left_out=tuple(left_out),
            notes=tuple(self.notes),
        )

    def _answers(self) -> Iterator[tuple[Stage, Answers | None]]:
        """Yield every stage with its answers; None where they were not kept. The newest are also the predictions."""
        kept = {event.tasks_seen: dict(answers) for event, answers in saved_answers(self.trial.path, self.told)}
        for event in self.told[:-1]:
            yield event, kept.get(event.tasks_seen)
        yield self.told[-1], kept.get(len(self.told), self.newest)

    def _unscorable(self, metrics: Mapping[str, Metric]) -> str | None:
        """Say why answers cannot be scored here: their metric is not here, or it reads inputs and those are not."""
        try:
            for task, metric in metrics.items():
                if takes_input(metric):
                    self._inputs(task)
        except (ConfigError, DataError) as error:
            return str(error)
        return None

    def _inputs(self, task: str) -> list[str]:
        """The inputs of a task's rows, which are not kept beside the answers.

        Raises:
            ConfigError, DataError: the benchmark's data is not at hand, or has other rows.
        """
        rows = benchmark_rows(self.settings, task)
        if rows.ids != self.ids[task]:
            raise DataError(f"task {task}: its metric reads inputs, and the benchmark's data has other rows")
        return rows.inputs

    def _cells(self, event: Stage, answers: Answers, metrics: Mapping[str, Metric]) -> list[Cell]:
        """Score one stage's answers."""
        seen = event.tasks_seen
        found = []
        for task, stored in zip(self.tasks[:seen], self.stored[seen - 1], strict=True):
            scores = self._scores(task, metrics[task], answers[task])
            found.append(Cell(seen, task, len(scores), stored, float(np.mean(scores))))
        return found

    def _scores(self, task: str, metric: Metric, answers: Sequence[Answer]) -> list[float]:
        """Score the answers of one task, each prediction of a row once."""
        if len(answers) != len(self.references[task]):
            raise ValueError(f"task {task}: {len(answers)} answers for {len(self.references[task])} rows")
        keys = [(task, row, answer.prediction) for row, answer in enumerate(answers)]
        if new := [key for key in keys if key not in self.known]:
            policy: RefsPolicy = self.settings.references
            references = [self.references[task][row] for _, row, _ in new]
            inputs = self._inputs(task) if takes_input(metric) else None
            texts = None if inputs is None else [inputs[row] for _, row, _ in new]
            scores = score_rows(metric, [prediction for *_, prediction in new], references, policy, texts)
            self.known |= dict(zip(new, map(float, scores), strict=True))
        return [self.known[key] for key in keys]

    def _measures(self, rows: Mapping[int, tuple[float, ...]], events: Sequence[Event]) -> dict[str, Measure]:
        """AP and FM of the recomputed rows, beside those that tables print."""
        stored = final_metrics(events)
        found: dict[str, float] = {}
        if len(rows) == len(self.told):
            matrix = ScoreMatrix(tuple(self.tasks), tuple(rows[seen] for seen in sorted(rows)))
            found = matrix.measures()
        elif (last := rows.get(len(self.told))) is not None:
            found = {"AP": float(np.mean(last))}
        return {name: Measure(stored.get(name), found.get(name)) for name in MEASURES}

    def _data_faults(self) -> Iterator[str]:
        """Hold references and metrics against the benchmark, where it is at hand."""
        metrics = self.told[-1].scored_by
        for task in self.tasks:
            try:
                ids, _, references, metric = benchmark_rows(self.settings, task)
            except (ConfigError, DataError) as error:
                self.notes.append(f"references of {task} were not held against the benchmark's data: {error}")
                continue
            if metrics.get(task, metric) != metric:
                yield f"task {task}: scored by {metrics[task]}, where its benchmark says {metric}"
            if ids != self.ids[task]:
                yield f"task {task}: the rows are not those of the benchmark's data, by their ids"
            elif other := sum(map(list.__ne__, self.references[task], references)):
                yield f"task {task}: {other} of {len(ids)} rows have other references than in the benchmark's data"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # a text also has other ends of lines
