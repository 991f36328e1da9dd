"""How snapshots answer together: a weight for every snapshot in every row of a batch.

last    the newest snapshot alone
sum     all of them with weight one (summing branches, the ablation without a router)
soft    the router's posterior, equation (15)
hard    its largest entry
lexical the task whose definition has most letters in common with the prompt, a control (`lexical.py`)
gates   the method's own gates, read from the prompt (GainLoRA)
oracle  the snapshot of the row's own task: an upper reference, it needs the task's identity
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file

from latent_sweep.backbones.loading import Backbone
from latent_sweep.benchmarks.schema import Split
from latent_sweep.errors import DataError
from latent_sweep.learn.evidence import accuracies, novelty_auroc, routing_measures
from latent_sweep.learn.lexical import TaskNgrams, fit_ngrams, nearest
from latent_sweep.methods.protocol import Mixing
from latent_sweep.router import (
    GaussianRouter,
    PooledScatter,
    RouterSettings,
    TaskMixture,
    TaskScatter,
    fit_mixture,
    mixture_name,
    normalise_embeddings,
    pooled_covariance,
    pooled_name,
    pooled_path,
    record_path,
    scatter_name,
    scatter_of,
    spread,
)
from latent_sweep.settings import content_hash
from latent_sweep.store import versions
from latent_sweep.store.sealed import intact, write_sealed
from latent_sweep.sweep.plan import ROUTED

log = logging.getLogger(__name__)

Array = npt.NDArray[np.float64]
MODES = get_args(Mixing)

DISTANCE_ROWS = 500
"""Most rows of a task whose distance to the tasks seen is computed: unlike a posterior, each takes d^2 operations."""

Tokens = Callable[[int, Split], Any]
"""Tokenised rows (a `datasets.Dataset`) of the task at a position, for a split."""

Gates = Callable[[int, Sequence[Sequence[int]]], Array]
"""Weights that the method's gates give the first snapshots for some prompts, (prompts, snapshots)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows to be weighed, as each way of mixing reads them; what is not read is not made."""

    count: int
    embeddings: Callable[[], npt.NDArray[Any]]
    """phi(x), (rows, d), scaled as the router's settings say."""
    texts: Callable[[], list[str]]
    """The prompts as the model reads them."""
    prompts: Callable[[], Sequence[Sequence[int]]]
    """Their token ids."""


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of the tasks seen, as far as a way of mixing reads it."""

    tasks_seen: int
    router: GaussianRouter | None
    """Where a posterior is asked for."""
    ngrams: Sequence[TaskNgrams]
    """Of every task, where the string match is asked for."""
    gates: Gates


def weigh(mode: Mixing, known: Known, rows: Rows, task: int | None = None) -> Array:
    """Weigh the snapshots of the tasks seen in every row, (rows, tasks_seen).

    Args:
        task: position of the task that the rows are of; `oracle` alone reads it.
    """
    if mode == "soft" or mode == "hard":
        assert known.router is not None, "these modes are the router's"
        return known.router.weights(rows.embeddings(), mode)
    if mode == "lexical":
        return nearest(rows.texts(), known.ngrams)
    if mode == "gates":
        return known.gates(known.tasks_seen, rows.prompts())
    if mode == "sum":
        return np.ones((rows.count, known.tasks_seen))
    assert mode == "last" or task is not None, "the oracle is told of which task rows are"
    return np.tile(np.eye(known.tasks_seen)[-1 if mode == "last" else task], (rows.count, 1))


class Mixer:
    """The weights of one trial's snapshots, row by row.

    Args:
        settings: the trial's `router:` group, its mode resolved.
        tokens: gives the tokenised rows that the router pools.
        gates: gives the weights of the mode `gates`.
        n_tasks: tasks of the whole trial.
        seed: of K-means.
        storage: pooled embeddings and router records are cached below it.
        folds: summed scatters by content, so that a new task is one addition; mixers of one worker may share them.
    """

    def __init__(
        self,
        settings: RouterSettings,
        backbone: Backbone,
        tokens: Tokens,
        gates: Gates,
        n_tasks: int,
        seed: int,
        storage: Path,
        folds: MutableMapping[str, PooledScatter] | None = None,
    ):
        self.settings, self.backbone, self.tokens, self.gates = settings, backbone, tokens, gates
        self.n_tasks, self.seed, self.storage = n_tasks, seed, storage
        self.folds = {} if folds is None else folds
        self._fitted: dict[int, GaussianRouter] = {}
        """The router that was asked for last, by the number of tasks seen."""

    @property
    def routes(self) -> bool:
        """Whether weights come from where a prompt seems to belong."""
        return self.settings.mode in ("soft", "hard", "lexical")

    def weights(self, tasks_seen: int) -> list[Array]:
        """Return for each task seen the weights of its test rows: (rows, tasks_seen)."""
        mode = self.settings.mode
        router = self._router(tasks_seen) if mode in ROUTED else None
        ngrams = [self.ngrams(task) for task in range(tasks_seen)] if mode == "lexical" else []
        known = Known(tasks_seen, router, ngrams, self.gates)
        return [weigh(mode, known, self._rows(task, "test"), task) for task in range(tasks_seen)]

    def _rows(self, task: int, split: Split) -> Rows:
        tokens = self.tokens(task, split)
        return Rows(
            len(tokens),
            partial(self.embeddings, task, split),
            partial(self._texts, task, split),
            lambda: tokens["prompt_ids"],
        )

    def ngrams(self, task: int) -> TaskNgrams:
        """What the string match knows of the task, made once and stored."""
        path = self._record_path(self.ngrams_name(task))
        record = TaskNgrams.load(path)
        if record is None:
            record = fit_ngrams(self._texts(task, "train"))
            record.save(path)
        return record

    def _texts(self, task: int, split: Split) -> list[str]:
        """The prompts as the model reads them."""
        return texts_read(self.backbone, self.tokens(task, split)["prompt_ids"])

    def evidence(self, weights: Sequence[Array], tasks: Sequence[str]) -> dict[str, float]:
        """Measure the router on test rows: of the tasks seen, and of those to come, which it should find far away.

        Args:
            weights: of the tasks seen, as `weights` gives them.
            tasks: names of all tasks of the trial, in order.

        Returns:
            What `routing_measures` gives and, where tasks are still to come whose rows can be read,
            `router_novelty_auroc`, from at most `DISTANCE_ROWS` rows of each task; of the string match, which has no
            posterior, its accuracy alone; nothing where nothing is routed.
        """
        if not self.routes:
            return {}
        if self.settings.mode == "lexical":
            return accuracies(weights, tasks)
        tasks_seen = len(weights)
        router, rows = self._router(tasks_seen), partial(self.embeddings, split="test")
        posteriors = [router.log_posterior(rows(task)) for task in range(tasks_seen)]
        found = routing_measures(posteriors, tasks[:tasks_seen], self.settings.prune_below)
        if tasks_seen < self.n_tasks:
            try:
                distances = [router.distances(spread(rows(task), DISTANCE_ROWS)) for task in range(self.n_tasks)]
            except DataError as error:  # the trial ends where it needs these rows, and not before
                log.warning("after %s tasks, novelty is not measured: %s", tasks_seen, error)
                return found
            seen, unseen = np.concatenate(distances[:tasks_seen]), np.concatenate(distances[tasks_seen:])
            found["router_novelty_auroc"] = novelty_auroc(seen, unseen)
        return found

    def _router(self, tasks_seen: int) -> GaussianRouter:
        """The router over the tasks seen, fitted once for weights and evidence."""
        if tasks_seen not in self._fitted:
            self._fitted = {tasks_seen: self._fit(tasks_seen)}
        return self._fitted[tasks_seen]

    def _fit(self, tasks_seen: int) -> GaussianRouter:
        """Fit the router; the covariance reads tasks to come only where the settings say so (A16)."""
        pooled_tasks = self.settings.cov.pooled_tasks(tasks_seen, self.n_tasks)
        mixtures = [self.mixture(task) for task in range(max(tasks_seen, pooled_tasks))]
        covariance = pooled_covariance(self._pooled(pooled_tasks), mixtures[:pooled_tasks], self.settings)
        return GaussianRouter(self.settings).fit(mixtures[:tasks_seen], covariance)

    def mixture(self, task: int) -> TaskMixture:
        """The task's components, fitted once and stored."""
        path = self._record_path(self.mixture_name(task))
        record = TaskMixture.load(path)
        if record is None:
            record = fit_mixture(self.embeddings(task, "train"), self.settings, self.seed)
            record.save(path)
        return record

    def _pooled(self, tasks: int) -> PooledScatter:
        """Return the summed scatters of the first tasks: what an earlier stage has summed, and the new ones."""
        names = [self.scatter_name(task) for task in range(tasks)]
        fold = self.folds.setdefault(f"{names[0]}-{self.settings.cov.refresh}", PooledScatter())
        fold.extend(names, self.scatter)
        return fold

    def scatter(self, task: int) -> TaskScatter:
        """The task's scatter, computed once and stored: whatever K and seed, it is the same."""
        path = self._record_path(self.scatter_name(task))
        record = TaskScatter.load(path)
        if record is None:
            record = scatter_of(self.embeddings(task, "train"))
            record.save(path)
        return record

    def _record_path(self, name: str) -> Path:
        return record_path(self.storage, name)

    def embeddings(self, task: int, split: Split) -> npt.NDArray[Any]:
        """Return phi(x) of every row, (rows, d): its mean token embedding, equation (11); pooled once and stored."""
        path = pooled_path(self.storage, self.pooled_name(task, split))
        if intact(path):
            pooled = load_file(path)["pooled"]
        else:
            pooled = pool(self.backbone, self.tokens(task, split), self.settings)
            write_sealed(path, {"pooled": pooled})
        std = self._table_std if self.settings.embed_norm == "std" else None
        return normalise_embeddings(pooled, self.settings.embed_norm, std)

    @cached_property
    def _table_std(self) -> float:
        return table_std(self.backbone)

    def pooled_name(self, task: int, split: Split) -> str:
        """Names a task's pooled embeddings: a hash of all that they depend on."""
        return pooled_name(self._tokens_name(task, split), self.backbone.weights_digest, self.settings)

    def ngrams_name(self, task: int) -> str:
        """Names what the string match knows of a task: a hash of all that it depends on."""
        return content_hash({"ngrams": versions.RECORDS, "tokens": self._tokens_name(task, "train")})

    def _tokens_name(self, task: int, split: Split) -> str:
        return Path(self.tokens(task, split).cache_files[0]["filename"]).parent.name

    def mixture_name(self, task: int) -> str:
        """Names a task's components: a hash of all that they depend on."""
        return mixture_name(self.pooled_name(task, "train"), self.settings, self.seed)

    def scatter_name(self, task: int) -> str:
        """Names a task's scatter: a hash of all that it depends on."""
        return scatter_name(self.pooled_name(task, "train"), self.settings)


def texts_read(backbone: Backbone, prompts: Iterable[Sequence[int]]) -> list[str]:
    """Return prompts as the model reads them, as texts."""
    return backbone.tokenizer.batch_decode([list(ids) for ids in prompts], skip_special_tokens=True)


def table_std(backbone: Backbone) -> float:
    """Return the standard deviation of the embedding table's entries: what `router.embed_norm: std` scales by."""
    return float(backbone.embedding_table.float().std())


@torch.inference_mode()
def pool(backbone: Backbone, tokens: Any, settings: RouterSettings) -> npt.NDArray[np.float32]:
    """Mean of each row's token embeddings from the frozen table, (rows, d) float32, equation (11).

    Which tokens count is `router.pool`'s to say (A18): the prompt or its input alone, with or without special tokens.
    Without `mask_pad` the mean is over the longest prompt of the rows, padding included, as some released code has it.
    """
    column = tokens["prompt_ids" if settings.pool.scope == "prompt" else "input_ids"]
    rows = [list(row) for row in column]
    if settings.pool.special == "drop":
        special = set(backbone.tokenizer.all_special_ids)
        rows = [[token for token in row if token not in special] for row in rows]
    if not settings.pool.mask_pad:
        longest = max(map(len, rows))
        rows = [row + [backbone.pad_id] * (longest - len(row)) for row in rows]
    table = backbone.embedding_table
    means = [table[torch.tensor(row, device=table.device)].float().mean(0) for row in rows]
    return torch.stack(means).cpu().numpy()
