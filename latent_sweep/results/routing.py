"""Where test rows were routed, and how sure the router was: read from what a trial and its store have kept.

A trial keeps the weights with which its rows were answered: pruned ones under `router.combine: soft`, the largest alone
under `hard`. Where pooled embeddings and router records are still in the store, the posterior itself is computed again
from them, without a backbone, and held against these weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from latent_sweep.backbones.registry import BackboneSettings, family_of
from latent_sweep.data.chat import Chat, chat_of
from latent_sweep.data.loaders import WHOLE_PROMPT, data_digest, token_cache_name
from latent_sweep.data.schema import Split, load_benchmark, target_length, task_sequence
from latent_sweep.errors import StorageError
from latent_sweep.labels import label, short_names
from latent_sweep.results.selection import UNREADABLE, FinishedTrial, finished_trials, first_of_each, reason
from latent_sweep.routing.gaussian import (
    ROUTED,
    GaussianRouter,
    PooledScatter,
    RouterSettings,
    TaskGmm,
    TaskScatter,
    gmm_name,
    normalize_embeddings,
    pooled_covariance,
    pooled_name,
    pooled_path,
    record_path,
    scatter_name,
)
from latent_sweep.routing.metrics import CALIBRATION_BINS, expected_calibration_error
from latent_sweep.storage.checksummed import has_valid_checksum
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.journal import stages

Array = npt.NDArray[np.float64]
Record = TypeVar("Record", TaskGmm, TaskScatter)

MODES = (*ROUTED, "ngram")
"""How trials mix whose rows are routed; the string match has no posterior."""

READ = ("router.", "benchmark.", "backbone.")
"""What settings that a router reads begin with, beside the seed."""

_SAME_WEIGHT, _MAY_DIFFER = 1e-3, 0.01
"""A recomputed weight that is farther off than the first belongs to another router; so many rows may be near ties."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Where one trial has routed its test rows after its last task."""

    trial: FinishedTrial
    settings: RouterSettings
    probabilities: tuple[Array, ...]
    """By true task (rows, T): the posterior, or else the weights that the trial has kept."""
    gap: str | None = None
    """Why a posterior could not be computed again; None where it was, and where the router has none."""

    @property
    def recomputed(self) -> bool:
        """Whether it is the posterior, computed again from the store."""
        return self.settings.combine in ROUTED and self.gap is None

    @property
    def name(self) -> str:
        """The settings that vary in the sweep and that a router reads, without what repeats a configuration."""
        return self.trial.configuration

    @property
    def has_posterior(self) -> bool:
        """Whether the rows say how sure the router was, and not only where they went."""
        return self.recomputed or self.settings.combine == "soft"


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


def routings(sweep: SweepFolder) -> tuple[list[Routing], list[str]]:
    """Read the first finished repetition of a few configurations with a router.

    Returns:
        Where they were routed, in the sweep's order, and why trials that should be among them are not.
    """
    found, gaps = [], []
    for trial in first_of_each(routed_apart(sweep, finished_trials(sweep))):
        try:
            found.append(routing(sweep, trial))
        except UNREADABLE as error:
            gaps.append(f"{trial.name}: {reason(error)}")
    return found, gaps


def routed_apart(sweep: SweepFolder, trials: Sequence[FinishedTrial]) -> list[FinishedTrial]:
    """Of the trials with a router those whose routers differ, each with its configuration as its router has it.

    The router reads neither what a method learns nor how: trials that differ in that alone route every row alike.
    """
    found: dict[str, FinishedTrial] = {}
    for trial in trials:
        if trial.folder.params.get("router.combine") in MODES:
            read = {p: v for p, v in trial.folder.params.items() if p.startswith(READ) or p == "seed"}
            names = {p: name for p, name in short_names(sweep.axes).items() if p.startswith(READ)}
            name = label({names[p]: trial.folder.values.get(p) for p in names if p != sweep.seed_axis})
            key = json.dumps(read, sort_keys=True, default=str)
            found.setdefault(key, replace(trial, configuration=name))
    return list(found.values())


def routing(sweep: SweepFolder, trial: FinishedTrial) -> Routing:
    """Read where the rows of one trial with a router were routed.

    Raises:
        StorageError: its predictions are missing or damaged.
        ConfigError, LookupError, OSError, TypeError, ValueError: its files hold something else.
    """
    settings = RouterSettings.model_validate(trial.settings()["router"])
    predictions = trial.predictions()
    if predictions is None:
        raise StorageError("its predictions are not those that its journal tells of")
    kept = tuple(_weights(predictions[task], len(trial.tasks)) for task in trial.tasks)
    if settings.combine not in ROUTED:
        return Routing(trial, settings, kept)
    try:
        return Routing(trial, settings, StoredRouter(sweep, trial).posterior(kept))
    except UNREADABLE as error:
        return Routing(trial, settings, kept, f"{trial.name}: {reason(error)}")


def _weights(rows: Sequence[Any], n_tasks: int) -> Array:
    """The weights of a task's rows, (rows, T), from predictions, which leave out zeros."""
    weights = np.zeros((len(rows), n_tasks))
    for i, row in enumerate(rows):
        for position, weight in row["weights"].items():
            weights[i, int(position)] = weight
    return weights


class StoredRouter:
    """A trial's router and the embeddings that it routes, as far as they lie in the store. It changes nothing there."""

    def __init__(self, sweep: SweepFolder, trial: FinishedTrial):
        self.sweep, self.trial, self._folder = sweep, trial, sweep.storage.folder

    def posterior(self, kept: Sequence[Array]) -> tuple[Array, ...]:
        """Compute p(t | x) of the test rows of every task again, (rows, T) each.

        Args:
            kept: the weights that the trial has answered with.

        Raises:
            StorageError: the store does not hold all of it, or does not give the weights that were kept.
            LatentSweepError, LookupError, OSError, TypeError, ValueError: what names it cannot be read.
        """
        router = self._router()
        embeddings = [self.embeddings(task, "test") for task in range(len(kept))]
        mode: Literal["soft", "hard"] = "hard" if self._settings.combine == "hard" else "soft"
        again = np.concatenate([router.weights(found, mode) for found in embeddings])
        told = np.concatenate(list(kept))
        alike = again.shape == told.shape and np.abs(again - told).max(axis=1) <= _SAME_WEIGHT
        if 1 - np.mean(alike) > _MAY_DIFFER:
            raise StorageError("the stored router gives other weights than those that its rows were answered with")
        return tuple(router.posterior(found) for found in embeddings)

    def embeddings(self, task: int, split: Split) -> npt.NDArray[Any]:
        """The pooled embeddings (rows, d) of a task as the router reads them, equation (11).

        Raises:
            StorageError: they are not kept, or the embedding table that scales them is not at hand.
            LatentSweepError, LookupError, OSError, TypeError, ValueError: what names them cannot be read.
        """
        path = pooled_path(self._folder, self._pooled_name(task, split))
        if not has_valid_checksum(path):
            raise StorageError(
                f"the pooled embeddings of task {self.trial.tasks[task]} are not in {path.parent} on this machine; a "
                "trial whose router.combine is soft or hard leaves them there"
            )
        pooled = load_file(path)["pooled"]
        how = self._settings.embed_norm
        if how == "std" and self._table_std is None:
            raise StorageError(
                "the embedding table of its backbone, which scales pooled embeddings, is not on this machine"
            )
        return normalize_embeddings(pooled, how, self._table_std if how == "std" else None)

    def _router(self) -> GaussianRouter:
        """The router over all tasks, from its records; fitted as the last stage of the trial has fitted it.

        Raises:
            StorageError: one is not in the store.
        """
        settings, n_tasks = self._settings, len(self.trial.tasks)
        seed = int(self._groups["seed"])
        pooled_tasks = settings.cov.pooled_tasks(n_tasks, n_tasks)
        mixtures, fold = [], PooledScatter()
        for task in range(n_tasks):
            pooled = self._pooled_name(task, "train")
            path = record_path(self._folder, gmm_name(pooled, settings, seed))
            mixtures.append(_record(TaskGmm, path))
            if task < pooled_tasks:
                name = scatter_name(pooled, settings)
                path = record_path(self._folder, name)
                fold.add(name, _record(TaskScatter, path))
        covariance = pooled_covariance(fold, mixtures[:pooled_tasks], settings)
        return GaussianRouter(settings).fit(mixtures, covariance)

    def _pooled_name(self, task: int, split: Split) -> str:
        b, backbone = self.trial.benchmark(), BackboneSettings.model_validate(self._groups["backbone"])
        digests = self._backbone_digests
        lengths = b.max_source_length if self._settings.pool.truncate else WHOLE_PROMPT
        data = data_digest(self._spec, self._tasks[task], split, b)
        answers = target_length(b, self._tasks[task])
        tokens = token_cache_name(data, b, digests["tokenizer"], family_of(backbone.name), lengths, answers, self._chat)
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
        return backbone_digests(self.sweep, stages(self.trial.events)[-1].lineage)

    @cached_property
    def _chat(self) -> Chat | None:
        """The chat template that prompts stand in; None without one."""
        if not self.trial.benchmark().chat:
            return None
        from latent_sweep.backbones.tokenizers import load_tokenizer  # loads transformers

        return chat_of(load_tokenizer(BackboneSettings.model_validate(self._groups["backbone"])))

    @cached_property
    def _table_std(self) -> float | None:
        """Standard deviation of the embedding table's entries; None where the backbone's files are not here."""
        from latent_sweep.backbones.checkpoint import checkpoint_weights  # loads torch

        found = checkpoint_weights(BackboneSettings.model_validate(self._groups["backbone"]))
        return None if found is None else float(found.embedding_table.float().std())


def _record(kind: type[Record], path: Path) -> Record:
    found = kind.load(path) if has_valid_checksum(path) else None
    if found is None:
        raise StorageError(f"the records of its router are not in {path.parent} on this machine")
    return found


def backbone_digests(sweep: SweepFolder, lineage: str) -> dict[str, str]:
    """Digests of the weights and the tokenizer that a snapshot was learned with, as its facts tell.

    Raises:
        StorageError: there is no such snapshot.
        OSError, ValueError, LookupError, TypeError: its facts cannot be read, or hold something else.
    """
    path = sweep.snapshots.folder / f"{lineage}.json"
    if not path.is_file():
        raise StorageError(f"snapshot {lineage} is missing")
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["facts"]["backbone"]
    return found
