"""Intervals of paired differences: of repetitions and the test rows in them by a hierarchical bootstrap, of repetitions
alone by Student's t.

The bootstrap draws repetitions and rows again with replacement (Davison and Hinkley 1997, section 3.8) and pairs on
rows (Dror et al. 2018). Test rows are the same in all repetitions, so a resample draws them once for all of these (the
pigeonhole bootstrap of Owen 2007): drawn anew in each repetition, what a row does to all of them would average out, and
intervals would be too narrow.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]

LEVEL = 0.95
RESAMPLES = 10_000
_MOST_DRAWS = 1_000_000
"""How many are held at once."""


ROUNDING = 1e-12
"""Less than this is what means of scores differ in by the order of their sums."""

Repetition = Mapping[Hashable, Array]
"""By task, the differences of its rows: (rows,). A task has the same rows in all repetitions that have it."""


def bootstrap_means(
    comparisons: Sequence[Sequence[Repetition]], resamples: int = RESAMPLES, seed: int = 0
) -> list[Array]:
    """Of each comparison, the mean over repetitions, tasks and rows for every resample: (resamples,).

    Comparisons share the draws of rows, and those of as many repetitions theirs: what is equal has equal intervals.

    Args:
        comparisons: the repetitions of each.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    means = _means_of_repetitions([r for repetitions in comparisons for r in repetitions], resamples, generator)
    ends = itertools.accumulate(map(len, comparisons))
    own = [slice(end - len(repetitions), end) for end, repetitions in zip(ends, comparisons, strict=True)]
    return [_means_over_repetitions(means[:, columns], np.random.default_rng((seed, 1))) for columns in own]


def _means_of_repetitions(repetitions: Sequence[Repetition], resamples: int, generator: np.random.Generator) -> Array:
    """Each repetition's mean over its tasks of the mean over rows drawn again: (resamples, repetitions)."""
    means = np.zeros((resamples, len(repetitions)))
    for task in dict.fromkeys(task for repetition in repetitions for task in repetition):
        having = [r for r, repetition in enumerate(repetitions) if task in repetition]
        rows = np.stack([repetitions[r][task] for r in having])
        shares = np.array([1 / len(repetitions[r]) for r in having])
        for block, counts in _counts(generator, rows.shape[1], resamples):
            means[block, having] += counts @ rows.T / rows.shape[1] * shares
    return means


def _means_over_repetitions(means: Array, generator: np.random.Generator) -> Array:
    """The mean over repetitions drawn again, of (resamples, repetitions)."""
    resamples, n = means.shape
    found = [(counts * means[block]).sum(axis=1) / n for block, counts in _counts(generator, n, resamples)]
    return np.concatenate(found)


def _counts(generator: np.random.Generator, n: int, resamples: int) -> Iterator[tuple[slice, Array]]:
    """Yield, for some resamples at a time, how often each draws each of n things when it draws n: (resamples, n)."""
    at_once = max(1, _MOST_DRAWS // n)
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = generator.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        yield slice(start, start + size), np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(float)


def percentile_interval(values: Array) -> Interval:
    """The bounds that leave out as many of the resampled values below as above."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def student_interval(differences: Sequence[float]) -> Interval | None:
    """Student's interval of the mean of paired differences; None for a single one, and for equal ones that are not 0.

    Equal differences say that scores have few values, as with few rows, and not that every other would be as large. A
    bootstrap of two or three numbers can leave their range no more than their mean can: its interval of 95 % holds
    the truth in 52 % and 76 % of cases.
    """
    if len(differences) < 2:
        return None
    from scipy.stats import t  # takes half a second, and most tables compare nothing

    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences)
    if spread < ROUNDING:
        return (0.0, 0.0) if abs(mean) < ROUNDING else None
    error = spread / math.sqrt(len(differences))
    half = float(t.ppf((1 + LEVEL) / 2, len(differences) - 1)) * error
    return mean - half, mean + half
