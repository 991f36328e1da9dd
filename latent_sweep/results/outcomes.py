"""What finished trials have come to, and what each test row adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from latent_sweep.errors import StoreError
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.store.folders import TrialFolder
from latent_sweep.store.journal import Event, stages
from latent_sweep.store.trial_files import RowScores, checked_answers, row_scores, told_matrix

Measure = Literal["AP", "LA", "FM"]
"""Average performance, learning accuracy and forgetting, as tables have them."""
MEASURES: tuple[Measure, ...] = ("AP", "LA", "FM")

_ByStage = Mapping[int, Mapping[str, npt.NDArray[np.float64]]]
"""Scores of rows, (rows,), by the tasks seen and task."""


@dataclass(frozen=True)
class Outcome:
    """A measure of a finished trial."""

    value: float
    """A fraction."""
    rows: Mapping[str, RowScores] | None
    """By task, what each row adds: the mean over a task's rows, and then over tasks, is `value`. None where the scores
    of rows are not at hand."""


def outcomes(trial: TrialFolder) -> dict[Measure, Outcome]:
    """Return the measures of a finished trial.

    AP has the scores that rows end with, and LA those that they had when their task was new. FM has, for all tasks but
    the last, the scores at the stage at which their task's score was best, the first of several, less the last ones:
    equation (17) is linear in rows once the best stages are known. LA and FM need the answers of every stage, which
    `run.keep_answers: all` keeps.

    Raises:
        StoreError: its journal is damaged.
    """
    events = trial.events()
    told, metrics = stages(events), events[-1]["metrics"]
    matrix, last = told_matrix(told), row_scores(trial.path, events)
    new = forgotten = None
    if last is not None and len(by_stage := _by_stage(trial, told)) == len(told):
        new = {task: RowScores(last[task].ids, by_stage[seen][task]) for seen, task in enumerate(matrix.tasks, start=1)}
        forgotten = {
            task: RowScores(last[task].ids, by_stage[seen][task] - last[task].scores)
            for task, seen in _best_stages(matrix).items()
        }
    return {
        "AP": Outcome(metrics["AP"], last),
        "LA": Outcome(matrix.mean_diagonal(), new),
        "FM": Outcome(metrics["FM"], forgotten),
    }


def _by_stage(trial: TrialFolder, told: Sequence[Event]) -> _ByStage:
    """Read what rows scored at the stages whose answers are kept; nothing where a file is not as the journal says."""
    try:
        return {
            event["tasks_seen"]: {
                task: np.array([answer.score for answer in found], dtype=float) for task, found in answers.items()
            }
            for event, answers in checked_answers(trial.path, told)
        }
    except StoreError:
        return {}


def _best_stages(matrix: ScoreMatrix) -> dict[str, int]:
    """Map each task but the last to the tasks seen when its score was best, the first time where it was so often."""
    found = {}
    for position, task in enumerate(matrix.tasks[:-1]):
        scores = [row[position] for row in matrix.rows[position:]]
        found[task] = position + scores.index(max(scores)) + 1
    return found
