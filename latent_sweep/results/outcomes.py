"""The measures of finished trials, and what each test example adds to them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latent_sweep.errors import StorageError
from latent_sweep.results.definition import Measure
from latent_sweep.results.trial import TrialResults
from latent_sweep.storage.journal import final_metrics
from latent_sweep.storage.trial_files import RowScores, checked_answers, row_scores

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """A measure of a finished trial."""

    value: float
    rows: Mapping[str, RowScores] | None
    """By task, the contribution of each example: `value` is the mean over tasks of their means. None if not known."""


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    first, rows = outcomes[0].rows, None
    if first is not None and all(each.rows is not None and row_ids(each.rows) == row_ids(first) for each in outcomes):
        rows = {
            task: RowScores(own.ids, np.mean([each.rows[task].scores for each in outcomes if each.rows], axis=0))
            for task, own in first.items()
        }
    return Outcome(statistics.fmean(each.value for each in outcomes), rows)


def row_ids(rows: Mapping[str, RowScores]) -> dict[str, tuple[str, ...]]:
    return {task: scores.ids for task, scores in rows.items()}


def outcomes(trial: TrialResults) -> dict[Measure, Outcome]:
    """Return the measures that are defined for a finished trial.

    AP uses the last scores of the examples, LA those when their task was new. Over all tasks but the last, BWT uses
    the last scores minus those when new, and FM the scores at the first of the task's best stages minus the last
    ones: with fixed best stages, equation (17) is linear in the examples' scores. All but AP need the answers of every
    stage (`run.keep_answers: all`).
    """
    matrix, last = trial.matrix, row_scores(trial.folder.path, trial.events)
    metrics = final_metrics(trial.events)
    values: dict[Measure, float] = {
        "AP": metrics["AP"],
        "LA": matrix.mean_diagonal(),
        "BWT": matrix.backward_transfer(),
        "FM": metrics["FM"],
    }
    rows: dict[Measure, dict[str, Scores]] = {}
    if last is not None:
        rows["AP"] = {task: own.scores for task, own in last.items()}
        if by_stage := _by_stage(trial, last):
            rows["LA"] = {task: by_stage[seen, task] for seen, task in enumerate(matrix.tasks, start=1)}
            best = {
                task: by_stage[row + 1, task] for task, row in zip(matrix.tasks, matrix.best_stages(), strict=False)
            }
            rows["BWT"] = {task: rows["AP"][task] - rows["LA"][task] for task in best}
            rows["FM"] = {task: best[task] - rows["AP"][task] for task in best}
    return {measure: Outcome(values[measure], _with_ids(rows.get(measure), last)) for measure in trial.measures}


def _by_stage(trial: TrialResults, last: Mapping[str, RowScores]) -> dict[tuple[int, str], Scores]:
    """Read the examples' scores by (tasks seen, task); empty unless every stage has kept its answers."""
    try:
        by_stage = {
            (stage.tasks_seen, task): np.array([answer.score for answer in answers], dtype=float)
            for stage, answered in checked_answers(trial.folder.path, trial.stages)
            for task, answers in answered.items()
        }
    except (OSError, StorageError, ValueError):
        return {}
    expected = {(stage.tasks_seen, task): last[task].scores.shape for stage in trial.stages for task in stage.scores}
    return by_stage if {key: scores.shape for key, scores in by_stage.items()} == expected else {}


def _with_ids(rows: Mapping[str, Scores] | None, last: Mapping[str, RowScores] | None) -> dict[str, RowScores] | None:
    if not rows or last is None:
        return None
    return {task: RowScores(last[task].ids, scores) for task, scores in rows.items()}
