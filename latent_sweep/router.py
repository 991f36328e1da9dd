"""The training-free task router: which task does an input belong to, judged from its pooled frozen embedding.

Each task leaves a `TaskRecord` (component means and shares, scatter, count). `GaussianRouter` turns the records of the
tasks seen so far into a posterior over tasks. All components share one covariance C, so `x' C^-1 x` and the
log-determinant cancel between tasks and the router is a linear classifier:

    log p(x | t) = logsumexp_k(log pi_tk + mu_tk' C^-1 x - mu_tk' C^-1 mu_tk / 2) + const(x)

One Cholesky factor per fit and one matrix product per batch; nothing is inverted and no input is whitened.

Letters: n inputs, d embedding width, K components of one task, T tasks, M components of all tasks.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy
from scipy.linalg import LinAlgError, cho_factor, cho_solve, solve_triangular
from scipy.special import log_softmax, softmax

from latent_sweep.errors import LatentSweepError, StoreError
from latent_sweep.settings import INFERENCE_ONLY, Settings

Array = npt.NDArray[np.float64]
_Factor = tuple[npt.NDArray[np.floating[Any]], bool]
"""What `scipy.linalg.cho_factor` returns: L with C = L L' in the lower triangle, and True."""


class RouterError(LatentSweepError, ValueError):
    """These embeddings or records and these settings do not give a router."""


class RouterNotFitted(LatentSweepError):
    """The router was asked for a posterior before `fit`."""


class GmmSettings(Settings):
    """How the mixture of one task is fitted (Eq. 12)."""

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
    """How the shared covariance is pooled (Eq. 13)."""

    center: Literal["task", "component"] = Field(default="task", json_schema_extra=INFERENCE_ONLY)
    """Scatter is taken about the task's mean, as in the paper's equation, or about the components' means (A13)."""
    ddof: Literal["none", "tasks"] = Field(default="none", json_schema_extra=INFERENCE_ONLY)
    """The pooled scatter is divided by N, the number of embeddings, or by N minus the number of tasks (A14)."""
    refresh: Literal["per_task", "final", "frozen_first"] = Field(default="per_task", json_schema_extra=INFERENCE_ONLY)
    """Which tasks are pooled (A16): those seen so far, all tasks of the trial at every stage, or the first one only."""


class PoolSettings(Settings):
    """Which token embeddings are averaged into one embedding per input (Eq. 11)."""

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

    mode: Literal["soft", "hard", "sum", "last", "oracle"] | None = Field(
        default=None, json_schema_extra=INFERENCE_ONLY
    )
    """How snapshots answer together (Eq. 15): weighted by the posterior, by its argmax, all with weight 1, the last
    one alone, or the true task's; null: as the method says."""
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
    """Mixture weights below this are dropped and the others of their row renormalised; 0 keeps all."""
    dtype: Literal["float64", "float32"] = Field(default="float64", json_schema_extra=INFERENCE_ONLY)
    """Precision of the Cholesky factor and of the linear scores (A17); tasks are fitted in float64 in any case."""
    gmm: GmmSettings = Field(default=GmmSettings(), json_schema_extra=INFERENCE_ONLY)
    """How the mixture of one task is fitted."""
    cov: CovarianceSettings = Field(default=CovarianceSettings(), json_schema_extra=INFERENCE_ONLY)
    """How the shared covariance is pooled."""
    pool: PoolSettings = Field(default=PoolSettings(), json_schema_extra=INFERENCE_ONLY)
    """Which token embeddings are averaged."""

    def record_identity(self) -> dict[str, Any]:
        """The settings that a `TaskRecord` depends on, beside its seed and the texts that were pooled."""
        content = self.identity()
        names = ["components", "embed_norm", "gmm", "pool"]
        covariance_names = ["center"]
        if self.gmm.whiten_first or self.gmm.em_iters:  # both need the task's own regularised covariance
            names += ["epsilon", "epsilon_mode"]
            covariance_names += ["ddof"]
        return {name: content[name] for name in names} | {name: content["cov"][name] for name in covariance_names}


@dataclass(frozen=True, eq=False)
class TaskRecord:
    """What the router keeps of one task; no embedding of a single input is among it. All arrays are float64.

    Raises:
        ValueError: an array has another dtype or a shape that does not fit the others.
    """

    means: Array
    """(K, d) component means mu_tk."""
    shares: Array
    """(K,) component weights pi_tk, summing to one."""
    mean: Array
    """(d,) mean of the task's embeddings."""
    scatter: Array
    """(d, d) within-task scatter S_t (Eq. 13), a sum and not an average."""
    count: int
    """n_t, embeddings behind the record."""

    def __post_init__(self) -> None:
        K, d = len(self.shares), len(self.mean)
        shapes = {"means": (K, d), "shares": (K,), "mean": (d,), "scatter": (d, d)}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.shape != shape or array.dtype != np.float64:
                found = f"{array.dtype} {array.shape}"
                raise ValueError(f"task record: `{name}` is {found}, expected float64 {shape}")
        if self.count < 1:
            raise ValueError(f"task record: `count` is {self.count}, expected at least 1")

    def save(self, path: Path) -> None:
        """Write the record to `path` as safetensors; the final rename commits, so no half-written file appears."""
        tensors = {field.name: np.ascontiguousarray(getattr(self, field.name)) for field in fields(self)}
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(safetensors_numpy.save(tensors))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> TaskRecord:
        """Read what `save` wrote.

        Raises:
            StoreError: the file is not safetensors, or its names, dtypes or shapes are not those of a record.
        """
        try:
            tensors = safetensors_numpy.load_file(path)
            expected = {field.name for field in fields(cls)}
            if set(tensors) != expected:
                raise ValueError(f"it holds {sorted(tensors)}, expected {sorted(expected)}")
            return cls(count=int(tensors.pop("count").item()), **tensors)
        except (SafetensorError, ValueError) as error:
            raise StoreError(f"{path} is not a task record: {error}. Delete it; it is made again.") from error


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


def fit_task(embeddings: npt.NDArray[Any], settings: RouterSettings, seed: int) -> TaskRecord:
    """Fit the mixture and the scatter of one task (Eqs. 12 and 13).

    Args:
        embeddings: (n, d) pooled embeddings of the task's training inputs, n >= K.
        settings: the router's settings; `record_identity` lists those that are read here.
        seed: of the K-means initialisation; a non-negative integer of any size.

    Returns:
        The task's record. It has fewer than K components where there are fewer than K distinct embeddings.

    Raises:
        RouterError: fewer embeddings than components, or embeddings that are not finite, or a singular covariance
            where one is needed (`gmm.whiten_first`, `gmm.em_iters`).
    """
    X = _checked(embeddings)
    K = settings.components
    if len(X) < K:
        raise RouterError(
            f"router.components: K-means for {K} components was given {len(X)} embeddings, expected at least {K}. "
            f"Lower router.components, or give this task more training rows."
        )
    statistics = _TaskStatistics(X, settings)
    responsibilities = statistics.kmeans(seed)
    record = statistics.record(responsibilities)
    if settings.gmm.em_iters:
        factor = _cholesky(pooled_covariance([record], settings), settings)
        for _ in range(settings.gmm.em_iters):
            record = statistics.record(statistics.expectation(record, factor))
    return record


class _TaskStatistics:
    """The embeddings of one task, centred once, and what the steps of `fit_task` compute from them."""

    def __init__(self, X: Array, settings: RouterSettings) -> None:
        self.settings = settings
        self.mean = X.mean(axis=0)
        self.centred = X - self.mean
        self.scatter = self.centred.T @ self.centred

    def kmeans(self, seed: int) -> Array:
        """(n, K) one-hot cluster membership; clusters without members are left out."""
        from sklearn.cluster import KMeans  # a second to import, and only fitting needs it

        gmm = self.settings.gmm
        kmeans = KMeans(
            n_clusters=self.settings.components,
            init="k-means++" if gmm.init == "kmeans++" else gmm.init,
            n_init=gmm.n_init,
            max_iter=gmm.kmeans_iters,
            tol=0.0,  # the paper states a number of iterations, not a tolerance
            random_state=np.random.RandomState(np.random.MT19937(seed)),
        )
        labels = kmeans.fit(self.whitened() if gmm.whiten_first else self.centred).labels_
        # Means are averaged again from the labels: scikit-learn's own sums depend on the order in which threads finish.
        return (labels[:, None] == np.unique(labels)).astype(np.float64)

    def whitened(self) -> Array:
        """(n, d) embeddings under which the task's own regularised covariance is the identity."""
        one_component = self.record(np.ones((len(self.centred), 1)))
        L, _ = _cholesky(pooled_covariance([one_component], self.settings), self.settings)
        return solve_triangular(L, self.centred.T, lower=True, check_finite=False).T

    def expectation(self, record: TaskRecord, factor: _Factor) -> Array:
        """(n, K) posterior of the components of `record` under the covariance behind `factor`: the E step."""
        slopes, offsets = _linear_form(factor, record.means - self.mean, record.shares)
        return softmax(self.centred @ slopes + offsets, axis=1)

    def record(self, responsibilities: Array) -> TaskRecord:
        """The record whose components average the embeddings with the weights (n, K): the M step."""
        n, K = responsibilities.shape
        counts = np.maximum(responsibilities.sum(axis=0), 10 * np.finfo(np.float64).eps)
        offsets = responsibilities.T @ self.centred / counts[:, None]
        if self.settings.gmm.weights == "uniform":
            shares = np.full(K, 1 / K)
        else:
            shares = np.maximum(counts / n, 1 / n)
            shares /= shares.sum()
        scatter = self.scatter
        if self.settings.cov.center == "component":
            scatter = scatter - (offsets.T * counts) @ offsets  # within components = total - between components
        return TaskRecord(means=self.mean + offsets, shares=shares, mean=self.mean, scatter=scatter, count=n)


def pooled_covariance(records: Sequence[TaskRecord], settings: RouterSettings) -> Array:
    """The shared covariance C = S + ridge * I, with S = sum_t S_t / sum_t n_t (Eq. 13), as (d, d) float64.

    The denominator loses the number of records under `cov.ddof: tasks`. The ridge is `epsilon`, or epsilon * tr(S)/d
    under `epsilon_mode: relative`.

    Raises:
        RouterError: no records, or the denominator is not positive.
    """
    count = sum(record.count for record in records)
    denominator = count - (len(records) if settings.cov.ddof == "tasks" else 0)
    if denominator <= 0:
        raise RouterError(
            f"router: the pooled covariance of {len(records)} tasks with {count} embeddings in all would be divided "
            f"by {denominator} (cov.ddof: {settings.cov.ddof}). Use more embeddings than tasks, or cov.ddof: none."
        )
    covariance = np.zeros_like(records[0].scatter)
    for record in records:
        covariance += record.scatter
    covariance /= denominator
    ridge = settings.epsilon
    if settings.epsilon_mode == "relative":
        ridge *= np.trace(covariance) / len(covariance)
    covariance[np.diag_indices_from(covariance)] += ridge
    return covariance


class GaussianRouter:
    """Posterior over the tasks seen so far for pooled embeddings (Eq. 14), from their records alone.

    Adding a task is `fit` with one more record; no embedding of an earlier task is needed again. Attributes that end
    in an underscore exist after `fit`; they are all that routing needs, M (d + 1) numbers and the origin.
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

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings

    def fit(
        self, records: Sequence[TaskRecord], covariance_records: Sequence[TaskRecord] | None = None
    ) -> GaussianRouter:
        """Make the tasks of `records` the candidates, and return self.

        Args:
            records: one per candidate task, in the order of the posterior's columns.
            covariance_records: every task of the trial; needed, and read, under `cov.refresh: final` only.

        Raises:
            RouterError: no records, records of different widths, missing `covariance_records`, or a pooled covariance
                that is not positive definite.
        """
        pooled = self._covariance_records(records, covariance_records)
        _check_widths([*records, *pooled])
        covariance = pooled_covariance(pooled, self.settings).astype(self.settings.dtype, copy=False)
        factor = _cholesky(covariance, self.settings)
        means = np.concatenate([record.means for record in records])
        shares = np.concatenate([record.shares for record in records])
        self.origin_ = means.mean(axis=0)
        self.slopes_, self.offsets_ = _linear_form(factor, (means - self.origin_).astype(self.settings.dtype), shares)
        self.first_components_ = np.cumsum([0] + [len(record.shares) for record in records[:-1]])
        counts = np.array([record.count for record in records], dtype=np.float64)
        self.log_prior_ = np.log(counts) if self.settings.prior == "n_t" else np.zeros_like(counts)
        return self

    def log_posterior(self, embeddings: npt.NDArray[Any]) -> Array:
        """log p(t | x) (Eq. 14) of embeddings (n, d) as (n, T), at the settings' temperature and prior.

        Raises:
            RouterNotFitted: `fit` was not called.
            RouterError: the embeddings are not finite, or have another width than the records.
        """
        if not hasattr(self, "slopes_"):
            raise RouterNotFitted("the router has no tasks yet: call `fit` with at least one task record first")
        X = _checked(embeddings, width=len(self.origin_))
        centred = (X - self.origin_).astype(self.settings.dtype, copy=False)
        scores = (centred @ self.slopes_ + self.offsets_).astype(np.float64, copy=False)
        log_likelihood = np.logaddexp.reduceat(scores, self.first_components_, axis=1)
        return log_softmax((log_likelihood + self.log_prior_) / self.settings.temperature, axis=1)

    def posterior(self, embeddings: npt.NDArray[Any]) -> Array:
        """p(t | x) of embeddings (n, d) as (n, T); rows sum to one."""
        return np.exp(self.log_posterior(embeddings))

    def weights(self, embeddings: npt.NDArray[Any], mode: Literal["soft", "hard"]) -> Array:
        """Mixture weights of the snapshots (Eq. 15) for embeddings (n, d) as (n, T); rows sum to one.

        "soft" is the posterior pruned at `prune_below`; "hard" puts weight 1 on its largest entry, the earliest task
        where several are equal.
        """
        log_posterior = self.log_posterior(embeddings)
        if mode == "hard":
            return np.eye(log_posterior.shape[1])[log_posterior.argmax(axis=1)]
        return prune(np.exp(log_posterior), self.settings.prune_below)

    def _covariance_records(
        self, records: Sequence[TaskRecord], covariance_records: Sequence[TaskRecord] | None
    ) -> Sequence[TaskRecord]:
        if not records:
            raise RouterError("the router was given no task records, expected at least one")
        if self.settings.cov.refresh == "per_task":
            return records
        if self.settings.cov.refresh == "frozen_first":
            return records[:1]
        if not covariance_records:
            raise RouterError("router.cov.refresh: final needs `covariance_records`, one for every task of the trial")
        return covariance_records


def _cholesky(covariance: npt.NDArray[np.floating[Any]], settings: RouterSettings) -> _Factor:
    """Factor `covariance` (d, d), which is overwritten, and refuse one that is singular to working precision."""
    d, dtype = len(covariance), covariance.dtype
    largest_variance = float(covariance.diagonal().max())
    try:
        # The matrix is symmetric, so its transposed view is the same matrix in LAPACK's memory order: no copy is made.
        L, lower = cho_factor(covariance.T, lower=True, overwrite_a=True, check_finite=False)
        singular = np.min(L.diagonal()) ** 2 <= 10 * np.finfo(dtype).eps * largest_variance
    except LinAlgError:
        singular = True
    if singular:
        raise RouterError(
            f"router: the pooled covariance ({d} x {d}) is not positive definite in {dtype}. Causes: fewer embeddings "
            f"than dimensions, embeddings that are all alike, or a regularisation that is too small. Remedies: raise "
            f"router.epsilon (now {settings.epsilon}, {settings.epsilon_mode}), use router.dtype: float64, or scale "
            f"the embeddings with router.embed_norm: std."
        )
    return L, lower


def _linear_form(
    factor: _Factor, means: npt.NDArray[np.floating[Any]], shares: Array
) -> tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.floating[Any]]]:
    """Slopes (d, M) and offsets (M,) such that `x @ slopes + offsets` is log(pi N(x | mu, C)) up to a constant in x."""
    slopes = cho_solve(factor, means.T, check_finite=False)
    offsets = np.log(shares) - 0.5 * np.einsum("md,dm->m", means, slopes)
    return slopes, offsets.astype(slopes.dtype, copy=False)


def _checked(embeddings: npt.NDArray[Any], width: int | None = None) -> Array:
    """`embeddings` as a finite float64 array (n, d), with d == `width` where one is known."""
    X = np.asarray(embeddings, dtype=np.float64)
    if X.ndim != 2 or (width is not None and X.shape[1] != width):
        raise RouterError(f"router: embeddings have shape {X.shape}, expected (inputs, {width or 'width'})")
    finite = np.isfinite(X).all(axis=1)
    if not finite.all():
        raise RouterError(f"router: embedding {int(finite.argmin())} of {len(X)} is not finite; check the pooled text")
    return X


def _check_widths(records: Sequence[TaskRecord]) -> None:
    widths = sorted({len(record.mean) for record in records})
    if len(widths) > 1:
        raise RouterError(f"router: task records have widths {widths}, expected one; they come from several backbones")
