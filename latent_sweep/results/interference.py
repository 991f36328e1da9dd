"""How much the snapshots of a trial's tasks could disturb each other, measured on the snapshots themselves.

Where a task is one matrix R_t for each projection in the space of its factors, equation (6) of the paper, interference
of tasks i and j on an input is psi' R~_i' R~_j psi, with R~ = S R and psi = V' h; the penalty is
sum_{i<j} ||R~_i' R~_j||_F^2, and the proposition bounds interference by ||R~_i' R~_j||_2 ||psi||^2. With Sigma on the
input side R~ = R S, and both hold with that. Where a task has a pair B A, what is measured is the overlap of the
down-projections, A_i A_j', which methods for such pairs keep small.

Legend: T tasks, M adapted projections, r rank, W the weighted matrices (T, M, rows, columns).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from latent_sweep.backbones.registry import BackboneSettings, describe
from latent_sweep.methods import method_class
from latent_sweep.results.routing import backbone_digests
from latent_sweep.results.selection import MOST_DRAWN, UNREADABLE, FinishedTrial, finished_trials, first_of_each, reason
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.journal import stages

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float64]

PENALTY = "method.ortho_lambda"
"""The axis whose zero is no penalty."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Interference of each pair of tasks for inputs with ||psi|| = 1, the mean over projections; (pairs,) each.

    Pairs are (0, 1), (0, 2), ..., (T - 2, T - 1).
    """

    bound: Array
    """The paper's: s^2 ||R~_i' R~_j||_2."""
    largest: Array
    """What some direction psi reaches: s^2 max |psi' R~_i' R~_j psi|, the largest eigenvalue of the symmetric part."""
    typical: Array
    """The root mean square over all directions psi alike."""


@dataclass(frozen=True, eq=False)
class Interference:
    """What the snapshots of one trial have in common."""

    trial: FinishedTrial
    measure: str
    """What is measured, as a formula for people."""
    overlaps: Array
    """(T, T) symmetric, the penalty's measure of each pair: the sum, or mean, over projections."""
    shares: Array
    """(T, T) the same between 0, nothing in common, and 1; NaN where a snapshot is zero."""
    chance: float
    """The share that matrices with independent normal entries have, for comparison."""
    bounds: Bounds | None
    """None where there is no common space of factors, and so no bound."""
    penalty: float | None
    """lambda; None where the method has none."""
    forgetting: Mapping[str, float]
    """FM, a fraction, of every way in which the same snapshots were mixed, by `router.combine`."""


# --- formulas --------------------------------------------------------------------------------------------------------


def weighted(R: Array, singular_values: Array, side: str) -> Array:
    """Compute R~ of R (T, M, r, r): `out` is S R, `in` is R S, `none` is R; singular values are (M, r)."""
    if side == "out":
        return singular_values[:, :, None] * R
    return R * singular_values[:, None, :] if side == "in" else R


def overlaps(W: Array) -> Array:
    """Compute sum_m ||W_im' W_jm||_F^2 of every pair of tasks, (T, T), symmetric: equations (8) and (10)."""
    found = np.empty((len(W), len(W)))
    for i, A in enumerate(W):
        for j, B in enumerate(W[: i + 1]):
            found[i, j] = found[j, i] = np.square(A.swapaxes(-1, -2) @ B).sum()
    return found


def overlap_shares(W: Array) -> Array:
    """Compute sqrt(sum_m ||W_im' W_jm||_F^2 / sum_m ||W_im||_F^2 ||W_jm||_F^2), (T, T), between 0 and 1.

    Of one projection that is ||W_i' W_j||_F / (||W_i||_F ||W_j||_F); several are weighed by how large both are there.
    """
    squares = np.square(W).sum((-1, -2))
    with np.errstate(invalid="ignore"):  # 0 / 0, of snapshots that learned nothing, is the NaN that is meant
        return np.sqrt(overlaps(W) / (squares @ squares.T))


def chance_share(singular_values: Array, side: str) -> float:
    """Compute the share (`overlap_shares`) in expectation, above and below the line, where R has independent entries.

    Of one projection: E ||R~_i' R~_j||_F^2 = r^2 sum S^4 with Sigma on the output side and r (sum S^2)^2 on the input
    side, and E ||R~||_F^2 = r sum S^2.

    Args:
        singular_values: (M, r).
    """
    S2 = np.square(singular_values) if side != "none" else np.ones_like(singular_values)
    r = S2.shape[1]
    norms = (r * S2.sum(1)) ** 2
    products = r**2 * np.square(S2).sum(1) if side == "out" else r * S2.sum(1) ** 2
    return float(np.sqrt(products.sum() / norms.sum()))


def interference_bounds(W: Array, scale: float) -> Bounds:
    """Compute the paper's bound for every pair of tasks, and what interference can be and mostly is.

    With K = W_i' W_j and its symmetric part H, psi' K psi = psi' H psi: no unit psi makes it larger than H's largest
    absolute eigenvalue, which is at most ||K||_2, and over all unit psi its mean square is
    (2 ||H||_F^2 + tr(H)^2) / (r (r + 2)).

    Args:
        W: (T, M, r, r).
        scale: s, the factor in front of every delta, squared in their products.
    """
    found = []
    r = W.shape[-1]
    for i, j in combinations(range(len(W)), 2):
        K = W[i].swapaxes(-1, -2) @ W[j]
        H = (K + K.swapaxes(-1, -2)) / 2
        mean_square = (2 * np.square(H).sum((-1, -2)) + np.trace(H, axis1=-2, axis2=-1) ** 2) / (r * (r + 2))
        largest = np.abs(np.linalg.eigvalsh(H)).max(-1)
        found.append([np.linalg.norm(K, 2, axis=(-2, -1)).mean(), largest.mean(), np.sqrt(mean_square).mean()])
    bound, largest, typical = scale**2 * np.array(found).reshape(-1, 3).T
    return Bounds(bound, largest, typical)


# --- reading ---------------------------------------------------------------------------------------------------------


def interference(sweep: SweepFolder) -> tuple[list[Interference], list[str]]:
    """Measure the snapshots of a few trials of a sweep.

    Where the sweep has trials that differ in nothing but the penalty's weight, one of them without it, these are taken;
    otherwise the first finished repetition of each of the first configurations.

    Returns:
        What was measured, in the sweep's order, and why trials whose snapshots could have been were not.
    """
    found, gaps = [], []
    trials = finished_trials(sweep)
    for trial in compared_trials(trials):
        measured = interference_of(sweep, trial)
        if isinstance(measured, str):
            gaps.append(f"{trial.name}: {measured}")
        elif measured is not None:
            found.append(replace(measured, forgetting=_forgetting(trial, trials)))
    return found, gaps


def _forgetting(of: FinishedTrial, trials: Sequence[FinishedTrial]) -> dict[str, float]:
    """FM of the trials that share this one's snapshots, by how they mix; the first of each mode."""
    found: dict[str, float] = {}
    for trial in trials:
        if trial.folder.training_id == of.folder.training_id and "FM" in trial.metrics:
            found.setdefault(str(trial.folder.params.get("router.combine", "")), trial.metrics["FM"])
    return found


def compared_trials(trials: Sequence[FinishedTrial], most: int = MOST_DRAWN) -> list[FinishedTrial]:
    """Choose trials to compare: one for each training, with and without the penalty where all else is the same."""
    trainings = list({trial.folder.training_id: trial for trial in reversed(trials)}.values())[::-1]
    alike: dict[str, dict[float, FinishedTrial]] = {}
    for trial in trainings:
        rest = {path: value for path, value in trial.folder.params.items() if path != PENALTY}
        rest = {path: value for path, value in rest.items() if not path.startswith("router.")}
        weight = trial.folder.params.get(PENALTY)
        if weight is not None:
            alike.setdefault(json.dumps(rest, sort_keys=True, default=str), {}).setdefault(weight, trial)
    for of_weights in alike.values():
        if 0 in of_weights and len(of_weights) > 1:
            return [of_weights[weight] for weight in sorted(of_weights)][:most]
    return first_of_each([replace(trial, configuration=_of_training(trial)) for trial in trainings], most)


def _of_training(trial: FinishedTrial) -> str:
    """The trial's configuration by what training reads: trials that differ in the router share their snapshots."""
    values = {path: value for path, value in trial.folder.params.items() if not path.startswith(("router.", "eval"))}
    return json.dumps({path: value for path, value in values.items() if path != "seed"}, sort_keys=True, default=str)


def interference_of(sweep: SweepFolder, trial: FinishedTrial) -> Interference | str | None:
    """Measure one trial's snapshots.

    Returns:
        What was found; why it could not be measured; or None where its method leaves nothing to measure.
    """
    try:
        name = trial.folder.params["method.name"]
        if "sum" not in method_class(name).combinations or len(trial.tasks) < 2:
            return None  # a method whose newest snapshot answers alone, or holds the earlier ones
        lineages = [event.lineage for event in stages(trial.events)]
        tensors = []
        for lineage in lineages:
            if (fault := sweep.snapshots.fault(lineage)) is not None:
                return f"snapshot {lineage} {fault}"
            snapshot = sweep.snapshots.get(lineage)
            if snapshot is None:
                return f"snapshot {lineage} is missing"
            tensors.append(snapshot.tensors)
        if all(set(found) == {"R"} for found in tensors):
            return _of_latent(sweep, trial, _stacked(tensors, "R"), lineages[-1])
        if all({"A", "B"} <= set(found) for found in tensors):
            A = _stacked(tensors, "A")
            W = A.swapaxes(-1, -2)
            entries = float(np.sqrt(1 / A.shape[-1]))
            measure = "sum over projections of ||A_i A_j'||_F^2"
            return Interference(trial, measure, overlaps(W), overlap_shares(W), entries, None, None, {})
        return None
    except UNREADABLE as error:
        return reason(error)


def _stacked(tensors: Sequence[Mapping[str, Tensor]], name: str) -> Array:
    return np.stack([found[name].double().numpy() for found in tensors])


def _of_latent(sweep: SweepFolder, trial: FinishedTrial, R: Array, lineage: str) -> Interference | str:
    """Measure R (T, M, r, r), weighed by the singular values of the backbone that it was learned on."""
    from latent_sweep.adapters.factors import stored_singular_values  # loads torch

    groups = trial.settings()
    settings: Any = method_class(groups["method"]["name"]).settings_class.model_validate(groups["method"])
    backbone = BackboneSettings.model_validate(groups["backbone"])
    known = describe(backbone)
    if known is None:
        return "the shapes of its backbone are not known on this machine"
    names = list(known.adapted(backbone))
    digest, folder = backbone_digests(sweep, lineage)["weights"], sweep.storage.folder / "factors"
    found = stored_singular_values(names, digest, R.shape[-1], folder, settings.svd)
    if found is None:
        return f"the singular values of its backbone's weights are not in {folder} on this machine"
    S, side, ortho = found.astype(np.float64), settings.sigma_side, settings.ortho
    if len(S) != R.shape[1]:
        return f"its snapshots have {R.shape[1]} projections, and its backbone {len(S)}"
    bounds = interference_bounds(weighted(R, S, side), settings.s)
    if ortho.normalise == "spectral":
        S = S / S[:, :1]
    W = weighted(R, S * (settings.s if ortho.include_scale else 1.0), side)
    found_overlaps = overlaps(W) / (len(S) if ortho.reduce == "mean" else 1)
    over = "mean" if ortho.reduce == "mean" else "sum"
    weighing = {"out": "S R", "in": "R S", "none": "R"}[side]
    measure = f"{over} over projections of ||W_i' W_j||_F^2 with W = {weighing}"
    chance = chance_share(S, side)
    return Interference(
        trial, measure, found_overlaps, overlap_shares(W), chance, bounds, float(settings.ortho_lambda), {}
    )
