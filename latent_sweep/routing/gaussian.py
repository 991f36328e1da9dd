"""The training-free task router: which task does an input belong to, judged from its pooled frozen embedding.

Each task leaves two records: a `TaskScatter`, which depends on its embeddings alone, and a `TaskGmm` for one K and
seed. `PooledScatter` adds up the scatters, one addition per new task; `GaussianRouter` turns the mixtures of the tasks
seen and the covariance C pooled from those scatters into a posterior over tasks. All components share C, so `x' C^-1 x`
and the log-determinant cancel between tasks and the router is a linear classifier:

    log p(x | t) = logsumexp_k(log pi_tk + mu_tk' C^-1 x - mu_tk' C^-1 mu_tk / 2) + const(x)

One Cholesky factor per fit and one matrix product per batch; nothing is inverted, and no input is whitened but to tell
how far it lies from everything seen. Symmetric matrices are kept as their triangle: half the bytes to store and to add.

Letters: n inputs, d embedding width, K components of one task, T tasks, M components of all tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from safetensors.numpy import load_file

from latent_sweep.errors import LatentSweepError
from latent_sweep.methods.protocol import Combination
from latent_sweep.settings import FROM_PRESET, INFERENCE_ONLY, Settings, content_hash
from latent_sweep.storage import versions
from latent_sweep.storage.checksummed import verified, write_checksummed

ROUTED: tuple[Combination, ...] = ("soft", "hard")
"""Modes whose weights are the router's posterior."""

NO_SCATTER = 1e-12
"""A scatter within components that is this share of the whole, or less, is the rounding of a difference of two."""

# scipy is imported where it is used: it takes half a second, and plans read the settings alone
Array = npt.NDArray[np.float64]
_Factor = tuple[npt.NDArray[np.floating[Any]], bool]
"""What `scipy.linalg.cho_factor` returns: U with C = U' U in the upper triangle, and False."""


class RouterError(LatentSweepError, ValueError):
    """Raised when these embeddings or records and these settings do not give a router."""


class RouterNotFitted(LatentSweepError):
    """Raised when the router is asked for a posterior before `fit`."""


class GmmSettings(Settings):
    """The settings of the mixture of one task, how it is fitted (Eq. 12)."""

    em_iters: int = Field(default=0, ge=0, json_schema_extra=INFERENCE_ONLY)
    """EM steps after K-means, for means and shares, under the task's own fixed covariance (A10); 0: K-means only."""
    init: Literal["kmeans++", "random"] = Field(default="kmeans++", json_schema_extra=INFERENCE_ONLY)
    """How K-means chooses its first centres (A11)."""
    n_init: int = Field(default=1, ge=1, json_schema_extra=INFERENCE_ONLY)
    """Restarts of K-means; the one with the smallest inertia is kept (A11)."""
    kmeans_iters: int = Field(default=30, ge=1, json_schema_extra=INFERENCE_ONLY)
    """Largest number of Lloyd iterations; K-means ends earlier only where nothing moves any more (A11)."""
    weights: Literal["share", "uniform"] = Field(default="share", json_schema_extra=INFERENCE_ONLY)
    """pi_tk: the component's share of the task's embeddings, at least 1/n, or 1/K (A12)."""
    whiten_first: bool = Field(default=False, json_schema_extra=INFERENCE_ONLY)
    """Run K-means in the space whitened by the task's own regularised covariance, not in the raw one (A11)."""


class CovarianceSettings(Settings):
    """The settings of the shared covariance, how it is pooled (Eq. 13)."""

    center: Literal["task", "component"] = Field(default="task", json_schema_extra=INFERENCE_ONLY)
    """Scatter is taken about the task's mean, as in the paper's equation, or about the components' means (A13)."""
    ddof: Literal["none", "tasks"] = Field(default="none", json_schema_extra=INFERENCE_ONLY)
    """The pooled scatter is divided by N, the number of embeddings, or by N minus the number of tasks (A14)."""
    refresh: Literal["per_task", "final", "frozen_first"] = Field(default="per_task", json_schema_extra=INFERENCE_ONLY)
    """Which tasks are pooled (A16): those seen so far, all tasks of the trial at every stage, or the first one only."""

    def pooled_tasks(self, tasks_seen: int, n_tasks: int) -> int:
        """Count the tasks, from the first, that the covariance reads after `tasks_seen` of `n_tasks`."""
        return {"per_task": tasks_seen, "final": n_tasks, "frozen_first": 1}[self.refresh]


class PoolSettings(Settings):
    """The settings that say which token embeddings are averaged into one embedding per input (Eq. 11)."""

    scope: Literal["prompt", "input_only"] = Field(default="prompt", json_schema_extra=INFERENCE_ONLY)
    """The whole prompt with its task definition, or the input text alone (A18)."""
    mask_pad: bool = Field(default=True, json_schema_extra=INFERENCE_ONLY)
    """Leave padding positions out of the mean (A18)."""
    special: Literal["keep", "drop"] = Field(default="keep", json_schema_extra=INFERENCE_ONLY)
    """Keep the tokenizer's other special tokens, such as end of sequence, in the mean, or drop them (A18)."""
    truncate: bool = Field(default=True, json_schema_extra=INFERENCE_ONLY)
    """Pool the tokens that the model reads, after truncation, or those of the whole text (A19)."""


class RouterSettings(Settings):
    """The `router:` group of a sweep file. Training reads none of it."""

    combine: Combination = Field(default="soft", json_schema_extra=INFERENCE_ONLY | FROM_PRESET)
    """How snapshots answer together (Eq. 15): `soft` by the posterior, `hard` by its argmax, `ngram` by the nearest
    definition as a string (a control, which reads nothing else of this group), `gates` by the method's own gates,
    `sum` with weight 1 each, `last` the newest alone, `oracle` the true task's; null: as the method says."""
    components: int = Field(default=5, ge=1, json_schema_extra=INFERENCE_ONLY)
    """K, Gaussian components per task (Eq. 12)."""
    epsilon: float = Field(default=0.01, ge=0, json_schema_extra=INFERENCE_ONLY)
    """Ridge added to the diagonal of the pooled covariance (Eq. 13), in the unit that `epsilon_mode` says (A15)."""
    epsilon_mode: Literal["relative", "absolute"] = Field(default="relative", json_schema_extra=INFERENCE_ONLY)
    """`epsilon` is a multiple of the pooled covariance's mean variance tr(S)/d, or the ridge itself (A15)."""
    embed_norm: Literal["none", "l2", "std"] = Field(default="none", json_schema_extra=INFERENCE_ONLY)
    """Scaling of pooled embeddings (A15): none, to unit length, or by the standard deviation of the table's entries."""
    temperature: float = Field(default=1.0, gt=0, json_schema_extra=INFERENCE_ONLY)
    """The log posterior is divided by this before it is normalised (A21); above 1 is softer."""
    prior: Literal["uniform", "n_t"] = Field(default="uniform", json_schema_extra=INFERENCE_ONLY)
    """Task prior (Eq. 14): equal, or proportional to the number of training embeddings (A22)."""
    prune_below: float = Field(default=1e-6, ge=0, lt=1, json_schema_extra=INFERENCE_ONLY)
    """Mixing weights below this are dropped and the others of their row renormalised; 0 keeps all."""
    dtype: Literal["float64", "float32"] = Field(default="float64", json_schema_extra=INFERENCE_ONLY)
    """Precision of the Cholesky factor and of the linear scores (A17); tasks are fitted in float64 in any case."""
    gmm: GmmSettings = Field(default=GmmSettings(), json_schema_extra=INFERENCE_ONLY)
    """How the mixture of one task is fitted."""
    cov: CovarianceSettings = Field(default=CovarianceSettings(), json_schema_extra=INFERENCE_ONLY)
    """How the shared covariance is pooled."""
    pool: PoolSettings = Field(default=PoolSettings(), json_schema_extra=INFERENCE_ONLY)
    """Which token embeddings are averaged."""

    def record_identity(self) -> dict[str, Any]:
        """The settings that a `TaskGmm` depends on, beside its seed and the texts that were pooled."""
        content = self.identity()
        names = ["components", "embed_norm", "gmm", "pool"]
        covariance_names = []
        if self.gmm.whiten_first or self.gmm.em_iters:  # both need the task's own regularised covariance
            names += ["epsilon", "epsilon_mode"]
            covariance_names = ["center", "ddof"]
        return {name: content[name] for name in names} | {name: content["cov"][name] for name in covariance_names}

    def scatter_identity(self) -> dict[str, Any]:
        """The settings that a `TaskScatter` depends on, beside the texts that were pooled: neither K nor a seed."""
        content = self.identity()
        return {name: content[name] for name in ("embed_norm", "pool")}


R = TypeVar("R", bound="_Record")


@dataclass(frozen=True, eq=False)
class _Record:
    """The part of one task that the router keeps, as a sealed file; no embedding of a single input is among it."""

    def save(self, path: Path) -> None:
        """Write the record to `path`, atomically and with its digest."""
        write_checksummed(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls: type[R], path: Path) -> R | None:
        """Read what `save` wrote; None where there is nothing, or nothing intact."""
        if not verified(path):
            return None
        arrays = load_file(path)
        return cls(**{name: array if array.ndim else array.item() for name, array in arrays.items()})


@dataclass(frozen=True, eq=False)
class TaskScatter(_Record):
    """One task's part of the shared covariance (Eq. 13).

    Raises:
        ValueError: an array that is not the triangle of a matrix, or no embeddings.
    """

    triangle: Array
    """(d (d + 1) / 2,) lower triangle, row by row, of S_t = sum (x - mean)(x - mean)'; a sum and not an average."""
    count: int
    """n_t, embeddings behind it."""

    def __post_init__(self) -> None:
        if self.triangle.dtype != np.float64 or self.triangle.shape != (self.width * (self.width + 1) // 2,):
            found = f"{self.triangle.dtype} {self.triangle.shape}"
            raise ValueError(f"task scatter: `triangle` is {found}, expected float64 (d (d + 1) / 2,)")
        if self.count < 1:
            raise ValueError(f"task scatter: `count` is {self.count}, expected at least 1")

    @property
    def width(self) -> int:
        """Return d, the width of the embeddings."""
        return (isqrt(8 * self.triangle.size + 1) - 1) // 2


@dataclass(frozen=True, eq=False)
class TaskGmm(_Record):
    """The components of one task without their covariance (Eq. 12). All arrays are float64.

    Raises:
        ValueError: an array has another dtype or a shape that does not fit the others.
    """

    means: Array
    """(K, d) component means mu_tk."""
    shares: Array
    """(K,) component weights pi_tk, summing to one."""
    counts: Array
    """(K,) embeddings that belong to each component; fractions after EM."""

    def __post_init__(self) -> None:
        K = len(self.shares)
        shapes = {"means": (K, *self.means.shape[1:2]), "shares": (K,), "counts": (K,)}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float64:
                found = f"{array.dtype} {array.shape}"
                raise ValueError(f"task mixture: `{name}` is {found}, expected float64 {shape}")

    @property
    def count(self) -> int:
        """Return n_t, the number of embeddings behind the mixture."""
        return round(self.counts.sum())

    def between(self) -> Array:
        """Scatter of the component means about the task's mean, what `cov.center: component` takes away, as (K, d).

        The scatter is `B' B` of the B given here.
        """
        mean = self.counts @ self.means / self.counts.sum()
        return np.sqrt(self.counts)[:, None] * (self.means - mean)


def pooled_name(tokens: str, weights: str, settings: RouterSettings) -> str:
    """Names the pooled embeddings of some rows: a hash of all that they depend on.

    Args:
        tokens: name of the cache of their token ids.
        weights: digest of the backbone's weights.
    """
    pooling = [settings.pool.identity(), versions.POOLING]
    return content_hash({"tokens": tokens, "weights": weights, "pool": pooling})


def gmm_name(pooled: str, settings: RouterSettings, seed: int) -> str:
    """Names a `TaskGmm`: a hash of all that it depends on, scikit-learn among it, whose K-means it is.

    Args:
        pooled: name of the training rows' pooled embeddings.
    """
    fit = [settings.record_identity(), seed, versions.RECORDS, versions.library("scikit-learn")]
    return content_hash({"mixture": fit, "pooled": pooled})


def scatter_name(pooled: str, settings: RouterSettings) -> str:
    """Names a `TaskScatter`: a hash of all that it depends on."""
    return content_hash({"scatter": [settings.scatter_identity(), versions.RECORDS], "pooled": pooled})


def pooled_path(storage: Path, name: str) -> Path:
    """Return where pooled embeddings of this name are cached below a storage's folder."""
    return storage / "embeddings" / f"{name}.safetensors"


def record_path(storage: Path, name: str) -> Path:
    """Return where a router record of this name is kept below a storage's folder."""
    return storage / "router" / f"{name}.safetensors"


def spread(rows: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Return at most this many rows, evenly spaced from the first to the last: a file may be sorted by its labels."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]


def normalise_embeddings(
    embeddings: npt.NDArray[Any], how: Literal["none", "l2", "std"], table_std: float | None = None
) -> npt.NDArray[Any]:
    """Pooled embeddings scaled as `router.embed_norm` says (A15); the same call serves fitting and routing.

    Args:
        embeddings: (n, d) pooled embeddings.
        how: "none": unchanged. "l2": each row to unit length, a row of zeros stays so. "std": divided by `table_std`,
            one scalar for all tasks, so that an absolute epsilon means the same for every backbone.
        table_std: standard deviation of all entries of the frozen embedding table; read for "std" only.
    """
    if how == "none":
        return embeddings
    if how == "l2":
        lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
        return embeddings / np.where(lengths > 0, lengths, 1)
    if table_std is None or not table_std > 0:
        raise ValueError(f"embed_norm std: table_std is {table_std}, expected the table's standard deviation, above 0")
    return embeddings / table_std


def prune(weights: Array, threshold: float) -> Array:
    """`weights` (n, T) with entries below `threshold` set to zero and each row summing to one again.

    The largest weight of a row always stays, whatever the threshold.
    """
    kept = (weights >= threshold) | (weights == weights.max(axis=1, keepdims=True))
    weights = np.where(kept, weights, 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


def scatter_of(embeddings: npt.NDArray[Any]) -> TaskScatter:
    """The scatter of one task's pooled embeddings (n, d), in float64 (Eq. 13).

    Raises:
        RouterError: embeddings that are not finite.
    """
    return _Centred(embeddings).scatter


def fit_gmm(embeddings: npt.NDArray[Any], settings: RouterSettings, seed: int) -> TaskGmm:
    """Fit the components of one task (Eq. 12).

    Args:
        embeddings: (n, d) pooled embeddings of the task's training inputs, n >= K.
        settings: the router's settings; `record_identity` lists those that are read here.
        seed: of the K-means initialisation; a non-negative integer of any size.

    Returns:
        The task's mixture. It has fewer than K components where there are fewer than K distinct embeddings.

    Raises:
        RouterError: fewer embeddings than components, or embeddings that are not finite, or a singular covariance
            where one is needed (`gmm.whiten_first`, `gmm.em_iters`).
    """
    from scipy.special import softmax

    X, K = _Centred(embeddings), settings.components
    if len(X.centred) < K:
        raise RouterError(
            f"router.components: K-means for {K} components was given {len(X.centred)} embeddings, expected at least "
            f"{K}. Lower router.components, or give this task more training rows."
        )
    mixture = X.mixture(_kmeans(X, settings, seed), settings)
    if settings.gmm.em_iters:
        factor = X.factor(mixture, settings)
        for _ in range(settings.gmm.em_iters):
            slopes, offsets = _linear_form(factor, mixture.means - X.mean, mixture.shares)
            mixture = X.mixture(softmax(X.centred @ slopes + offsets, axis=1), settings)
    return mixture


class _Centred:
    """The embeddings of one task, centred once, and what is computed from them."""

    def __init__(self, embeddings: npt.NDArray[Any]) -> None:
        X = _checked(embeddings)
        self.mean: Array = X.mean(axis=0, dtype=np.float64)
        self.centred: Array = X - self.mean

    @cached_property
    def scatter(self) -> TaskScatter:
        # dsyrk computes one triangle, half the work of a product, in place: (d, n) is the transposed view's own order
        from scipy.linalg.blas import dsyrk
        from scipy.linalg.lapack import dtrttp

        upper, _ = dtrttp(dsyrk(1.0, self.centred.T), uplo="U")
        return TaskScatter(upper, len(self.centred))

    def mixture(self, responsibilities: Array, settings: RouterSettings) -> TaskGmm:
        """Components that average the embeddings with the weights (n, K): the M step."""
        n, K = responsibilities.shape
        counts = np.maximum(responsibilities.sum(axis=0), 10 * np.finfo(np.float64).eps)
        means = self.mean + responsibilities.T @ self.centred / counts[:, None]
        if settings.gmm.weights == "uniform":
            shares = np.full(K, 1 / K)
        else:
            shares = np.maximum(counts / n, 1 / n)
            shares /= shares.sum()
        return TaskGmm(means, shares, counts)

    def factor(self, mixture: TaskGmm, settings: RouterSettings) -> _Factor:
        """Cholesky factor of the task's own regularised covariance."""
        own = PooledScatter()
        own.add("own", self.scatter)
        return _cholesky(pooled_covariance(own, [mixture], settings), settings)


def _kmeans(X: _Centred, settings: RouterSettings, seed: int) -> Array:
    """Cluster into (n, K) one-hot membership; clusters without members are left out."""
    gmm, points = settings.gmm, X.centred
    if settings.components == 1:
        return np.ones((len(points), 1))

    from scipy.linalg import solve_triangular
    from sklearn.cluster import KMeans  # a second to import, and only more components need it

    if gmm.whiten_first:
        U, _ = X.factor(X.mixture(np.ones((len(points), 1)), settings), settings)
        points = solve_triangular(U, points.T, trans="T", check_finite=False).T
    kmeans = KMeans(
        n_clusters=settings.components,
        init="k-means++" if gmm.init == "kmeans++" else gmm.init,
        n_init=gmm.n_init,
        max_iter=gmm.kmeans_iters,
        tol=0.0,  # the paper states a number of iterations, not a tolerance
        random_state=np.random.RandomState(np.random.MT19937(seed)),
    )
    labels = kmeans.fit(points).labels_
    # Means are averaged again from the labels: scikit-learn's own sums depend on the order in which threads finish.
    return (labels[:, None] == np.unique(labels)).astype(np.float64)


class PooledScatter:
    """The sum of the scatters of several tasks, in which one more task is one addition (Eq. 13).

    Scatters are added in the order of the tasks, so the sum is bit for bit the same whether it was reached task by task
    or in one go.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """Content names of the scatters in the sum, in the order in which they were added."""
        self.count = 0
        """Embeddings of all tasks in the sum."""
        self.triangle: Array = np.zeros(0)
        """(d (d + 1) / 2,) lower triangle of the sum, row by row."""

    def add(self, name: str, scatter: TaskScatter) -> None:
        """Add the scatter of one more task.

        Raises:
            RouterError: it has another width than the others.
        """
        if not self.names:
            self.triangle = np.zeros_like(scatter.triangle)
        if scatter.triangle.shape != self.triangle.shape:
            raise RouterError(
                f"router: a task scatter has width {scatter.width}, expected that of {len(self.names)} earlier ones, "
                f"whose triangles have {self.triangle.size} entries; they come from several backbones"
            )
        self.triangle += scatter.triangle
        self.count += scatter.count
        self.names.append(name)

    def extend(self, names: Sequence[str], scatter_at: Callable[[int], TaskScatter]) -> None:
        """Make it the sum of these scatters: add what is missing, or start again if it holds anything else.

        Args:
            names: content names of the scatters, in the order of the tasks.
            scatter_at: gives the scatter at a position of `names`; asked only for those that are missing.
        """
        if self.names != list(names[: len(self.names)]):
            self.names, self.count = [], 0
        for position in range(len(self.names), len(names)):
            self.add(names[position], scatter_at(position))


def pooled_covariance(pooled: PooledScatter, mixtures: Sequence[TaskGmm], settings: RouterSettings) -> Array:
    """The shared covariance C = S + ridge * I, with S = sum_t S_t / sum_t n_t (Eq. 13), as (d, d) float64.

    The denominator loses the number of tasks under `cov.ddof: tasks`. The ridge is `epsilon`, or epsilon * tr(S)/d
    under `epsilon_mode: relative`.

    Args:
        pooled: the summed scatters of the tasks.
        mixtures: of the same tasks; read under `cov.center: component` only, where the scatter is the one within
            components: the total less the one between them.

    Returns:
        C in its upper triangle, columns contiguous; nobody may read what lies below.

    Raises:
        RouterError: no tasks, the denominator is not positive, or the scatter is zero and the ridge a share of it.
    """
    from scipy.linalg.blas import dsyrk
    from scipy.linalg.lapack import dtpttr

    tasks = len(pooled.names)
    denominator = pooled.count - (tasks if settings.cov.ddof == "tasks" else 0)
    if denominator <= 0:
        raise RouterError(
            f"router: the pooled covariance of {tasks} tasks with {pooled.count} embeddings in all would be divided "
            f"by {denominator} (cov.ddof: {settings.cov.ddof}). Use more embeddings than tasks, or cov.ddof: none."
        )
    d = (isqrt(8 * pooled.triangle.size + 1) - 1) // 2
    covariance, _ = dtpttr(d, pooled.triangle, uplo="U")
    total = np.trace(covariance)
    if settings.cov.center == "component":
        between = np.concatenate([mixture.between() for mixture in mixtures])
        covariance = dsyrk(-1.0, between.T, beta=1.0, c=covariance, overwrite_c=True)
    covariance /= denominator
    if (trace := np.trace(covariance)) * denominator <= NO_SCATTER * total:
        covariance[:] = 0  # what is left is rounding
        if settings.epsilon_mode == "relative":
            raise RouterError(no_scatter(tasks, pooled.count, settings))
    ridge = settings.epsilon
    if settings.epsilon_mode == "relative":
        ridge *= trace / d
    covariance[np.diag_indices(d)] += ridge
    return covariance


def no_scatter(tasks: int, embeddings: int, settings: RouterSettings) -> str:
    """Say what helps where a relative ridge would be a share of nothing: nothing else does."""
    about = "the mean of its task" if settings.cov.center == "task" else "the mean of its component (cov.center)"
    return (
        f"router.epsilon_mode: found relative, but every one of the {embeddings:,} training embeddings of "
        f"{tasks} task{'s' * (tasks > 1)} is {about}, so the pooled covariance is zero, and so is any share of it. Use "
        "router.epsilon_mode: absolute; or give the tasks several different prompts: benchmark.train_per_task, "
        "benchmark.max_source_length"
    )


class GaussianRouter:
    """Posterior over the tasks seen so far for pooled embeddings (Eq. 14), from their records alone.

    Adding a task is `fit` with one more mixture; no embedding of an earlier task is needed again. Attributes that end
    in an underscore exist after `fit`. Routing reads M (d + 1) numbers and the origin; distances read the factor too.
    """

    origin_: npt.NDArray[np.floating[Any]]
    """(d,) grand mean of the component means; everything is centred on it, which keeps float32 scores accurate."""
    slopes_: npt.NDArray[np.floating[Any]]
    """(d, M) C^-1 mu of every component of every task, in `settings.dtype`."""
    offsets_: npt.NDArray[np.floating[Any]]
    """(M,) log pi - mu' C^-1 mu / 2, in `settings.dtype`."""
    first_components_: npt.NDArray[np.intp]
    """(T,) column of each task's first component."""
    log_prior_: Array
    """(T,) log p(t), up to a constant."""
    factor_: npt.NDArray[np.floating[Any]]
    """(d, d) U with C = U' U in its upper triangle, in `settings.dtype`; nobody may read what lies below."""
    whitened_: npt.NDArray[np.floating[Any]]
    """(M, d) component means less the origin, whitened: U'^-1 mu."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings

    def fit(self, mixtures: Sequence[TaskGmm], covariance: Array) -> GaussianRouter:
        """Make the tasks of `mixtures` the candidates, and return self.

        Args:
            mixtures: one per candidate task, in the order of the posterior's columns.
            covariance: (d, d) as `pooled_covariance` returns it; it is overwritten.

        Raises:
            RouterError: no mixtures, another width than the covariance's, or a covariance that is not positive
                definite.
        """
        if not mixtures:
            raise RouterError("the router was given no task mixtures, expected at least one")
        widths = sorted({mixture.means.shape[1] for mixture in mixtures} | {len(covariance)})
        if len(widths) > 1:
            raise RouterError(
                f"router: task records have widths {widths}, expected one; they come from several backbones"
            )
        factor = _cholesky(covariance.astype(self.settings.dtype, copy=False), self.settings)
        self.factor_, _ = factor
        means = np.concatenate([mixture.means for mixture in mixtures])
        shares = np.concatenate([mixture.shares for mixture in mixtures])
        self.origin_ = means.mean(axis=0)
        centred = (means - self.origin_).astype(self.settings.dtype)
        self.slopes_, self.offsets_ = _linear_form(factor, centred, shares)
        self.whitened_ = self._whitened(centred)
        self.first_components_ = np.cumsum([0] + [len(mixture.shares) for mixture in mixtures[:-1]])
        counts = np.array([mixture.count for mixture in mixtures], dtype=np.float64)
        self.log_prior_ = np.log(counts) if self.settings.prior == "n_t" else np.zeros_like(counts)
        return self

    def log_posterior(self, embeddings: npt.NDArray[Any]) -> Array:
        """Compute log p(t | x) (Eq. 14) of embeddings (n, d) as (n, T), at the settings' temperature and prior.

        Raises:
            RouterNotFitted: `fit` was not called.
            RouterError: the embeddings are not finite, or have another width than the records.
        """
        from scipy.special import log_softmax

        scores = (self._centred(embeddings) @ self.slopes_ + self.offsets_).astype(np.float64, copy=False)
        log_likelihood = np.logaddexp.reduceat(scores, self.first_components_, axis=1)
        return log_softmax((log_likelihood + self.log_prior_) / self.settings.temperature, axis=1)

    def distances(self, embeddings: npt.NDArray[Any]) -> Array:
        """Compute how far embeddings (n, d) lie from all that has been seen, as (n,).

        The distance is Mahalanobis's to the nearest component of any task, min_tk sqrt((x - mu_tk)' C^-1 (x - mu_tk)):
        the novelty score of Lee et al. (2018), with mixtures in the place of classes.

        Raises:
            RouterNotFitted: `fit` was not called.
            RouterError: the embeddings are not finite, or have another width than the records.
        """
        from scipy.spatial.distance import cdist

        rows = self._whitened(self._centred(embeddings))
        return cdist(rows, self.whitened_).min(axis=1)

    def _centred(self, embeddings: npt.NDArray[Any]) -> npt.NDArray[np.floating[Any]]:
        """Check embeddings (n, d) and subtract the origin, in `settings.dtype`."""
        if not hasattr(self, "slopes_"):
            raise RouterNotFitted("the router has no tasks yet: call `fit` with at least one task record first")
        X = _checked(embeddings, width=len(self.origin_))
        return np.asarray(X - self.origin_, self.settings.dtype)

    def _whitened(self, centred: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
        """Return U'^-1 x of each row, (n, d): its squared length is x' C^-1 x."""
        from scipy.linalg import solve_triangular

        return solve_triangular(self.factor_, centred.T, trans="T", check_finite=False).T

    def posterior(self, embeddings: npt.NDArray[Any]) -> Array:
        """Compute p(t | x) of embeddings (n, d) as (n, T); rows sum to one."""
        return np.exp(self.log_posterior(embeddings))

    def weights(self, embeddings: npt.NDArray[Any], mode: Literal["soft", "hard"]) -> Array:
        """Weigh the snapshots (Eq. 15) for embeddings (n, d) as (n, T); rows sum to one.

        "soft" is the posterior pruned at `prune_below`; "hard" puts weight 1 on its largest entry, the earliest task
        where several are equal.
        """
        return self.weights_of(self.log_posterior(embeddings), mode)

    def weights_of(self, log_posterior: Array, mode: Literal["soft", "hard"]) -> Array:
        """Weigh the snapshots as `weights` does, from the log posterior (n, T) of the embeddings."""
        if mode == "hard":
            return np.eye(log_posterior.shape[1])[log_posterior.argmax(axis=1)]
        return prune(np.exp(log_posterior), self.settings.prune_below)


def _cholesky(covariance: npt.NDArray[np.floating[Any]], settings: RouterSettings) -> _Factor:
    """Factor a covariance given by its upper triangle, which is overwritten; refuse one singular to its precision."""
    from scipy.linalg import LinAlgError, cho_factor

    d, dtype = len(covariance), covariance.dtype
    largest_variance = float(covariance.diagonal().max())
    try:
        U, lower = cho_factor(covariance, overwrite_a=True, check_finite=False)
        singular = np.min(U.diagonal()) ** 2 <= 10 * np.finfo(dtype).eps * largest_variance
    except LinAlgError:
        singular = True
    if singular:
        wider = " or use router.dtype: float64" if settings.epsilon and dtype == np.float32 else ""
        raise RouterError(
            f"router: the pooled covariance ({d} x {d}) is not positive definite in {dtype}: its ridge is too small "
            f"beside its largest variance, {largest_variance:.2g}. Raise router.epsilon (now {settings.epsilon:g}, "
            f"{settings.epsilon_mode}){wider}."
        )
    return U, lower


def _linear_form(
    factor: _Factor, means: npt.NDArray[np.floating[Any]], shares: Array
) -> tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.floating[Any]]]:
    """Slopes (d, M) and offsets (M,) such that `x @ slopes + offsets` is log(pi N(x | mu, C)) up to a constant in x."""
    from scipy.linalg import cho_solve

    slopes = cho_solve(factor, means.T, check_finite=False)
    offsets = np.log(shares) - 0.5 * np.einsum("md,dm->m", means, slopes)
    return slopes, offsets.astype(slopes.dtype, copy=False)


def _checked(embeddings: npt.NDArray[Any], width: int | None = None) -> npt.NDArray[Any]:
    """Return `embeddings` (n, d) as they are, checked to be finite and with d == `width` where one is known."""
    X = np.asarray(embeddings)
    if X.ndim != 2 or (width is not None and X.shape[1] != width):
        raise RouterError(f"router: embeddings have shape {X.shape}, expected (inputs, {width or 'width'})")
    finite = np.isfinite(X).all(axis=1)
    if not finite.all():
        raise RouterError(f"router: embedding {int(finite.argmin())} of {len(X)} is not finite; check the pooled text")
    return X
