"""The training-free task router: which task does an input belong to, given its pooled frozen embedding?

Each task leaves two records: a `TaskScatter`, which depends only on its embeddings, and a `TaskGmm` for one K and seed.
`GaussianRouter` turns the mixtures of the tasks seen and the covariance C pooled from their scatters into a posterior
over tasks. All components share C, so `x' C^-1 x` and the log-determinant cancel and the router is a linear classifier:

    log p(x | t) = logsumexp_k(log pi_tk + mu_tk' C^-1 x - mu_tk' C^-1 mu_tk / 2) + const(x)

This takes one Cholesky factor per fit and one matrix product per batch. Symmetric matrices are stored and added as
triangles, in half the bytes.

Letters: n inputs, d embedding width, K components per task, M in all, T tasks. A10, A11, ...: the paper's open points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from math import isqrt
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field
from safetensors.numpy import load_file

from latent_sweep.errors import LatentSweepError
from latent_sweep.methods.protocol import Combination
from latent_sweep.settings import FROM_PRESET, INFERENCE_ONLY, LEFT_OUT_AT_DEFAULT, Settings, content_hash, shorthand
from latent_sweep.storage import versions
from latent_sweep.storage.checksummed import verified, write_checksummed

ROUTED: tuple[Combination, ...] = ("soft", "hard")

NO_SCATTER = 1e-12
"""If the scatter within components is at most this share of the total, it is only rounding error."""

# scipy is imported inside functions: it takes half a second, and plans only read the settings
Array = npt.NDArray[np.float64]
_Factor = tuple[npt.NDArray[np.floating[Any]], bool]
"""What `scipy.linalg.cho_factor` returns: U with C = U' U in the upper triangle, and False."""


class RouterError(LatentSweepError, ValueError):
    """Embeddings, records and settings from which no router can be fitted."""


class RouterNotFitted(LatentSweepError):
    """The router was used before `fit`."""


class GmmSettings(Settings):
    """How the Gaussian mixture of one task is fitted (Eq. 12)."""

    em_iters: int = Field(default=0, ge=0, json_schema_extra=INFERENCE_ONLY)
    """EM steps after K-means, for means and shares, under the task's own fixed covariance (A10); 0 is K-means only."""
    init: Literal["kmeans++", "random"] = Field(default="kmeans++", json_schema_extra=INFERENCE_ONLY)
    """Initial centers of K-means (A11)."""
    n_init: int = Field(default=1, ge=1, json_schema_extra=INFERENCE_ONLY)
    """Restarts of K-means; the one with the smallest inertia is kept (A11)."""
    kmeans_iters: int = Field(default=30, ge=1, json_schema_extra=INFERENCE_ONLY)
    """Maximum Lloyd iterations; K-means stops earlier only when it has converged exactly (A11)."""
    weights: Literal["share", "uniform"] = Field(default="share", json_schema_extra=INFERENCE_ONLY)
    """Weight of a component in its task's mixture: `share`, the share of the task's n embeddings that it holds, at
    least 1/n, or `uniform`, 1/K (A12)."""
    whiten_first: bool = Field(default=False, json_schema_extra=INFERENCE_ONLY)
    """Run K-means in the space whitened by the task's own regularized covariance, not in the raw one (A11)."""


class CovarianceSettings(Settings):
    """How the shared covariance is pooled (Eq. 13)."""

    center: Literal["task", "component"] = Field(default="task", json_schema_extra=INFERENCE_ONLY)
    """Scatter about the `task`'s mean, as in the paper's equation, or about the means of its `component`s (A13)."""
    ddof: Literal["none", "tasks"] = Field(default="none", json_schema_extra=INFERENCE_ONLY)
    """Divide the pooled scatter by N, the number of embeddings, or by N minus the number of `tasks` (A14)."""
    refresh: Literal["per_task", "final", "frozen_first"] = Field(default="per_task", json_schema_extra=INFERENCE_ONLY)
    """Tasks pooled (A16): those seen so far (`per_task`), all tasks of the trial at every stage (`final`), or only the
    first (`frozen_first`)."""

    def pooled_tasks(self, tasks_seen: int, n_tasks: int) -> int:
        """Count the tasks, from the first, that the covariance reads after `tasks_seen` of `n_tasks`."""
        return {"per_task": tasks_seen, "final": n_tasks, "frozen_first": 1}[self.refresh]


class PoolSettings(Settings):
    """Which token embeddings are averaged into one embedding per input (Eq. 11)."""

    scope: Literal["prompt", "input_only"] = Field(default="prompt", json_schema_extra=INFERENCE_ONLY)
    """The whole prompt with its task definition, or only the input text (`input_only`) (A18)."""
    mask_pad: bool = Field(default=True, json_schema_extra=INFERENCE_ONLY)
    """Leave padding positions out of the mean (A18)."""
    special: Literal["keep", "drop"] = Field(default="keep", json_schema_extra=INFERENCE_ONLY)
    """Keep the tokenizer's other special tokens, such as end of sequence, in the mean, or drop them (A18)."""
    truncate: bool = Field(default=True, json_schema_extra=INFERENCE_ONLY)
    """Pool the tokens that the model reads, after truncation, or all tokens of the text (A19)."""


Head = Literal["gaussian", "ncm", "klda", "ridge"]

NOT_READ: Mapping[Head, tuple[str, ...]] = {
    "gaussian": ("projection", "bandwidth"),
    "ncm": (*("components", "gmm", "cov.center"), *("epsilon", "epsilon_mode", "shrinkage", "projection", "bandwidth")),
    "klda": ("components", "gmm", "cov.center"),
    "ridge": ("components", "gmm", "cov", "shrinkage", "bandwidth", "dtype"),
}
"""Settings of the router that a head does not read."""

EPSILON = ("epsilon", "epsilon_mode")
"""Settings that `shrinkage: ledoit_wolf` replaces."""

_NEW: Any = INFERENCE_ONLY | LEFT_OUT_AT_DEFAULT


class RouterSettings(Settings):
    """The `router:` group of a sweep file. Training reads none of it."""

    combine: Combination = Field(default="soft", json_schema_extra=INFERENCE_ONLY | FROM_PRESET)
    """How snapshots answer together (Eq. 15). `soft`: weighted by the router's posterior; `hard`: the adapter of its
    most probable task; `ngram`: a baseline that picks the task whose definition shares the most character n-grams with
    the prompt, and reads no other setting of this group; `gates`: the method's own gates; `sum`: every adapter with
    weight 1; `last`: the newest alone; `oracle`: the adapter of the true task. If it is left out, the method's own
    choice."""
    features: Annotated[
        Literal["embeddings"] | Annotated[int, Field(ge=-1)], BeforeValidator(partial(shorthand, "layer"))
    ] = Field(default="embeddings", json_schema_extra=_NEW)
    """What is averaged over the tokens that `pool` selects: their `embeddings`, or, for a number or `{layer: N}`, the
    hidden states of the frozen backbone, which reads these tokens alone. Layers count as in transformers: 0 is the
    first block's input, k the output of block k, -1 that of the last; of T5's encoder. This costs one pass of the
    backbone per example, shared by all trials and stages."""
    head: Head = Field(default="gaussian", json_schema_extra=_NEW)
    """The classifier of tasks. `gaussian`: `components` means per task and a shared covariance; `ncm`: the nearest
    class mean by Euclidean distance; `klda`: one mean per task and a shared covariance of random Fourier features;
    `ridge`: ridge regression on one-hot tasks with an intercept. All but `gaussian` have one mean per task and do not
    read `components` and `gmm`."""
    projection: int | None = Field(default=None, ge=1, le=20_000, json_schema_extra=_NEW)
    """Number of random features, drawn from the trial's seed: Fourier features for `klda`, which needs it, and ReLU
    features in front of `ridge`; None is no projection."""
    bandwidth: float = Field(default=1.0, gt=0, json_schema_extra=_NEW)
    """Standard deviation of the Gaussian kernel of `klda`, in the unit of the features after `embed_norm`."""
    components: int = Field(default=5, ge=1, json_schema_extra=INFERENCE_ONLY)
    """K, Gaussian components per task (Eq. 12)."""
    epsilon: float = Field(default=0.01, ge=0, json_schema_extra=INFERENCE_ONLY)
    """Ridge added to the diagonal of the pooled covariance (Eq. 13), in the unit of `epsilon_mode` (A15)."""
    epsilon_mode: Literal["relative", "absolute"] = Field(default="relative", json_schema_extra=INFERENCE_ONLY)
    """`epsilon` is a multiple of the pooled covariance's mean variance tr(S)/d (`relative`), or the ridge (A15)."""
    shrinkage: Literal["epsilon", "ledoit_wolf"] = Field(default="epsilon", json_schema_extra=_NEW)
    """How the pooled covariance is regularized: by the ridge `epsilon`, or by Ledoit and Wolf's mixture with its mean
    variance, whose share follows from the training embeddings."""
    embed_norm: Literal["none", "l2", "std"] = Field(default="none", json_schema_extra=INFERENCE_ONLY)
    """Scaling of pooled embeddings: none, to unit length (`l2`), or by the table's standard deviation (`std`) (A15)."""
    temperature: float = Field(default=1.0, gt=0, json_schema_extra=INFERENCE_ONLY)
    """Divisor of the log posterior before it is normalized (A21); above 1 is softer."""
    prior: Literal["uniform", "n_t"] = Field(default="uniform", json_schema_extra=INFERENCE_ONLY)
    """Task prior (Eq. 14): equal, or proportional to the number of training embeddings (`n_t`) (A22)."""
    prune_below: float = Field(default=1e-6, ge=0, lt=1, json_schema_extra=INFERENCE_ONLY)
    """Drop weights below this and renormalize the rest of their row; 0 keeps all."""
    abstain: float | None = Field(default=None, gt=0, lt=1, json_schema_extra=_NEW)
    """Quantile of the nearest task's training distances, e.g. 0.99, beyond which an example belongs to no task seen:
    all of its weights are zero, and the bare backbone answers it. Each training example's distance is estimated as if
    it had been left out. None never abstains. Not for `ridge`, which has no distances."""
    dtype: Literal["float64", "float32"] = Field(default="float64", json_schema_extra=INFERENCE_ONLY)
    """Precision of the Cholesky factor and of the linear scores (A17); mixtures are always fitted in float64."""
    gmm: GmmSettings = Field(default=GmmSettings(), json_schema_extra=INFERENCE_ONLY)
    """How the mixture of one task is fitted."""
    cov: CovarianceSettings = Field(default=CovarianceSettings(), json_schema_extra=INFERENCE_ONLY)
    """How the shared covariance is pooled."""
    pool: PoolSettings = Field(default=PoolSettings(), json_schema_extra=INFERENCE_ONLY)
    """Which token embeddings are averaged."""

    def as_read(self) -> RouterSettings:
        """Return the settings with those that its head does not read at their defaults, and one component if so."""
        unread = unread_settings(self.head, self.shrinkage)
        fields, own = type(self).model_fields, {}
        for name in unread:
            group, _, inner = name.partition(".")
            default = fields[group].get_default()
            own[group] = default
            if inner:
                value = getattr(self, group)
                own[group] = value.model_copy(update={inner: getattr(default, inner)})
        if "components" in unread:
            own["components"] = 1
        changed = {name: value for name, value in own.items() if value != getattr(self, name)}
        return self.model_copy(update=changed) if changed else self

    def map_identity(self, seed: int) -> list[Any]:
        """Return what determines the random features of its head; empty without such features."""
        if self.projection is None:
            return []
        return [self.head, self.projection, self.bandwidth, seed]

    def record_identity(self) -> dict[str, Any]:
        """Return the settings that, with seed and texts, determine a `TaskGmm`."""
        content = self.identity()
        names = ["components", "embed_norm", "gmm", "pool"]
        covariance_names = []
        if self.gmm.whiten_first or self.gmm.em_iters:  # both need the task's own regularized covariance
            names += EPSILON
            covariance_names = ["center", "ddof"]
        return {name: content[name] for name in names} | {name: content["cov"][name] for name in covariance_names}

    def scatter_identity(self) -> dict[str, Any]:
        """Return the settings that, with the texts, determine a `TaskScatter`."""
        content = self.identity()
        return {name: content[name] for name in ("embed_norm", "pool")}


def unread_settings(head: Head, shrinkage: str) -> tuple[str, ...]:
    """Return the settings of the router that a head with this shrinkage does not read, by dotted path."""
    unread = NOT_READ[head]
    return (*unread, *EPSILON) if shrinkage == "ledoit_wolf" and "shrinkage" not in unread else unread


R = TypeVar("R", bound="Record")


@dataclass(frozen=True, eq=False)
class Record:
    """What the router keeps of one task, in a checksummed file; it holds no embedding of a single input."""

    def save(self, path: Path) -> None:
        write_checksummed(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls: type[R], path: Path) -> R | None:
        if not verified(path):
            return None
        arrays = load_file(path)
        return cls(**{name: array if array.ndim else array.item() for name, array in arrays.items()})


@dataclass(frozen=True, eq=False)
class TaskScatter(Record):
    """One task's contribution to the shared covariance (Eq. 13); ValueError if the arrays are not as described."""

    triangle: Array
    """(d (d + 1) / 2,) lower triangle, row by row, of S_t = sum (x - mean)(x - mean)'; a sum, not an average."""
    count: int

    def __post_init__(self) -> None:
        if self.triangle.dtype != np.float64 or self.triangle.shape != (self.width * (self.width + 1) // 2,):
            kind = f"{self.triangle.dtype} {self.triangle.shape}"
            raise ValueError(f"task scatter: `triangle` is {kind}, expected float64 (d (d + 1) / 2,)")
        if self.count < 1:
            raise ValueError(f"task scatter: `count` is {self.count}, expected at least 1")

    @property
    def width(self) -> int:
        return (isqrt(8 * self.triangle.size + 1) - 1) // 2


@dataclass(frozen=True, eq=False)
class TaskGmm(Record):
    """The Gaussian mixture of one task, without its covariance (Eq. 12), in float64; ValueError for other shapes."""

    means: Array
    """(K, d) component means mu_tk."""
    shares: Array
    """(K,) component weights pi_tk, summing to one."""
    counts: Array
    """(K,) number of embeddings per component; not whole numbers after EM."""

    def __post_init__(self) -> None:
        K = len(self.shares)
        shapes = {"means": (K, *self.means.shape[1:2]), "shares": (K,), "counts": (K,)}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float64:
                kind = f"{array.dtype} {array.shape}"
                raise ValueError(f"task mixture: `{name}` is {kind}, expected float64 {shape}")

    @property
    def count(self) -> int:
        return round(self.counts.sum())

    @property
    def mean(self) -> Array:
        mean: Array = self.counts @ self.means / self.counts.sum()
        return mean

    def between(self) -> Array:
        """Return B, (K, d): `B' B` is the scatter of the component means about the task's mean."""
        return np.sqrt(self.counts)[:, None] * (self.means - self.mean)


def pooled_name(tokens: str, weights: str, settings: RouterSettings, computed: Sequence[str] = ()) -> str:
    """Name pooled features: a hash of their token cache's name, of the backbone's weights and of the pooling.

    `computed` is what the digits of hidden states depend on besides: device, dtype and the version of transformers.
    """
    pooling = [settings.pool.identity(), versions.POOLING]
    content: dict[str, Any] = {"tokens": tokens, "weights": weights, "pool": pooling}
    if settings.features != "embeddings":
        content["states"] = [settings.features, *computed]
    return content_hash(content)


def gmm_name(pooled: str, settings: RouterSettings, seed: int) -> str:
    """Name a `TaskGmm`: a hash of everything it depends on, including scikit-learn for its K-means."""
    fit = [settings.record_identity(), seed, versions.RECORDS, versions.library("scikit-learn")]
    fit += settings.map_identity(seed)
    return content_hash({"mixture": fit, "pooled": pooled})


def scatter_name(pooled: str, settings: RouterSettings, seed: int = 0) -> str:
    fit = [settings.scatter_identity(), versions.RECORDS, *settings.map_identity(seed)]
    return content_hash({"scatter": fit, "pooled": pooled})


def pooled_path(storage: Path, name: str) -> Path:
    return storage / "embeddings" / f"{name}.safetensors"


def record_path(storage: Path, name: str) -> Path:
    return storage / "router" / f"{name}.safetensors"


def spread(rows: npt.NDArray[Any], most: int) -> npt.NDArray[Any]:
    """Return at most this many rows, evenly spaced because files may be sorted by label."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(int)]


def normalize_embeddings(
    embeddings: npt.NDArray[Any], how: Literal["none", "l2", "std"], table_std: float | None = None
) -> npt.NDArray[Any]:
    """Scale pooled embeddings (n, d) by `router.embed_norm` (A15), for fitting and for routing.

    `table_std`, of all entries of the embedding table, is one scalar for all tasks, so that an absolute epsilon is
    comparable between backbones.
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
    """Set weights (n, T) below `threshold` to zero and renormalize each row; its largest weight always stays."""
    kept = (weights >= threshold) | (weights == weights.max(axis=1, keepdims=True))
    weights = np.where(kept, weights, 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


def scatter_of(embeddings: npt.NDArray[Any]) -> TaskScatter:
    """Return the scatter of a task's embeddings (n, d), in float64 (Eq. 13); RouterError if one is not finite."""
    return _Centered(embeddings).scatter


def fit_gmm(embeddings: npt.NDArray[Any], settings: RouterSettings, seed: int) -> TaskGmm:
    """Fit the components of one task (Eq. 12); fewer than K if there are fewer than K distinct embeddings (n, d).

    The seed may be of any size. RouterError for fewer embeddings than components, embeddings that are not finite, or a
    singular covariance for `gmm.whiten_first` or `gmm.em_iters`.
    """
    from scipy.special import softmax

    X, K = _Centered(embeddings), settings.components
    if len(X.centered) < K:
        raise RouterError(
            f"router.components: K-means for {K} components was given {len(X.centered)} embeddings, expected at least "
            f"{K}. Lower router.components, or give this task more training rows."
        )
    gmm = X.mixture(_kmeans(X, settings, seed), settings)
    if settings.gmm.em_iters:
        factor = X.factor(gmm, settings)
        for _ in range(settings.gmm.em_iters):
            slopes, offsets = _linear_form(factor, gmm.means - X.mean, gmm.shares)
            gmm = X.mixture(softmax(X.centered @ slopes + offsets, axis=1), settings)
    return gmm


class _Centered:
    """The centered embeddings of one task, from which its records are computed."""

    def __init__(self, embeddings: npt.NDArray[Any]) -> None:
        X = checked_embeddings(embeddings)
        self.mean: Array = X.mean(axis=0, dtype=np.float64)
        self.centered: Array = X - self.mean

    @cached_property
    def scatter(self) -> TaskScatter:
        # dsyrk computes one triangle, half the work of a product; the transposed view is in Fortran order: no copy
        from scipy.linalg.blas import dsyrk
        from scipy.linalg.lapack import dtrttp

        upper, _ = dtrttp(dsyrk(1.0, self.centered.T), uplo="U")
        return TaskScatter(upper, len(self.centered))

    def mixture(self, responsibilities: Array, settings: RouterSettings) -> TaskGmm:
        n, K = responsibilities.shape
        counts = np.maximum(responsibilities.sum(axis=0), 10 * np.finfo(np.float64).eps)
        means = self.mean + responsibilities.T @ self.centered / counts[:, None]
        if settings.gmm.weights == "uniform":
            shares = np.full(K, 1 / K)
        else:
            shares = np.maximum(counts / n, 1 / n)
            shares /= shares.sum()
        return TaskGmm(means, shares, counts)

    def factor(self, gmm: TaskGmm, settings: RouterSettings) -> _Factor:
        """Return the Cholesky factor of the task's own regularized covariance; see `pooled_covariance`."""
        own = PooledScatter()
        own.add("own", self.scatter)
        return _cholesky(pooled_covariance(own, [gmm], settings), settings)


def _kmeans(X: _Centered, settings: RouterSettings, seed: int) -> Array:
    """Return one-hot cluster membership, (n, at most K), without empty clusters."""
    gmm, points = settings.gmm, X.centered
    if settings.components == 1:
        return np.ones((len(points), 1))

    from scipy.linalg import solve_triangular
    from sklearn.cluster import KMeans  # takes a second to import, and K = 1 does not need it

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
    # Means are recomputed from the labels: scikit-learn's own sums depend on the order in which threads finish.
    return (labels[:, None] == np.unique(labels)).astype(np.float64)


class PooledScatter:
    """The sum of the scatters of several tasks (Eq. 13), with the same bits whether it grew task by task or at once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.count = 0
        self.triangle: Array = np.zeros(0)

    def add(self, name: str, scatter: TaskScatter) -> None:
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
        """Make it the sum of these scatters: add those missing, or start again if it holds others."""
        if self.names != list(names[: len(self.names)]):
            self.names, self.count = [], 0
        for position in range(len(self.names), len(names)):
            self.add(names[position], scatter_at(position))


def pooled_covariance(pooled: PooledScatter, gmms: Sequence[TaskGmm], settings: RouterSettings) -> Array:
    """Return the shared covariance C = S + ridge * I, with S = sum_t S_t / sum_t n_t (Eq. 13), (d, d) float64.

    `cov.ddof: tasks` subtracts the number of tasks from the denominator. The ridge is `epsilon`, or epsilon * tr(S)/d
    with `epsilon_mode: relative`. The mixtures are read with `cov.center: component` only: the scatter within
    components is the total minus the one between them. C is in its upper triangle, in Fortran order; the lower triangle
    is undefined. RouterError without tasks, for a denominator that is not positive, or for a relative ridge of a zero
    scatter.
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
        between = np.concatenate([gmm.between() for gmm in gmms])
        covariance = dsyrk(-1.0, between.T, beta=1.0, c=covariance, overwrite_c=True)
    covariance /= denominator
    if (trace := np.trace(covariance)) * denominator <= NO_SCATTER * total:
        covariance[:] = 0  # only rounding error is left
        if settings.epsilon_mode == "relative":
            raise RouterError(no_scatter(tasks, pooled.count, settings))
    ridge = settings.epsilon
    if settings.epsilon_mode == "relative":
        ridge *= trace / d
    covariance[np.diag_indices(d)] += ridge
    return covariance


def no_scatter(tasks: int, embeddings: int, settings: RouterSettings) -> str:
    about = "the mean of its task" if settings.cov.center == "task" else "the mean of its component (cov.center)"
    return (
        f"router.epsilon_mode: found relative, but every one of the {embeddings:,} training embeddings of "
        f"{tasks} task{'s' * (tasks > 1)} is {about}, so the pooled covariance is zero, and so is any share of it. Use "
        "router.epsilon_mode: absolute; or give the tasks several different prompts: benchmark.train_per_task, "
        "benchmark.max_source_length"
    )


class TaskRouter:
    """A posterior over the tasks seen, and the weights of snapshots that follow from it.

    Attributes:
        limits: (T,) distances from the tasks' means beyond which an example of the nearest task belongs to none; None
            never abstains.
    """

    limits: Array | None = None

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings

    def log_posterior(self, embeddings: npt.NDArray[Any]) -> Array:
        """Return log p(t | x) of embeddings (n, d) as (n, T), with the settings' temperature and prior.

        RouterNotFitted before `fit`; RouterError for embeddings that are not finite or of another width.
        """
        raise NotImplementedError

    def distances(self, embeddings: npt.NDArray[Any]) -> Array | None:
        """Return a novelty score of embeddings (n, d), (n,); None if undefined. Errors as `log_posterior`."""
        return None

    def task_distances(self, embeddings: npt.NDArray[Any]) -> Array:
        """Return the distances of embeddings (n, d) from the tasks' means, (n, T); only with `limits`."""
        raise NotImplementedError

    def posterior(self, embeddings: npt.NDArray[Any]) -> Array:
        return np.exp(self.log_posterior(embeddings))

    def weights(self, embeddings: npt.NDArray[Any], mode: Literal["soft", "hard"]) -> Array:
        """Return the weights of the snapshots (Eq. 15), (n, T): rows sum to one, or to zero if the router abstains."""
        return self.withheld(self.weights_of(self.log_posterior(embeddings), mode), embeddings)

    def weights_of(self, log_posterior: Array, mode: Literal["soft", "hard"]) -> Array:
        """Return the weights from the log posterior (n, T): pruned, or 1 for the earliest of the largest."""
        if mode == "hard":
            return np.eye(log_posterior.shape[1])[log_posterior.argmax(axis=1)]
        return prune(np.exp(log_posterior), self.settings.prune_below)

    def withheld(self, weights: Array, embeddings: npt.NDArray[Any]) -> Array:
        """Return weights (n, T) with zeros for the rows whose embeddings are beyond the limit of the nearest task."""
        if self.limits is None:
            return weights
        distances = self.task_distances(embeddings)
        within: npt.NDArray[np.bool_] = distances.min(axis=1) <= self.limits[distances.argmin(axis=1)]
        return weights * within[:, None]


class GaussianRouter(TaskRouter):
    """The posterior over the tasks seen for pooled embeddings (Eq. 14), from the tasks' records.

    To add a task, `fit` with one more mixture; no embedding of an earlier task is needed. Attributes that end in an
    underscore exist after `fit`; only distances read `factor_` and `whitened_`.
    """

    origin_: npt.NDArray[np.floating[Any]]
    """(d,) grand mean of the component means, subtracted from each mu below to keep float32 scores accurate."""
    slopes_: npt.NDArray[np.floating[Any]]
    """(d, M) C^-1 mu of the components of all tasks, in `settings.dtype`."""
    offsets_: npt.NDArray[np.floating[Any]]
    """(M,) log pi - mu' C^-1 mu / 2, in `settings.dtype`."""
    first_components_: npt.NDArray[np.intp]
    """(T,) column of each task's first component."""
    log_prior_: Array
    """(T,) log p(t), up to a constant."""
    factor_: npt.NDArray[np.floating[Any]]
    """(d, d) U with C = U' U in its upper triangle, in `settings.dtype`; the lower triangle is undefined."""
    whitened_: npt.NDArray[np.floating[Any]]
    """(M, d) whitened component means, U'^-1 mu."""
    task_means_: Array
    """(T, d) means of the tasks."""

    def fit(self, gmms: Sequence[TaskGmm], covariance: Array) -> GaussianRouter:
        """Fit the posterior over these tasks, in the order of its columns; return self.

        The covariance, as `pooled_covariance` returns it, is overwritten. RouterError without mixtures, for widths that
        differ, or for a covariance that is not positive definite.
        """
        if not gmms:
            raise RouterError("the router was given no task mixtures, expected at least one")
        widths = sorted({gmm.means.shape[1] for gmm in gmms} | {len(covariance)})
        if len(widths) > 1:
            raise RouterError(
                f"router: task records have widths {widths}, expected one; they come from several backbones"
            )
        factor = _cholesky(covariance.astype(self.settings.dtype, copy=False), self.settings)
        self.factor_, _ = factor
        means = np.concatenate([gmm.means for gmm in gmms])
        shares = np.concatenate([gmm.shares for gmm in gmms])
        self.origin_ = means.mean(axis=0)
        centered = (means - self.origin_).astype(self.settings.dtype)
        self.slopes_, self.offsets_ = _linear_form(factor, centered, shares)
        self.whitened_ = self._whitened(centered)
        self.task_means_ = np.stack([gmm.mean for gmm in gmms])
        self.first_components_ = np.cumsum([0] + [len(gmm.shares) for gmm in gmms[:-1]])
        counts = np.array([gmm.count for gmm in gmms], dtype=np.float64)
        self.log_prior_ = np.log(counts) if self.settings.prior == "n_t" else np.zeros_like(counts)
        return self

    def log_posterior(self, embeddings: npt.NDArray[Any]) -> Array:
        """Return log p(t | x) (Eq. 14) of embeddings (n, d) as (n, T), with the settings' temperature and prior.

        RouterNotFitted before `fit`; RouterError for embeddings that are not finite or of another width.
        """
        from scipy.special import log_softmax

        scores = (self._centered(embeddings) @ self.slopes_ + self.offsets_).astype(np.float64, copy=False)
        log_likelihood = np.logaddexp.reduceat(scores, self.first_components_, axis=1)
        return log_softmax((log_likelihood + self.log_prior_) / self.settings.temperature, axis=1)

    def distances(self, embeddings: npt.NDArray[Any]) -> Array:
        """Return the Mahalanobis distance of embeddings (n, d) to the nearest component of any task, as (n,).

        min_tk sqrt((x - mu_tk)' C^-1 (x - mu_tk)): the novelty score of Lee et al. (2018), with components as classes.
        """
        from scipy.spatial.distance import cdist

        rows = self._whitened(self._centered(embeddings))
        return cdist(rows, self.whitened_).min(axis=1)

    def task_distances(self, embeddings: npt.NDArray[Any]) -> Array:
        from scipy.spatial.distance import cdist

        means = self._whitened((self.task_means_ - self.origin_).astype(self.settings.dtype))
        return cdist(self._whitened(self._centered(embeddings)), means)

    def _centered(self, embeddings: npt.NDArray[Any]) -> npt.NDArray[np.floating[Any]]:
        if not hasattr(self, "slopes_"):
            raise RouterNotFitted("the router has no tasks yet: call `fit` with at least one task record first")
        X = checked_embeddings(embeddings, width=len(self.origin_))
        return np.asarray(X - self.origin_, self.settings.dtype)

    def _whitened(self, centered: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.floating[Any]]:
        from scipy.linalg import solve_triangular

        return solve_triangular(self.factor_, centered.T, trans="T", check_finite=False).T


def _cholesky(covariance: npt.NDArray[np.floating[Any]], settings: RouterSettings) -> _Factor:
    """Factor a covariance given by its upper triangle, in place; RouterError if it is singular at its precision."""
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
            f"next to its largest variance, {largest_variance:.2g}. Raise router.epsilon (now {settings.epsilon:g}, "
            f"{settings.epsilon_mode}){wider}."
        )
    return U, lower


def _linear_form(
    factor: _Factor, means: npt.NDArray[np.floating[Any]], shares: Array
) -> tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.floating[Any]]]:
    """Return slopes (d, M) and offsets (M,): `x @ slopes + offsets` is log(pi N(x | mu, C)) up to a constant in x."""
    from scipy.linalg import cho_solve

    slopes = cho_solve(factor, means.T, check_finite=False)
    offsets = np.log(shares) - 0.5 * np.einsum("md,dm->m", means, slopes)
    return slopes, offsets.astype(slopes.dtype, copy=False)


def checked_embeddings(embeddings: npt.NDArray[Any], width: int | None = None) -> npt.NDArray[Any]:
    X = np.asarray(embeddings)
    if X.ndim != 2 or (width is not None and X.shape[1] != width):
        raise RouterError(f"router: embeddings have shape {X.shape}, expected (inputs, {width or 'width'})")
    finite = np.isfinite(X).all(axis=1)
    if not finite.all():
        raise RouterError(f"router: embedding {int(finite.argmin())} of {len(X)} is not finite; check the pooled text")
    return X
