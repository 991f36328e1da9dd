"""What routing keeps of a task: gathered where a task was learned, and enough to route by without any of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from latent_sweep.data.schema import PromptSettings
from latent_sweep.deploy.content import NOVELTY_QUANTILE, Records
from latent_sweep.errors import MissingData
from latent_sweep.routing.combination import DISTANCE_ROWS, Combiner
from latent_sweep.routing.gaussian import (
    ROUTED,
    GaussianRouter,
    PooledScatter,
    RouterSettings,
    pooled_covariance,
    spread,
)
from latent_sweep.sweep.plan import Trial
from latent_sweep.training.context import Context


def records_combiner(context: Context, trial: Trial) -> Combiner:
    """Make the combiner that gathers records of a trial's tasks.

    Its test rows have the prompts that tasks are learned with, whatever the trial was tested on: so is a model asked.
    """
    benchmark = trial.settings.benchmark.model_copy(update={"prompts": PromptSettings()})
    verbatim = replace(trial, settings=trial.settings.model_copy(update={"benchmark": benchmark}))
    return context.combiner(verbatim, _no_gates)


def _no_gates(tasks_seen: int, prompts: Sequence[Sequence[int]]) -> Any:
    raise AssertionError("records are gathered without weighing anything")


def records_at(combiner: Combiner, position: int) -> Records:
    """Gather what routing keeps of the task at this position; what the store lacks is made from its training rows.

    Raises:
        DataError: the rows are needed, and are not at hand or are others than were planned with.
    """
    if combiner.settings.combine in ROUTED:
        return Records(combiner.gmm(position), combiner.scatter(position))
    return Records(ngrams=combiner.ngrams(position)) if combiner.settings.combine == "ngram" else Records()


def fitted(settings: RouterSettings, records: Sequence[Records]) -> GaussianRouter | None:
    """Fit the router over all tasks from their records alone: bit for bit the one that their trial has routed by.

    Returns:
        None where no posterior is asked for.
    """
    if settings.combine not in ROUTED:
        return None
    mixtures = [record.mixture for record in records if record.mixture is not None]
    scatters = [record.scatter for record in records if record.scatter is not None]
    assert len(mixtures) == len(scatters) == len(records), "every task that is routed to has left its records"
    pooled = settings.cov.pooled_tasks(len(records), len(records))
    fold = PooledScatter()
    for position, scatter in enumerate(scatters[:pooled]):
        fold.add(str(position), scatter)
    return GaussianRouter(settings).fit(mixtures, pooled_covariance(fold, mixtures[:pooled], settings))


def limit_at(combiner: Combiner, position: int, router: GaussianRouter | None) -> float | None:
    """Tell how far out the held-out rows of a task lie in this router: `LearnedTask.farthest`.

    Held out are the rows that the trial is scored on, at most `DISTANCE_ROWS` of them: none that was trained on.
    """
    if router is None:
        return None
    try:
        rows = spread(combiner.embeddings(position, "test"), DISTANCE_ROWS)
    except MissingData:
        return None
    return float(np.quantile(router.distances(rows), NOVELTY_QUANTILE, method="higher"))
