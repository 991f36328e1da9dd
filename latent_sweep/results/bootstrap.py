"""Intervals of paired differences by a hierarchical bootstrap: repetitions are drawn again, and the test rows in them.

Repetitions and rows are resampled with replacement (Davison and Hinkley 1997, section 3.8). Test rows are the same in
all repetitions, so one resample draws them once for all of these (the pigeonhole bootstrap of Owen 2007): drawn anew in
each repetition, what a row does to all of them would average out, and intervals would be too narrow. Pairing on rows
follows Dror et al. 2018. The interval is the percentile one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

RESAMPLES = 10_000
_BLOCK = 1_000_000
"""Most draws that are held at once."""


def bootstrap_means(
    repetitions: Sequence[Mapping[Hashable, Array]], resamples: int = RESAMPLES, seed: int = 0
) -> npt.NDArray[np.float64]:
    """The mean over repetitions of the mean over tasks of the mean over rows, for every resample: (resamples,).

    Args:
        repetitions: of each, by task, the differences of its rows, (n rows,). Tasks of one name have the same rows in
            all repetitions that have it.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    means = np.zeros((resamples, len(repetitions)))
    for task in dict.fromkeys(task for repetition in repetitions for task in repetition):
        having = [r for r, repetition in enumerate(repetitions) if task in repetition]
        rows = np.stack([repetitions[r][task] for r in having])
        shares = np.array([1 / len(repetitions[r]) for r in having])
        for block, counts in _counts(generator, rows.shape[1], resamples):
            means[block, having] += counts @ rows.T / rows.shape[1] * shares
    found = np.empty(resamples)
    for block, counts in _counts(generator, len(repetitions), resamples):
        found[block] = (counts * means[block]).sum(axis=1) / len(repetitions)
    return found


def _counts(generator: np.random.Generator, n: int, resamples: int) -> Iterator[tuple[slice, Array]]:
    """Yield, for some resamples at a time, how often each draws each of n things when it draws n: (resamples, n)."""
    at_once = max(1, _BLOCK // n)
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        drawn = generator.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        yield slice(start, start + size), np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(float)


def percentile_interval(values: Array, level: float = 0.95) -> tuple[float, float]:
    """The bounds that leave out as many resampled values below as above."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
