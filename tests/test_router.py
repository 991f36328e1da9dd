"""The router against densities computed by scipy, and every setting against its definition."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import solve_triangular
from scipy.special import logsumexp, softmax
from scipy.stats import multivariate_normal

from latent_sweep.errors import LatentSweepError, StoreError
from latent_sweep.router import (
    GaussianRouter,
    RouterError,
    RouterNotFitted,
    RouterSettings,
    TaskRecord,
    fit_task,
    normalise_embeddings,
    pooled_covariance,
    prune,
)

D = 6


def router_settings(**changes: Any) -> RouterSettings:
    return RouterSettings.model_validate({"components": 3, **changes})


def task_embeddings(task: int, n: int = 60, d: int = D) -> np.ndarray:
    """Three overlapping blobs with one common, correlated noise; tasks overlap too, so posteriors are not 0 or 1."""
    rng = np.random.default_rng(100 + task)
    noise = rng.normal(size=(n, d)) @ np.random.default_rng(1).normal(size=(d, d)) * 0.3
    return rng.normal(size=d) * 0.7 + rng.normal(size=(3, d))[rng.integers(3, size=n)] + noise


SIZES = (60, 30, 90, 45)
TASKS = [task_embeddings(task, n) for task, n in enumerate(SIZES)]
QUERIES = np.concatenate([task_embeddings(task, n=8) for task in range(4)])


def fitted(settings: RouterSettings, tasks: list[np.ndarray] = TASKS) -> GaussianRouter:
    return GaussianRouter(settings).fit([fit_task(X, settings, seed=0) for X in tasks])


def naive_covariance(records: list[TaskRecord], tasks: list[np.ndarray], settings: RouterSettings) -> np.ndarray:
    """The paper's covariance from the data itself; each input belongs to its nearest mean (K-means has converged)."""
    residuals = []
    for record, X in zip(records, tasks, strict=True):
        centres = record.means if settings.cov.center == "component" else record.mean[None]
        nearest = ((X[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        residuals.append(X - centres[nearest])
    stacked = np.concatenate(residuals)
    denominator = len(stacked) - (len(tasks) if settings.cov.ddof == "tasks" else 0)
    S = stacked.T @ stacked / denominator
    ridge = settings.epsilon * (np.trace(S) / D if settings.epsilon_mode == "relative" else 1.0)
    return S + ridge * np.eye(D)


# ---- the posterior -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("center", "ddof", "prior", "epsilon_mode"),
    list(itertools.product(["task", "component"], ["none", "tasks"], ["uniform", "n_t"], ["relative", "absolute"])),
)
def test_posterior_equals_bayes_rule_on_densities(center: str, ddof: str, prior: str, epsilon_mode: str) -> None:
    settings = router_settings(
        cov={"center": center, "ddof": ddof}, prior=prior, epsilon=0.05, epsilon_mode=epsilon_mode
    )
    records = [fit_task(X, settings, seed=0) for X in TASKS]
    C = naive_covariance(records, TASKS, settings)
    likelihoods = []
    for record in records:
        components = [
            pi * multivariate_normal(mu, C).pdf(QUERIES) for pi, mu in zip(record.shares, record.means, strict=True)
        ]
        likelihoods.append(np.sum(components, axis=0))
    prior_weights = np.array(SIZES) if prior == "n_t" else np.ones(4)
    joint = np.stack(likelihoods, axis=1) * prior_weights
    expected = joint / joint.sum(axis=1, keepdims=True)

    router = GaussianRouter(settings).fit(records)
    assert 0.05 < expected.max(axis=1).min() < 0.95, "the data should leave some inputs undecided"
    np.testing.assert_allclose(router.posterior(QUERIES), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.exp(router.log_posterior(QUERIES)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_wide_embeddings_stay_finite_and_agree_with_whitening(dtype: str) -> None:
    """d = 1024 with fewer inputs than dimensions, all far from the origin, where float32 needs the centring."""
    d, rng = 1024, np.random.default_rng(0)
    origin = 100 * rng.normal(size=d)
    tasks = [origin + 0.1 * rng.normal(size=d) + 0.5 * rng.normal(size=(150, d)) for _ in range(2)]
    way = np.linspace(0.499, 0.501, 21)[:, None]  # from one task's mean to the other's: undecided only half way
    queries = (1 - way) * tasks[0].mean(axis=0) + way * tasks[1].mean(axis=0)
    settings = router_settings(components=1, dtype=dtype)
    records = [fit_task(X, settings, seed=0) for X in tasks]
    router = GaussianRouter(settings).fit(records)

    L = np.linalg.cholesky(pooled_covariance(records, settings))
    whitened = solve_triangular(L, (queries - origin).T, lower=True).T
    log_likelihoods = []
    for record in records:
        centres = solve_triangular(L, (record.means - origin).T, lower=True).T
        distances = ((whitened[:, None] - centres) ** 2).sum(axis=2)
        log_likelihoods.append(logsumexp(np.log(record.shares) - distances / 2, axis=1))
    expected = softmax(np.stack(log_likelihoods, axis=1), axis=1)

    log_posterior = router.log_posterior(queries)
    assert log_posterior.dtype == np.float64
    assert np.isfinite(log_posterior).all()
    np.testing.assert_allclose(np.exp(log_posterior).sum(axis=1), 1.0, rtol=1e-12)
    np.testing.assert_allclose(np.exp(log_posterior), expected, atol=1e-10 if dtype == "float64" else 1e-4)
    assert router.slopes_.dtype == router.offsets_.dtype == np.dtype(dtype)


def test_largest_width_against_the_diagonal_formula() -> None:
    """d = 5120 with a diagonal covariance, where the Mahalanobis distance is a plain weighted sum."""
    d, rng = 5120, np.random.default_rng(0)
    variances = rng.uniform(0.5, 2.0, size=d)
    scatter = np.diag(variances * 100)
    records = []
    for _ in range(3):
        means = 0.02 * rng.normal(size=(2, d))
        shares = np.array([0.3, 0.7])
        records.append(TaskRecord(means, shares, shares @ means, scatter, count=100))
    settings = router_settings(epsilon=0.0)
    queries = np.concatenate([record.means for record in records]) + np.sqrt(variances) * rng.normal(size=(6, d))
    log_likelihoods = [
        logsumexp(
            np.log(record.shares) - 0.5 * ((queries[:, None] - record.means) ** 2 / variances).sum(axis=2), axis=1
        )
        for record in records
    ]
    posterior = GaussianRouter(settings).fit(records).posterior(queries)
    np.testing.assert_allclose(posterior, softmax(np.stack(log_likelihoods, axis=1), axis=1), atol=1e-9)
    np.testing.assert_allclose(posterior.sum(axis=1), 1.0, rtol=1e-12)


def test_batch_order_and_size_do_not_matter() -> None:
    router = fitted(router_settings())
    whole = router.posterior(QUERIES)
    shuffled = np.random.default_rng(0).permutation(len(QUERIES))
    np.testing.assert_allclose(router.posterior(QUERIES[shuffled]), whole[shuffled], rtol=1e-12)
    np.testing.assert_allclose(router.posterior(QUERIES[3:4]), whole[3:4], rtol=1e-12)
    assert router.posterior(QUERIES[:0]).shape == (0, 4)


def test_float32_embeddings_are_read_as_they_are() -> None:
    router = fitted(router_settings())
    single = QUERIES.astype(np.float32)
    np.testing.assert_array_equal(router.posterior(single), router.posterior(single.astype(np.float64)))


def test_one_task_has_all_the_weight() -> None:
    assert (fitted(router_settings(), TASKS[:1]).posterior(QUERIES) == 1).all()


def test_temperature_divides_the_log_posterior() -> None:
    cold, plain, hot = (fitted(router_settings(temperature=t)).log_posterior(QUERIES) for t in (0.5, 1.0, 4.0))
    for log_posterior, temperature in ((cold, 0.5), (hot, 4.0)):
        np.testing.assert_allclose(np.exp(log_posterior), softmax(plain / temperature, axis=1), rtol=1e-9)
    assert hot.max(axis=1).mean() < plain.max(axis=1).mean() < cold.max(axis=1).mean()


def test_hard_and_soft_weights() -> None:
    router = fitted(router_settings(prune_below=0.05))
    posterior = router.posterior(QUERIES)
    hard = router.weights(QUERIES, "hard")
    assert (hard.sum(axis=1) == 1).all()
    assert set(np.unique(hard)) == {0.0, 1.0}
    np.testing.assert_array_equal(hard.argmax(axis=1), posterior.argmax(axis=1))
    np.testing.assert_array_equal(router.weights(QUERIES, "soft"), prune(posterior, 0.05))
    assert (router.weights(QUERIES, "soft") == 0).any()


def test_prune() -> None:
    weights = np.array([[0.5, 0.4, 0.1], [0.0, 0.05, 0.95]])
    np.testing.assert_allclose(prune(weights, 0.2), [[5 / 9, 4 / 9, 0.0], [0.0, 0.0, 1.0]])
    np.testing.assert_allclose(prune(weights, 0.0), weights)
    np.testing.assert_allclose(prune(weights, 0.4)[0], [5 / 9, 4 / 9, 0])  # the threshold itself stays
    np.testing.assert_allclose(prune(np.full((1, 4), 0.25), 0.9), np.full((1, 4), 0.25))  # the largest stay


# ---- the shared covariance ---------------------------------------------------------------------------------------


def test_pooled_covariance_by_fold_and_by_concatenation() -> None:
    settings = router_settings(epsilon=0.0)
    records = [fit_task(X, settings, seed=0) for X in TASKS]
    residuals = np.concatenate([X - X.mean(axis=0) for X in TASKS])
    np.testing.assert_allclose(
        pooled_covariance(records, settings), np.cov(residuals.T, ddof=0), rtol=1e-10, atol=1e-12
    )


def test_epsilon_is_relative_or_absolute() -> None:
    plain, relative, absolute = (
        router_settings(epsilon=epsilon, epsilon_mode=mode)
        for epsilon, mode in ((0.0, "relative"), (0.5, "relative"), (0.5, "absolute"))
    )
    record = fit_task(TASKS[0] / 10, plain, seed=0)
    S = pooled_covariance([record], plain)
    np.testing.assert_allclose(pooled_covariance([record], absolute), S + 0.5 * np.eye(D))
    np.testing.assert_allclose(pooled_covariance([record], relative), S + 0.5 * np.trace(S) / D * np.eye(D))


def test_relative_epsilon_does_not_see_the_scale_of_the_embeddings() -> None:
    small = [X / 1000 for X in TASKS]
    relative, absolute = router_settings(), router_settings(epsilon_mode="absolute")
    np.testing.assert_allclose(
        fitted(relative, small).posterior(QUERIES / 1000), fitted(relative).posterior(QUERIES), rtol=1e-6
    )
    uniform = fitted(absolute, small).posterior(QUERIES / 1000)
    np.testing.assert_allclose(uniform, 0.25, atol=0.01)


def test_refresh_chooses_the_tasks_that_are_pooled() -> None:
    settings = {refresh: router_settings(cov={"refresh": refresh}) for refresh in ("per_task", "final", "frozen_first")}
    records = [fit_task(X, settings["per_task"], seed=0) for X in TASKS]
    seen = records[:2]
    posteriors = {
        refresh: GaussianRouter(chosen).fit(seen, covariance_records=records).posterior(QUERIES)
        for refresh, chosen in settings.items()
    }
    assert all(posterior.shape == (len(QUERIES), 2) for posterior in posteriors.values())

    def expected(pooled: list[TaskRecord]) -> np.ndarray:
        C = pooled_covariance(pooled, settings["per_task"])
        likelihoods = [
            sum(p * multivariate_normal(m, C).pdf(QUERIES) for p, m in zip(r.shares, r.means, strict=True))
            for r in seen
        ]
        joint = np.stack(likelihoods, axis=1)
        return joint / joint.sum(axis=1, keepdims=True)

    np.testing.assert_allclose(posteriors["per_task"], expected(seen), rtol=1e-9)
    np.testing.assert_allclose(posteriors["final"], expected(records), rtol=1e-9)
    np.testing.assert_allclose(posteriors["frozen_first"], expected(records[:1]), rtol=1e-9)
    with pytest.raises(RouterError, match=r"cov\.refresh: final needs `covariance_records`"):
        GaussianRouter(settings["final"]).fit(seen)


def test_singular_covariance_names_causes_and_remedies() -> None:
    settings = router_settings(epsilon=0.0)
    record = fit_task(TASKS[0][:4], settings, seed=0)
    with pytest.raises(RouterError, match="not positive definite in float64") as caught:
        GaussianRouter(settings).fit([record])
    for words in ("fewer embeddings than dimensions", "raise router.epsilon (now 0.0, relative)", "router.dtype"):
        assert words in str(caught.value)
    assert isinstance(caught.value, LatentSweepError)
    GaussianRouter(router_settings()).fit([record])  # the remedy works


def test_covariance_singular_to_rounding_is_refused() -> None:
    """The last pivot is one rounding error above zero, so LAPACK alone lets it pass."""
    scatter = np.array([[1.0, 1.0], [1.0, 1.0 + np.finfo(np.float64).eps]])
    record = TaskRecord(np.zeros((1, 2)), np.ones(1), np.zeros(2), scatter, count=1)
    np.linalg.cholesky(scatter)
    with pytest.raises(RouterError, match="not positive definite"):
        GaussianRouter(router_settings(epsilon=0.0)).fit([record])


def test_covariance_without_degrees_of_freedom_is_refused() -> None:
    settings = router_settings(components=1, cov={"ddof": "tasks"})
    record = fit_task(TASKS[0][:1], settings, seed=0)
    with pytest.raises(RouterError, match=r"divided by 0 \(cov\.ddof: tasks\)"):
        pooled_covariance([record], settings)


# ---- fitting one task --------------------------------------------------------------------------------------------


def test_record_of_one_task() -> None:
    settings = router_settings()
    X = TASKS[0]
    record = fit_task(X, settings, seed=0)
    assert record.means.shape == (3, D)
    assert record.count == 60
    assert record.shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(record.mean, X.mean(axis=0))
    np.testing.assert_allclose(record.scatter, np.cov(X.T, ddof=0) * 60)
    np.testing.assert_allclose(record.shares @ record.means, X.mean(axis=0))
    # A fixed point of K-means: every mean is the average of the inputs nearest to it.
    nearest = ((X[:, None] - record.means) ** 2).sum(axis=2).argmin(axis=1)
    for k in range(3):
        np.testing.assert_allclose(record.means[k], X[nearest == k].mean(axis=0))
        assert record.shares[k] == pytest.approx((nearest == k).mean())


def test_seeds_repeat_and_differ() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, D))  # no clusters, so the result depends on the first centres
    settings = router_settings(components=8)
    huge = 2**63 + 11
    for seed in (0, 1, huge):
        np.testing.assert_array_equal(fit_task(X, settings, seed).means, fit_task(X, settings, seed).means)
    assert not np.array_equal(fit_task(X, settings, 0).means, fit_task(X, settings, 1).means)


def inertia(X: np.ndarray, record: TaskRecord) -> float:
    return float(((X[:, None] - record.means) ** 2).sum(axis=2).min(axis=1).sum())


def test_kmeans_settings_reach_kmeans() -> None:
    X = np.random.default_rng(0).normal(size=(300, D))
    base = router_settings(components=8)
    plain = fit_task(X, base, seed=0)
    restarted = fit_task(X, router_settings(components=8, gmm={"n_init": 20}), seed=0)
    assert inertia(X, restarted) < inertia(X, plain)
    short = fit_task(X, router_settings(components=8, gmm={"kmeans_iters": 1}), seed=0)
    assert inertia(X, short) > inertia(X, plain)
    settled = fit_task(X, router_settings(components=8, gmm={"kmeans_iters": 500}), seed=0)
    nearest = ((X[:, None] - settled.means) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_allclose(settled.means, [X[nearest == k].mean(axis=0) for k in range(8)])
    random_start = fit_task(X, router_settings(components=8, gmm={"init": "random"}), seed=0)
    assert not np.array_equal(random_start.means, plain.means)


def test_uniform_component_weights() -> None:
    shared = fit_task(TASKS[0], router_settings(), seed=0)
    uniform = fit_task(TASKS[0], router_settings(gmm={"weights": "uniform"}), seed=0)
    np.testing.assert_array_equal(uniform.means, shared.means)
    np.testing.assert_allclose(uniform.shares, 1 / 3)
    assert not np.allclose(shared.shares, 1 / 3)


def test_whiten_first_separates_clusters_that_noise_hides() -> None:
    """Two clusters along a quiet axis beside a loud one: K-means cuts the loud axis unless it is whitened."""
    rng = np.random.default_rng(0)
    side = rng.integers(2, size=400)
    X = np.stack([5 * rng.normal(size=400), side + 0.05 * rng.normal(size=400)], axis=1)
    expected = np.sort([X[side == 0, 1].mean(), X[side == 1, 1].mean()])
    raw = fit_task(X, router_settings(components=2, epsilon=1e-6), seed=0)
    whitened = fit_task(X, router_settings(components=2, epsilon=1e-6, gmm={"whiten_first": True}), seed=0)
    assert np.ptp(raw.means[:, 1]) < 0.2
    np.testing.assert_allclose(np.sort(whitened.means[:, 1]), expected, atol=1e-9)  # averages of the raw embeddings


@pytest.mark.parametrize("weights", ["share", "uniform"])
def test_em_steps_follow_their_definition(weights: str) -> None:
    start = fit_task(TASKS[0], router_settings(gmm={"weights": weights}), seed=0)
    settings = router_settings(gmm={"em_iters": 2, "weights": weights})
    X, C = TASKS[0], pooled_covariance([start], settings)
    means, shares = start.means, start.shares
    for _ in range(2):
        joint = np.stack([p * multivariate_normal(m, C).pdf(X) for p, m in zip(shares, means, strict=True)], axis=1)
        responsibilities = joint / joint.sum(axis=1, keepdims=True)
        counts = responsibilities.sum(axis=0)
        means = responsibilities.T @ X / counts[:, None]
        shares = counts / len(X) if weights == "share" else shares
    record = fit_task(X, settings, seed=0)
    np.testing.assert_allclose(record.means, means, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(record.shares, shares, rtol=1e-9)
    assert not np.allclose(record.means, start.means)


def test_component_scatter_after_em_is_weighted_by_responsibility() -> None:
    settings = router_settings(gmm={"em_iters": 1}, cov={"center": "component"})
    start = fit_task(TASKS[0], router_settings(cov={"center": "component"}), seed=0)
    X, C = TASKS[0], pooled_covariance([start], settings)
    joint = [p * multivariate_normal(m, C).pdf(X) for p, m in zip(start.shares, start.means, strict=True)]
    responsibilities = np.stack(joint, axis=1) / np.sum(joint, axis=0)[:, None]
    record = fit_task(X, settings, seed=0)
    residuals = X[:, None] - record.means
    expected = np.einsum("nk,nki,nkj->ij", responsibilities, residuals, residuals)
    np.testing.assert_allclose(record.scatter, expected, rtol=1e-9, atol=1e-9)


def test_shares_have_a_floor() -> None:
    """Ten EM steps under a wide covariance would leave one component nearly empty; its weight stays near 1/n."""
    X = np.concatenate([TASKS[0], TASKS[0][:1] + 0.01])
    settings = router_settings(components=20, gmm={"em_iters": 30})
    record = fit_task(X, settings, seed=0)
    n = len(X)
    floor = (1 / n) / (1 + len(record.shares) / n)  # 1/n before the shares are made to sum to one again
    assert record.shares.min() >= floor
    assert record.shares.sum() == pytest.approx(1)
    assert np.isfinite(record.means).all()


def test_fewer_distinct_embeddings_than_components() -> None:
    X = np.repeat(TASKS[0][:2], 5, axis=0)
    with pytest.warns(UserWarning, match="distinct clusters"):
        record = fit_task(X, router_settings(components=4), seed=0)
    assert len(record.means) == 2
    np.testing.assert_allclose(record.shares, 0.5)
    other = fit_task(TASKS[1], router_settings(), seed=0)  # tasks may have different numbers of components
    assert GaussianRouter(router_settings()).fit([record, other]).posterior(X).argmax(axis=1).tolist() == [0] * 10


def test_more_components_than_embeddings() -> None:
    with pytest.raises(ValueError, match=r"3 components was given 2 embeddings.*Lower router\.components"):
        fit_task(TASKS[0][:2], router_settings(), seed=0)


# ---- records and router as objects -------------------------------------------------------------------------------


def test_adding_a_task_needs_only_the_records(tmp_path: Path) -> None:
    settings = router_settings()
    paths = []
    for index, X in enumerate(TASKS[:3]):
        paths.append(tmp_path / f"{index}.safetensors")
        fit_task(X, settings, seed=index).save(paths[-1])
    newest = fit_task(TASKS[3], settings, seed=3)
    reloaded = GaussianRouter(settings).fit([*map(TaskRecord.load, paths), newest])
    at_once = GaussianRouter(settings).fit([fit_task(X, settings, seed=index) for index, X in enumerate(TASKS)])
    np.testing.assert_array_equal(reloaded.log_posterior(QUERIES), at_once.log_posterior(QUERIES))


def test_refitting_equals_a_new_router() -> None:
    settings = router_settings()
    records = [fit_task(X, settings, seed=0) for X in TASKS]
    router = GaussianRouter(settings).fit(records[:2])
    two = router.posterior(QUERIES)
    router.fit(records)
    np.testing.assert_array_equal(router.posterior(QUERIES), GaussianRouter(settings).fit(records).posterior(QUERIES))
    np.testing.assert_array_equal(router.fit(records[:2]).posterior(QUERIES), two)


def test_record_round_trip_leaves_no_other_file(tmp_path: Path) -> None:
    record = fit_task(TASKS[0], router_settings(), seed=0)
    transposed = TaskRecord(
        np.asfortranarray(record.means), record.shares, record.mean, np.asfortranarray(record.scatter), record.count
    )
    path = tmp_path / "task.safetensors"
    transposed.save(path)
    transposed.save(path)  # writing again replaces
    loaded = TaskRecord.load(path)
    assert [file.name for file in tmp_path.iterdir()] == ["task.safetensors"]
    assert loaded.count == record.count
    for name in ("means", "shares", "mean", "scatter"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(record, name))


def test_failed_save_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "task.safetensors"
    fit_task(TASKS[0], router_settings(), seed=0).save(path)
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("latent_sweep.router.os.fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        fit_task(TASKS[1], router_settings(), seed=0).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_not_a_record_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "task.safetensors"
    path.write_bytes(b"cut short")
    with pytest.raises(StoreError, match=r"task\.safetensors is not a task record"):
        TaskRecord.load(path)
    record = fit_task(TASKS[0], router_settings(), seed=0)
    tensors = {"means": record.means, "shares": record.shares, "mean": record.mean, "scatter": record.scatter}
    save_file(tensors, path)
    with pytest.raises(StoreError, match=r"expected .*count"):
        TaskRecord.load(path)
    save_file({**tensors, "count": np.array([60]), "scatter": record.scatter[:4]}, path)
    with pytest.raises(StoreError, match=r"`scatter` is float64 \(4, 6\), expected float64 \(6, 6\)"):
        TaskRecord.load(path)


def test_record_checks_itself() -> None:
    record = fit_task(TASKS[0], router_settings(), seed=0)
    with pytest.raises(ValueError, match=r"`means` is float32 \(3, 6\), expected float64 \(3, 6\)"):
        TaskRecord(record.means.astype(np.float32), record.shares, record.mean, record.scatter, record.count)
    with pytest.raises(ValueError, match="`count` is 0"):
        TaskRecord(record.means, record.shares, record.mean, record.scatter, count=0)


def test_router_before_fit() -> None:
    with pytest.raises(RouterNotFitted, match="call `fit`"):
        GaussianRouter(router_settings()).posterior(QUERIES)


def test_router_refuses_what_does_not_fit() -> None:
    settings = router_settings()
    router = fitted(settings)
    with pytest.raises(RouterError, match=r"shape \(32, 5\), expected \(inputs, 6\)"):
        router.posterior(QUERIES[:, :5])
    broken = QUERIES.copy()
    broken[4, 0] = np.nan
    with pytest.raises(RouterError, match="embedding 4 of 32 is not finite"):
        router.posterior(broken)
    with pytest.raises(RouterError, match="is not finite"):
        fit_task(broken, settings, seed=0)
    with pytest.raises(RouterError, match="expected at least one"):
        GaussianRouter(settings).fit([])
    with pytest.raises(RouterError, match=r"widths \[5, 6\]"):
        GaussianRouter(settings).fit([fit_task(X, settings, seed=0) for X in (TASKS[0], TASKS[1][:, :5])])


# ---- settings ----------------------------------------------------------------------------------------------------


def test_normalise_embeddings() -> None:
    X = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert normalise_embeddings(X, "none") is X
    np.testing.assert_allclose(normalise_embeddings(X, "l2"), [[0.6, 0.8], [0.0, 0.0]])
    np.testing.assert_allclose(normalise_embeddings(X, "std", table_std=0.5), 2 * X)
    for table_std in (None, 0.0, float("nan")):
        with pytest.raises(ValueError, match="table_std is"):
            normalise_embeddings(X, "std", table_std)


def test_training_reads_no_router_setting() -> None:
    assert RouterSettings().training_identity() == {}
    for group in (RouterSettings().gmm, RouterSettings().cov, RouterSettings().pool):
        assert group.training_identity() == {}


def test_paper_defaults() -> None:
    settings = RouterSettings()
    assert (settings.components, settings.epsilon, settings.gmm.kmeans_iters) == (5, 0.01, 30)
    assert settings.mode is None


@pytest.mark.parametrize(
    "changes",
    [
        {"components": 0},
        {"components": 2.5},
        {"epsilon": -0.1},
        {"temperature": 0.0},
        {"prune_below": 1.0},
        {"mode": "softest"},
        {"gmm": {"em_iters": -1}},
        {"cov": {"ddof": 1}},
        {"unknown": 1},
    ],
)
def test_settings_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        router_settings(**changes)


CHANGES: list[dict[str, Any]] = [
    {"mode": "hard"},
    {"components": 2},
    {"epsilon": 0.5},
    {"epsilon_mode": "absolute"},
    {"embed_norm": "l2"},
    {"temperature": 2.0},
    {"prior": "n_t"},
    {"prune_below": 0.1},
    {"dtype": "float32"},
    {"gmm": {"em_iters": 3}},
    {"gmm": {"init": "random"}},
    {"gmm": {"n_init": 4}},
    {"gmm": {"kmeans_iters": 2}},
    {"gmm": {"weights": "uniform"}},
    {"gmm": {"whiten_first": True}},
    {"cov": {"center": "component"}},
    {"cov": {"ddof": "tasks"}},
    {"cov": {"refresh": "final"}},
    {"pool": {"scope": "input_only"}},
]


def with_group(base: dict[str, Any], change: dict[str, Any]) -> RouterSettings:
    merged = {
        **base,
        **{
            name: {**base.get(name, {}), **value} if isinstance(value, dict) else value
            for name, value in change.items()
        },
    }
    return router_settings(**merged)


@pytest.mark.parametrize("base", [{}, {"gmm": {"em_iters": 1}}, {"gmm": {"whiten_first": True}}], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_equal_record_identity_means_equal_record(base: dict[str, Any], change: dict[str, Any]) -> None:
    """Records are shared between trials by this identity, so whatever it leaves out must not change a record."""
    first, second = router_settings(**base), with_group(base, change)
    if first.record_identity() == second.record_identity():
        one, other = (fit_task(TASKS[0], settings, seed=0) for settings in (first, second))
        for name in ("means", "shares", "scatter"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_record_identity_leaves_out_what_only_routing_reads() -> None:
    plain = router_settings().record_identity()
    for free in ({"epsilon": 0.5}, {"temperature": 2.0}, {"prior": "n_t"}, {"mode": "hard"}, {"dtype": "float32"}):
        assert router_settings(**free).record_identity() == plain
    for bound in ({"components": 4}, {"embed_norm": "l2"}, {"pool": {"truncate": False}}, {"gmm": {"n_init": 2}}):
        assert router_settings(**bound).record_identity() != plain
