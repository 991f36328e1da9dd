"""How sure and how right the router is of its posterior, and whether it notices rows of tasks that it has not seen.

Pure functions of log posteriors and distances. T tasks have been seen, n rows are looked at, logarithms are natural.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from latent_sweep.routing.gaussian import prune

Array = npt.NDArray[np.float64]

CALIBRATION_BINS = 15
LEAST_PROBABILITY = float(np.finfo(np.float64).eps)
"""A probability below 2.2e-16 counts as this one in a log loss, as in scikit-learn: a row adds at most 36.04 nats."""


class RoutingMeasures:
    """What is measured of a router on the test rows of the tasks seen, each task alone and all of them.

    Task after task: of a posterior nothing stays but two numbers a row.

    Args:
        prune_below: threshold of `router.prune`.
    """

    def __init__(self, prune_below: float):
        self._prune_below = prune_below
        self._per_task: dict[str, Mapping[str, float]] = {}
        self._confidence: list[Array] = []
        self._correct: list[npt.NDArray[np.bool_]] = []

    def add(self, name: str, log_posterior: Array) -> None:
        """Measure the rows of the next task.

        Args:
            log_posterior: log p(t | x) of its rows, (n, T).
        """
        task = len(self._per_task)
        self._per_task[name] = task_measures(log_posterior, task, self._prune_below)
        self._confidence.append(np.exp(log_posterior.max(axis=1)))
        self._correct.append(log_posterior.argmax(axis=1) == task)

    def measures(self) -> dict[str, float]:
        """Return all measures by name.

        `router_p_correct`, `router_accuracy`, `router_nll` and `router_one_hot` are macro means over tasks,
        `router_ece` is over the rows of all tasks together, and each of them is there for one task, as
        `router/nll/<task>`.
        """
        found = {
            f"router_{name}": float(np.mean([measures[name] for measures in self._per_task.values()]))
            for name in ("p_correct", "accuracy", "nll", "one_hot")
        }
        confidence, correct = np.concatenate(self._confidence), np.concatenate(self._correct)
        found["router_ece"] = expected_calibration_error(confidence, correct)
        return found | {
            f"router/{name}/{task}": value for task, of in self._per_task.items() for name, value in of.items()
        }


def task_measures(log_posterior: Array, task: int, prune_below: float) -> Mapping[str, float]:
    """Measure a router on rows of one task.

    Args:
        log_posterior: (n, T).
        task: the column of the task that the rows belong to.

    Returns:
        `p_correct`, the mean posterior of the rows' own task; `accuracy`, the share of rows whose largest posterior it
        has; `nll`, the mean negative log posterior of it in nats, each posterior at least `LEAST_PROBABILITY`; `ece`;
        and `one_hot`, the share of rows that pruning leaves with one weight.
    """
    correct = log_posterior.argmax(axis=1) == task
    weights = prune(np.exp(log_posterior), prune_below)
    return {
        "p_correct": float(np.exp(log_posterior[:, task]).mean()),
        "accuracy": float(correct.mean()),
        "nll": float(np.abs(np.maximum(log_posterior[:, task], np.log(LEAST_PROBABILITY))).mean()),
        "ece": expected_calibration_error(np.exp(log_posterior.max(axis=1)), correct),
        "one_hot": float((np.count_nonzero(weights, axis=1) == 1).mean()),
    }


def is_posterior(weights: Array) -> bool:
    """Whether weights (n, T) are probabilities of the tasks: not negative, and 1 in every row's sum."""
    return bool((weights >= 0).all()) and bool(np.allclose(weights.sum(axis=1), 1, rtol=0, atol=1e-4))


def accuracies(right: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of rows that weigh their own task most, by task and their macro mean, named as above."""
    return {"router_accuracy": float(np.mean(list(right.values())))} | {
        f"router/accuracy/{task}": share for task, share in right.items()
    }


def expected_calibration_error(confidence: Array, correct: npt.NDArray[np.bool_]) -> float:
    """Expected calibration error (Guo et al. 2017, Eq. 5): sum_m |B_m| / n * |acc(B_m) - conf(B_m)|.

    Args:
        confidence: (n,) largest probability of each row.
        correct: (n,) whether it is that of the right class. B_m holds the rows with confidence in ((m - 1) / 15,
            m / 15]; acc and conf are their means.
    """
    bins = np.digitize(confidence, np.linspace(0, 1, CALIBRATION_BINS + 1)[1:-1], right=True)
    gaps = np.bincount(bins, weights=correct - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def novelty_auroc(seen: Array, unseen: Array) -> float:
    """Area under the ROC curve with which a distance tells rows of tasks not yet seen (positive) from seen ones.

    It is the share of pairs, of a seen and an unseen row, whose unseen row lies farther from the tasks seen; equal
    distances count half. 1 where every unseen row lies farther than every seen one, 0.5 by chance.

    Args:
        seen: (n,) distances of rows of tasks seen; `unseen`: (m,) of the others.
    """
    near = np.sort(seen)
    below, not_above = np.searchsorted(near, unseen, side="left"), np.searchsorted(near, unseen, side="right")
    return float((below + not_above).mean() / 2 / len(near))
