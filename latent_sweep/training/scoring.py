"""Scoring the test rows of one task for one trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from latent_sweep.data.prompts import definitions
from latent_sweep.data.schema import scoring_metric, stop_of, target_length
from latent_sweep.methods import checked
from latent_sweep.metrics.answers import takes_input
from latent_sweep.routing.combination import Array
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.sweep.trial import Trial
from latent_sweep.training.evaluation import AnswerEnd, CachedTensors, Evaluator, Recent, TaskScore
from latent_sweep.training.run import ActiveRun


class TaskScoring:
    """Scores tasks of a trial with a run's snapshots, whose weights come from `combiner`."""

    def __init__(self, run: ActiveRun, trial: Trial, evaluator: Evaluator):
        self._context, self._trial, self._evaluator = run.context, trial, evaluator
        method, tensors = run.method_of(trial), [CachedTensors(snapshot.tensors) for snapshot in run.snapshots]

        def gates(tasks_seen: int, prompts: Sequence[Sequence[int]]) -> Any:
            return checked.gates(method, tensors[:tasks_seen], prompts)

        self.combiner = run.context.combiner(trial, gates)

    def count(self, position: int) -> int:
        return len(self._context.tokens(self._trial, position, "test"))

    def score(
        self,
        position: int,
        weights: Array,
        history: Sequence[Snapshot],
        recent: Recent | None = None,
        evaluator: Evaluator | None = None,
    ) -> TaskScore:
        """Score the task at a position, with the trial's own evaluator or another; see `Evaluator.score`."""
        trial, context, s = self._trial, self._context, self._trial.settings
        task = trial.tasks[position]
        rows = context.tokens(trial, position, "test")
        wordings = len(definitions(task, "test", s.benchmark))
        metric = scoring_metric(s.benchmark, task)
        inputs = [row.input for row in context.examples(trial, position, "test")] if takes_input(metric) else None
        end = AnswerEnd(target_length(s.benchmark, task), stop_of(trial.spec, task))
        return (evaluator or self._evaluator).score(history, weights, rows, metric, wordings, inputs, recent, end)
