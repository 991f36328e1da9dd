"""What the matrix of scores says about learning and forgetting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ScoreMatrix:
    """a[i, j], the score on task j after learning task i, for the rows known so far.

    T below is the number of rows, a[T, .] the last row: before the last task is learned, every measure speaks of the
    tasks learned so far.

    Raises:
        ValueError: more rows than tasks, a task named twice, row i without exactly i + 1 scores, or a score that is
            not a number in [0, 1].
    """

    tasks: tuple[str, ...]
    """Names of the tasks in the order of learning, those not yet learned included."""
    rows: tuple[tuple[float, ...], ...]
    """Row i holds the i + 1 scores of tasks 0..i after learning task i."""

    def __post_init__(self) -> None:
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"score matrix: a task is named twice in {self.tasks}")
        if len(self.rows) > len(self.tasks):
            raise ValueError(f"score matrix: {len(self.rows)} rows for {len(self.tasks)} tasks")
        for i, row in enumerate(self.rows):
            if len(row) != i + 1:
                raise ValueError(f"score matrix: row {i} has {len(row)} scores, expected {i + 1}")
            for task, score in zip(self.tasks, row, strict=False):
                if not (isinstance(score, float | int) and 0 <= score <= 1):  # false for NaN too
                    raise ValueError(f"score matrix: row {i}, task {task}: {score!r} is not a fraction in [0, 1]")

    def average_performance(self) -> float:
        """AP = mean over j of a[T, j] (Eq. 16)."""
        return float(self._lower()[-1].mean())

    def forgetting(self) -> float:
        """FM = mean over j < T of (max over i >= j of a[i, j]) - a[T, j] (Eq. 17).

        The maximum includes the final row, so FM is never negative. One task forgets nothing: 0.
        """
        lower = self._lower()
        return _mean_of_earlier(lower.max(axis=0) - lower[-1])

    def forgetting_scorer(self) -> float:
        """Forgetting as the public scorer has it: mean over j < T of (max over i < T of a[i, j]) - a[T, j].

        The maximum leaves the final row out and counts unseen entries as 0, so it is negative where a task ends better
        than ever before; it is never above `forgetting`. One task: 0.
        """
        lower = self._lower()
        return _mean_of_earlier(lower[:-1].max(axis=0, initial=0.0) - lower[-1])

    def backward_transfer(self) -> float:
        """BWT = mean over j < T of a[T, j] - a[j, j]; one task: 0. (The public scorer divides the same sum by T.)"""
        lower = self._lower()
        return _mean_of_earlier(lower[-1] - lower.diagonal())

    def mean_diagonal(self) -> float:
        """Mean over j of a[j, j], the score of each task just after it was learned."""
        return float(self._lower().diagonal().mean())

    def measures(self) -> dict[str, float]:
        """The measures of the rows so far, by the names they have everywhere."""
        return {
            "AP": self.average_performance(),
            "FM": self.forgetting(),
            "FM_scorer": self.forgetting_scorer(),
            "BWT": self.backward_transfer(),
        }

    def _lower(self) -> npt.NDArray[np.float64]:
        """(T, T) scores with zeros above the diagonal."""
        if not self.rows:
            raise ValueError("score matrix: it has no rows yet; learn and score a task first")
        lower = np.zeros((len(self.rows), len(self.rows)))
        for i, row in enumerate(self.rows):
            lower[i, : i + 1] = row
        return lower


def _mean_of_earlier(values: npt.NDArray[np.float64]) -> float:
    """Mean over all tasks but the last one; 0 where there is no other."""
    return float(values[:-1].mean()) if len(values) > 1 else 0.0
