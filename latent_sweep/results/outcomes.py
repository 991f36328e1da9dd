"""What finished trials have come to, and what each test row adds to it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latent_sweep.errors import StorageError
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.results.definition import Measure, defined_measures
from latent_sweep.storage.folders import TrialFolder
from latent_sweep.storage.journal import Stage, final_metrics, stages
from latent_sweep.storage.trial_files import RowScores, checked_answers, recorded_matrix, row_scores

Scores = npt.NDArray[np.float64]
"""Of the rows of one task, (rows,)."""


@dataclass(frozen=True)
class Outcome:
    """A measure of a finished trial."""

    value: float
    """A fraction."""
    rows: Mapping[str, RowScores] | None
    """By task, what each row adds: the mean over a task's rows, and then over tasks, is `value`. None where there are
    no such rows, or their scores are not at hand."""


def mean_outcome(found: Sequence[Outcome]) -> Outcome:
    """Return the mean of a measure over several trials, of values and of what each row adds; rows must be the same."""
    first, rows = found[0].rows, None
    if first is not None and all(each.rows is not None and row_ids(each.rows) == row_ids(first) for each in found):
        rows = {
            task: RowScores(own.ids, np.mean([each.rows[task].scores for each in found if each.rows], axis=0))
            for task, own in first.items()
        }
    return Outcome(statistics.fmean(each.value for each in found), rows)


def row_ids(rows: Mapping[str, RowScores]) -> dict[str, tuple[str, ...]]:
    """Return the ids of the rows of each task."""
    return {task: found.ids for task, found in rows.items()}


def outcomes(trial: TrialFolder) -> dict[Measure, Outcome]:
    """Return the measures of a finished trial that are defined for it.

    AP has the scores that rows end with, and LA those that they had when their task was new. Of all tasks but the last,
    BWT has the last scores less those when new, and FM the scores at the stage at which their task's score was best,
    the first of several, less the last ones: equation (17) is linear in rows once the best stages are known. All but AP
    need the answers of every stage, which `run.keep_answers: all` keeps.

    Raises:
        StorageError: its journal is damaged.
    """
    events = trial.events()
    told, metrics = stages(events), final_metrics(events)
    matrix, last = recorded_matrix(told), row_scores(trial.path, events)
    values: dict[Measure, float] = {
        "AP": metrics["AP"],
        "LA": matrix.mean_diagonal(),
        "BWT": matrix.backward_transfer(),
        "FM": metrics["FM"],
    }
    rows: dict[Measure, dict[str, Scores]] = {}
    if last is not None:
        rows["AP"] = {task: found.scores for task, found in last.items()}
        if by_stage := _by_stage(trial, told, last):
            rows["LA"] = {task: by_stage[seen, task] for seen, task in enumerate(matrix.tasks, start=1)}
            best = {task: by_stage[seen, task] for task, seen in _best_stages(matrix).items()}
            rows["BWT"] = {task: rows["AP"][task] - rows["LA"][task] for task in best}
            rows["FM"] = {task: best[task] - rows["AP"][task] for task in best}
    defined = defined_measures(trial, told)
    return {measure: Outcome(values[measure], _with_ids(rows.get(measure), last)) for measure in defined}


def _by_stage(
    trial: TrialFolder, told: Sequence[Stage], last: Mapping[str, RowScores]
) -> dict[tuple[int, str], Scores]:
    """Read what rows scored, by the tasks seen and task; nothing unless every stage has left its answers."""
    try:
        found = {
            (event.tasks_seen, task): np.array([answer.score for answer in answers], dtype=float)
            for event, answered in checked_answers(trial.path, told)
            for task, answers in answered.items()
        }
    except (OSError, StorageError, ValueError):
        return {}
    expected = {(event.tasks_seen, task): last[task].scores.shape for event in told for task in event.scores}
    return found if {place: scores.shape for place, scores in found.items()} == expected else {}


def _with_ids(rows: Mapping[str, Scores] | None, last: Mapping[str, RowScores] | None) -> dict[str, RowScores] | None:
    if not rows or last is None:
        return None
    return {task: RowScores(last[task].ids, scores) for task, scores in rows.items()}


def _best_stages(matrix: ScoreMatrix) -> dict[str, int]:
    """Map each task but the last to the tasks seen when its score was best, the first time where it was so often."""
    found = {}
    for position, task in enumerate(matrix.tasks[:-1]):
        scores = [row[position] for row in matrix.rows[position:]]
        found[task] = position + scores.index(max(scores)) + 1
    return found
