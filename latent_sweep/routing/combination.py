"""How snapshots answer together: a weight for every snapshot in every row of a batch.

last    the newest snapshot alone
sum     all of them with weight one (summing branches, the ablation without a router)
soft    the router's posterior, equation (15)
hard    its largest entry
ngram   the task whose definition shares most n-grams with the prompt, a baseline (`ngram.py`)
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
from safetensors.numpy import load_file

from latent_sweep.backbones.features import mean_embeddings
from latent_sweep.backbones.loading import Backbone
from latent_sweep.data.schema import Split
from latent_sweep.errors import DataError
from latent_sweep.methods.protocol import Combination
from latent_sweep.routing.gaussian import (
    ROUTED,
    GaussianRouter,
    PooledScatter,
    RouterSettings,
    TaskGmm,
    TaskScatter,
    fit_gmm,
    gmm_name,
    normalise_embeddings,
    pooled_covariance,
    pooled_name,
    pooled_path,
    record_path,
    scatter_name,
    scatter_of,
    spread,
)
from latent_sweep.routing.metrics import RoutingMeasures, accuracies, is_posterior, novelty_auroc
from latent_sweep.routing.ngram import TaskNgrams, fit_ngrams, nearest
from latent_sweep.settings import content_hash
from latent_sweep.storage import versions
from latent_sweep.storage.checksummed import verified, write_checksummed

log = logging.getLogger(__name__)

Array = npt.NDArray[np.float64]
MODES = get_args(Combination)

DISTANCE_ROWS = 500
"""Most rows of a task whose distance to the tasks seen is computed: unlike a posterior, each takes d^2 operations."""

DISTANCE_ROWS_IN_ALL = 15 * DISTANCE_ROWS
"""Most of all tasks of a trial, those to come among them: in a stream of many tasks each has fewer."""

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


def weigh(mode: Combination, known: Known, rows: Rows, task: int | None = None) -> Array:
    """Weigh the snapshots of the tasks seen in every row, (rows, tasks_seen).

    Args:
        task: position of the task that the rows are of; `oracle` alone reads it.
    """
    if mode == "soft" or mode == "hard":
        assert known.router is not None, "these modes are the router's"
        return known.router.weights(rows.embeddings(), mode)
    if mode == "ngram":
        return nearest(rows.texts(), known.ngrams)
    if mode == "gates":
        return known.gates(known.tasks_seen, rows.prompts())
    if mode == "sum":
        return np.ones((rows.count, known.tasks_seen))
    assert mode == "last" or task is not None, "the oracle is told of which task rows are"
    return np.tile(np.eye(known.tasks_seen)[-1 if mode == "last" else task], (rows.count, 1))


class Combiner:
    """The weights of one trial's snapshots, row by row.

    Args:
        settings: the trial's `router:` group, its mode resolved.
        tokens: gives the tokenized rows that the router pools.
        gates: gives the weights of the mode `gates`.
        n_tasks: tasks of the whole trial.
        seed: of K-means.
        storage: pooled embeddings and router records are cached below it.
        folds: summed scatters by content, so that a new task is one addition; mixers of one worker may share them.
        gmms: components of tasks by content, so that those of earlier tasks are not read again; shared likewise.
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
        gmms: MutableMapping[str, TaskGmm] | None = None,
    ):
        self.settings, self.backbone, self.tokens, self.gates = settings, backbone, tokens, gates
        self.n_tasks, self.seed, self.storage = n_tasks, seed, storage
        self.folds = {} if folds is None else folds
        self.gmms = {} if gmms is None else gmms
        self._fitted: dict[int, Known] = {}
        """What was asked for last, by the number of tasks seen."""
        self._embedded: dict[tuple[int, Split], npt.NDArray[Any]] = {}
        """The embeddings that were asked for last."""
        self._posterior: dict[tuple[int, int], Array] = {}
        """The log posterior that was asked for last, by the number of tasks seen and the task whose rows they are."""

    @property
    def routes(self) -> bool:
        """Whether weights come from where a prompt seems to belong."""
        return self.settings.combine in ("soft", "hard", "ngram")

    def weights(self, tasks_seen: int) -> list[Array]:
        """Return for each task seen the weights of its test rows: (rows, tasks_seen)."""
        return [self.weights_at(tasks_seen, task) for task in range(tasks_seen)]

    def known(self, tasks_seen: int) -> Known:
        """Return what is known of the tasks seen, fitted once for all their rows."""
        if tasks_seen not in self._fitted:
            mode = self.settings.combine
            router = self._fit(tasks_seen) if mode in ROUTED else None
            ngrams = [self.ngrams(task) for task in range(tasks_seen)] if mode == "ngram" else []
            self._fitted = {tasks_seen: Known(tasks_seen, router, ngrams, self.gates)}
        return self._fitted[tasks_seen]

    def weights_at(self, tasks_seen: int, task: int) -> Array:
        """Return the weights of one task's test rows, (rows, tasks_seen)."""
        mode = self.settings.combine
        if mode == "soft" or mode == "hard":
            return self._router(tasks_seen).weights_of(self.log_posterior(tasks_seen, task), mode)
        return weigh(mode, self.known(tasks_seen), self._rows(task, "test"), task)

    def log_posterior(self, tasks_seen: int, task: int) -> Array:
        """Return log p(t | x) of the task's test rows, (rows, tasks_seen), computed once for weights and evidence."""
        if (tasks_seen, task) not in self._posterior:
            found = self._router(tasks_seen).log_posterior(self.embeddings(task, "test"))
            self._posterior = {(tasks_seen, task): found}
        return self._posterior[tasks_seen, task]

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

    def evidence(self, tasks_seen: int, names: Sequence[str]) -> Evidence:
        """Begin to measure the router on test rows.

        Args:
            names: of all tasks of the trial, in order.
        """
        return Evidence(self, tasks_seen, names)

    def _router(self, tasks_seen: int) -> GaussianRouter:
        """The router over the tasks seen."""
        router = self.known(tasks_seen).router
        assert router is not None, "this way of mixing asks for a posterior"
        return router

    def novelty(self, tasks_seen: int, task: int) -> Array:
        """Compute how far some of a task's test rows lie from the tasks seen; of many tasks each has fewer rows."""
        most = min(DISTANCE_ROWS, max(1, DISTANCE_ROWS_IN_ALL // self.n_tasks))
        return self._router(tasks_seen).distances(spread(self.embeddings(task, "test"), most))

    def _fit(self, tasks_seen: int) -> GaussianRouter:
        """Fit the router; the covariance reads tasks to come only where the settings say so (A16)."""
        pooled_tasks = self.settings.cov.pooled_tasks(tasks_seen, self.n_tasks)
        gmms = [self.gmm(task) for task in range(max(tasks_seen, pooled_tasks))]
        covariance = pooled_covariance(self._pooled(pooled_tasks), gmms[:pooled_tasks], self.settings)
        return GaussianRouter(self.settings).fit(gmms[:tasks_seen], covariance)

    def gmm(self, task: int) -> TaskGmm:
        """The task's components, fitted once and stored."""
        name = self.gmm_name(task)
        if name not in self.gmms:
            path = self._record_path(name)
            record = TaskGmm.load(path)
            if record is None:
                record = fit_gmm(self.embeddings(task, "train"), self.settings, self.seed)
                record.save(path)
            self.gmms[name] = record
        return self.gmms[name]

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
        if (task, split) not in self._embedded:
            path = pooled_path(self.storage, self.pooled_name(task, split))
            if verified(path):
                pooled = load_file(path)["pooled"]
            else:
                pooled = pool(self.backbone, self.tokens(task, split), self.settings)
                write_checksummed(path, {"pooled": pooled})
            std = self._table_std if self.settings.embed_norm == "std" else None
            self._embedded = {(task, split): normalise_embeddings(pooled, self.settings.embed_norm, std)}
        return self._embedded[task, split]

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
        name: str = self.tokens(task, split).folder.name
        return name

    def gmm_name(self, task: int) -> str:
        """Names a task's components: a hash of all that they depend on."""
        return gmm_name(self.pooled_name(task, "train"), self.settings, self.seed)

    def covariance_name(self, tasks_seen: int) -> str:
        """Names the factored covariance after so many tasks: a hash of all that it depends on."""
        s = self.settings
        tasks = range(s.cov.pooled_tasks(tasks_seen, self.n_tasks))
        named = [self.scatter_name(task) for task in tasks]
        if s.cov.center == "component":
            named += [self.gmm_name(task) for task in tasks]
        return content_hash([named, s.cov.identity(), s.epsilon, s.epsilon_mode, s.dtype])

    def scatter_name(self, task: int) -> str:
        """Names a task's scatter: a hash of all that it depends on."""
        return scatter_name(self.pooled_name(task, "train"), self.settings)


class Evidence:
    """What a stage shows of its router, from test rows of the tasks seen, one after the other, and of those to come.

    The router should find rows of its tasks, and those of tasks to come far away.

    Args:
        names: of all tasks of the trial, in order.
    """

    def __init__(self, combiner: Combiner, tasks_seen: int, names: Sequence[str]):
        self._mixer, self._tasks_seen, self._names = combiner, tasks_seen, names
        self._measures = RoutingMeasures(combiner.settings.prune_below)
        self._right: dict[str, float] = {}
        self._are_posteriors = True
        """Whether the gates of every task so far are probabilities of the tasks seen."""
        self._distances: list[Array] = []

    def add(self, task: int, weights: Array) -> None:
        """Measure the rows of the next task seen.

        Args:
            weights: of its test rows, (rows, tasks_seen).
        """
        combiner, name = self._mixer, self._names[task]
        if combiner.settings.combine == "ngram":  # it has no posterior
            self._right[name] = float((weights.argmax(axis=1) == task).mean())
        elif combiner.settings.combine == "gates":
            self._are_posteriors = self._are_posteriors and is_posterior(weights)
            if self._are_posteriors:
                with np.errstate(divide="ignore"):
                    self._measures.add(name, np.log(weights))
        elif combiner.routes:
            self._measures.add(name, combiner.log_posterior(self._tasks_seen, task))
            if self._tasks_seen < combiner.n_tasks:
                self._distances.append(combiner.novelty(self._tasks_seen, task))

    def measures(self) -> dict[str, float]:
        """Return what was measured, by name.

        That is what `RoutingMeasures` gives and, where tasks are still to come whose rows can be read,
        `router_novelty_auroc`; of the string match its accuracy alone; of a method's gates what `RoutingMeasures`
        gives, if they are probabilities; nothing where nothing is routed.
        """
        combiner = self._mixer
        if combiner.settings.combine == "gates":
            return self._measures.measures() if self._are_posteriors else {}
        if not combiner.routes:
            return {}
        if combiner.settings.combine == "ngram":
            return accuracies(self._right)
        found = self._measures.measures()
        if self._tasks_seen < combiner.n_tasks:
            to_come = range(self._tasks_seen, combiner.n_tasks)
            try:
                unseen = np.concatenate([combiner.novelty(self._tasks_seen, task) for task in to_come])
            except DataError as error:  # the trial ends where it needs these rows, and not before
                log.warning("after %s tasks, novelty is not measured: %s", self._tasks_seen, error)
                return found
            found["router_novelty_auroc"] = novelty_auroc(np.concatenate(self._distances), unseen)
        return found


def texts_read(backbone: Backbone, prompts: Iterable[Sequence[int]]) -> list[str]:
    """Return prompts as the model reads them, as texts."""
    return backbone.tokenizer.batch_decode([list(ids) for ids in prompts], skip_special_tokens=True)


def table_std(backbone: Backbone) -> float:
    """Return the standard deviation of the embedding table's entries: what `router.embed_norm: std` scales by."""
    return float(backbone.embedding_table.float().std())


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
    if [] in rows:
        raise DataError(
            f"router.pool: row {rows.index([]):,} (0-based) of a task has no token to take the mean of, with scope "
            f"{settings.pool.scope} and special {settings.pool.special}; use scope prompt, or special keep"
        )
    if not settings.pool.mask_pad:
        longest = max(map(len, rows))
        rows = [row + [backbone.pad_id] * (longest - len(row)) for row in rows]
    return mean_embeddings(backbone, rows)
