"""Where test rows were routed, and how sure the router was: read from what a trial and its store have kept.

A trial keeps the weights with which its rows were answered: pruned ones under `router.mode: soft`, the largest alone
under `hard`. Where pooled embeddings and router records are still in the store, the posterior itself is computed again
from them, without a backbone, and held against these weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from latent_sweep.backbones.known import BackboneSettings, family_of
from latent_sweep.benchmarks.loaders import WHOLE_PROMPT, data_digest, tokens_name
from latent_sweep.benchmarks.schema import Split, load_benchmark, task_sequence
from latent_sweep.labels import label, short_names
from latent_sweep.learn.evidence import CALIBRATION_BINS, expected_calibration_error
from latent_sweep.results.shown import UNREADABLE, ShownTrial, finished_trials, first_of_each
from latent_sweep.router import (
    GaussianRouter,
    PooledScatter,
    RouterSettings,
    TaskMixture,
    TaskScatter,
    mixture_name,
    normalise_embeddings,
    pooled_covariance,
    pooled_name,
    pooled_path,
    record_path,
    scatter_name,
)
from latent_sweep.store.folders import SweepFolder
from latent_sweep.store.journal import stages
from latent_sweep.store.sealed import is_sealed
from latent_sweep.sweep.plan import ROUTED

Array = npt.NDArray[np.float64]

MODES = (*ROUTED, "lexical")
"""How trials mix whose rows are routed; the string match has no posterior."""

READ = ("router.", "benchmark.", "backbone.")
"""What settings that a router reads begin with, beside the seed."""

_SAME_WEIGHT, _MAY_DIFFER = 1e-3, 0.01
"""A recomputed weight that is farther off than the first belongs to another router; so many rows may be near ties."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Where one trial has routed its test rows after its last task."""

    trial: ShownTrial
    settings: RouterSettings
    probabilities: tuple[Array, ...]
    """By true task (rows, T): the posterior, or else the weights that the trial has kept."""
    recomputed: bool
    """Whether it is the posterior, computed again from the store."""

    @property
    def name(self) -> str:
        """The settings that vary in the sweep and that a router reads, without what repeats a configuration."""
        return self.trial.configuration

    @property
    def has_posterior(self) -> bool:
        """Whether the rows say how sure the router was, and not only where they went."""
        return self.recomputed or self.settings.mode == "soft"


class Reliability(NamedTuple):
    """How often the router is right where it is so sure, by bin of equal width from 0 to 1."""

    counts: npt.NDArray[np.intp]
    """(bins,) rows."""
    confidence: Array
    """(bins,) mean largest probability of a bin's rows; NaN where there is none."""
    accuracy: Array
    """(bins,) share of a bin's rows whose largest probability is that of their own task; NaN where there is none."""
    calibration_error: float
    """ECE, a fraction."""


def own_task(probabilities: Sequence[Array]) -> list[Array]:
    """Return by task p(t | x) of every row's own task, (rows,)."""
    return [rows[:, task] for task, rows in enumerate(probabilities)]


def confusion(probabilities: Sequence[Array]) -> Array:
    """Share of the rows of each task that have their largest probability at each task, (true, routed).

    Args:
        probabilities: of each task's rows, (rows, T), by task. Of several equal ones the earliest task's counts.
    """
    n_tasks = len(probabilities)
    return np.stack([np.bincount(rows.argmax(axis=1), minlength=n_tasks) / len(rows) for rows in probabilities])


def reliability(probabilities: Sequence[Array]) -> Reliability:
    """Sort the rows of all tasks into bins by their largest probability, as the expected calibration error does.

    Args:
        probabilities: of each task's rows, (rows, T), by task.
    """
    confidence = np.concatenate([rows.max(axis=1) for rows in probabilities])
    correct = np.concatenate([rows.argmax(axis=1) == task for task, rows in enumerate(probabilities)])
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1]
    bins = np.digitize(confidence, edges, right=True)
    counts = np.bincount(bins, minlength=CALIBRATION_BINS)
    with np.errstate(invalid="ignore"):  # 0 / 0 of an empty bin is the NaN that is meant
        sure, right = (np.bincount(bins, v, CALIBRATION_BINS) / counts for v in (confidence, correct))
    return Reliability(counts, sure, right, expected_calibration_error(confidence, correct))


def routings(sweep: SweepFolder) -> list[Routing]:
    """Routing of the first finished repetition of a few configurations with a router, in the sweep's order."""
    found = [routing(sweep, trial) for trial in first_of_each(routed_apart(sweep, finished_trials(sweep)))]
    return [one for one in found if one is not None]


def routed_apart(sweep: SweepFolder, trials: Sequence[ShownTrial]) -> list[ShownTrial]:
    """Of the trials with a router those whose routers differ, each with its configuration as its router has it.

    The router reads neither what a method learns nor how: trials that differ in that alone route every row alike.
    """
    found: dict[str, ShownTrial] = {}
    for trial in trials:
        if trial.folder.params.get("router.mode") in MODES:
            read = {p: v for p, v in trial.folder.params.items() if p.startswith(READ) or p == "seed"}
            names = {p: name for p, name in short_names(sweep.axes).items() if p.startswith(READ)}
            name = label({names[p]: trial.folder.values.get(p) for p in names if p != sweep.seed_axis})
            key = json.dumps(read, sort_keys=True, default=str)
            found.setdefault(key, replace(trial, configuration=name))
    return list(found.values())


def routing(sweep: SweepFolder, trial: ShownTrial) -> Routing | None:
    """Routing of one trial, or None where its files do not say."""
    try:
        settings = RouterSettings.model_validate(trial.settings()["router"])
        predictions = trial.predictions()
        if settings.mode not in MODES or predictions is None:
            return None
        kept = tuple(_weights(predictions[task], len(trial.tasks)) for task in trial.tasks)
    except UNREADABLE:
        return None
    posterior = StoredRouter(sweep, trial).posterior(kept) if settings.mode in ROUTED else None
    return Routing(trial, settings, posterior or kept, posterior is not None)


def _weights(rows: Sequence[Any], n_tasks: int) -> Array:
    """The weights of a task's rows, (rows, T), from predictions, which leave out zeros."""
    weights = np.zeros((len(rows), n_tasks))
    for i, row in enumerate(rows):
        for position, weight in row["weights"].items():
            weights[i, int(position)] = weight
    return weights


class StoredRouter:
    """A trial's router and the embeddings that it routes, as far as they lie in the store. It changes nothing there."""

    def __init__(self, sweep: SweepFolder, trial: ShownTrial):
        self.sweep, self.trial, self._folder = sweep, trial, sweep.storage.folder

    def posterior(self, kept: Sequence[Array]) -> tuple[Array, ...] | None:
        """Compute p(t | x) of the test rows of every task again, (rows, T) each.

        Args:
            kept: the weights that the trial has answered with.

        Returns:
            None where the store does not hold all of it, or where it does not give the weights that were kept.
        """
        try:
            router = self._router()
            rows = [self.embeddings(task, "test") for task in range(len(kept))]
            if router is None or any(found is None for found in rows):
                return None
            embeddings = [found for found in rows if found is not None]
            mode: Literal["soft", "hard"] = "hard" if self._settings.mode == "hard" else "soft"
            again = np.concatenate([router.weights(found, mode) for found in embeddings])
            told = np.concatenate(list(kept))
            if again.shape != told.shape:
                return None
            differ = np.abs(again - told).max(axis=1) > _SAME_WEIGHT
            if differ.mean() > _MAY_DIFFER:
                return None
            return tuple(router.posterior(found) for found in embeddings)
        except UNREADABLE:
            return None

    def embeddings(self, task: int, split: Split) -> npt.NDArray[Any] | None:
        """The pooled embeddings (rows, d) of a task as the router reads them, equation (11); None where not kept.

        Raises:
            LatentSweepError, OSError, ValueError, LookupError: what names them cannot be read.
        """
        path = pooled_path(self._folder, self._pooled_name(task, split))
        if not is_sealed(path):
            return None
        pooled = load_file(path)["pooled"]
        how = self._settings.embed_norm
        if how == "std" and self._table_std is None:
            return None
        return normalise_embeddings(pooled, how, self._table_std if how == "std" else None)

    def _router(self) -> GaussianRouter | None:
        """The router over all tasks, from its records; fitted as the last stage of the trial has fitted it."""
        settings, n_tasks = self._settings, len(self.trial.tasks)
        seed = int(self._groups["seed"])
        pooled_tasks = settings.cov.pooled_tasks(n_tasks, n_tasks)
        mixtures, fold = [], PooledScatter()
        for task in range(n_tasks):
            pooled = self._pooled_name(task, "train")
            path = record_path(self._folder, mixture_name(pooled, settings, seed))
            mixture = TaskMixture.load(path) if is_sealed(path) else None
            if mixture is None:
                return None
            mixtures.append(mixture)
            if task < pooled_tasks:
                name = scatter_name(pooled, settings)
                path = record_path(self._folder, name)
                scatter = TaskScatter.load(path) if is_sealed(path) else None
                if scatter is None:
                    return None
                fold.add(name, scatter)
        covariance = pooled_covariance(fold, mixtures[:pooled_tasks], settings)
        return GaussianRouter(settings).fit(mixtures, covariance)

    def _pooled_name(self, task: int, split: Split) -> str:
        b, backbone = self.trial.benchmark(), BackboneSettings.model_validate(self._groups["backbone"])
        digests = self._backbone_digests
        lengths = b.max_source_length if self._settings.pool.truncate else WHOLE_PROMPT
        data = data_digest(self._spec, self._tasks[task], split, b)
        answers = b.max_target_length or self._spec.max_target_length
        tokens = tokens_name(data, b, digests["tokenizer"], family_of(backbone.name), lengths, answers)
        return pooled_name(tokens, digests["weights"], self._settings)

    @cached_property
    def _groups(self) -> Any:
        return self.trial.settings()

    @cached_property
    def _settings(self) -> RouterSettings:
        return RouterSettings.model_validate(self._groups["router"])

    @cached_property
    def _spec(self) -> Any:
        return load_benchmark(self.trial.benchmark().name)

    @cached_property
    def _tasks(self) -> Any:
        return task_sequence(self.trial.benchmark(), self._spec)

    @cached_property
    def _backbone_digests(self) -> dict[str, str]:
        """Digests of weights and tokenizer, as the last snapshot tells them."""
        return backbone_digests(self.sweep, stages(self.trial.events)[-1]["lineage"])

    @cached_property
    def _table_std(self) -> float | None:
        """Standard deviation of the embedding table's entries; None where the backbone's files are not here."""
        from latent_sweep.backbones.stored import stored_backbone  # loads torch

        found = stored_backbone(BackboneSettings.model_validate(self._groups["backbone"]))
        return None if found is None else float(found.embedding_table.float().std())


def backbone_digests(sweep: SweepFolder, lineage: str) -> dict[str, str]:
    """Digests of the weights and the tokenizer that a snapshot was learned with, as its facts tell.

    Raises:
        OSError, ValueError, LookupError, TypeError: the facts are not at hand, or hold something else.
    """
    path = sweep.snapshots.folder / f"{lineage}.json"
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["facts"]["backbone"]
    return found
