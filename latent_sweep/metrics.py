"""Scores of single answers, and what the matrix of scores says about learning and forgetting.

Scores are fractions in [0, 1]; tables multiply by 100. Everything here is pure.
"""

from __future__ import annotations

import csv
import io
import json
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Metric = Literal["accuracy", "rouge_l", "rouge_1"]
RefsPolicy = Literal["single_first", "max_over_refs"]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """`text` in lower case, without ASCII punctuation, with single spaces; articles are kept."""
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1.0 where the normalised prediction equals a normalised reference, else 0.0."""
    _check_references(references)
    answer = normalise_answer(prediction)
    return float(any(answer == normalise_answer(reference) for reference in references))


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """Largest Rouge-L F-measure over the references, with stemming.

    With LCS the longest common subsequence of the stemmed words: P = LCS / words of the prediction, R = LCS / words of
    the reference, F = 2PR / (P + R).
    """
    return _rouge("rougeL", prediction, references)


def rouge_1(prediction: str, references: Sequence[str]) -> float:
    """Largest Rouge-1 F-measure over the references, with stemming.

    With C the words in common, counted with repetition: P = C / words of the prediction, R = C / words of the
    reference, F = 2PR / (P + R).
    """
    return _rouge("rouge1", prediction, references)


METRICS: dict[Metric, Callable[[str, Sequence[str]], float]] = {
    "accuracy": exact_match,
    "rouge_l": rouge_l,
    "rouge_1": rouge_1,
}
"""Name in a benchmark file -> function of one prediction and its references."""


def score_rows(
    metric: Metric, predictions: Sequence[str], references: Sequence[Sequence[str]], refs_policy: RefsPolicy
) -> npt.NDArray[np.float64]:
    """Score of each row as (n,) float64.

    Args:
        metric: a name in `METRICS`.
        predictions: n answers.
        references: n lists of one or more accepted answers.
        refs_policy: "single_first": against the first reference only, as the public scorer does; "max_over_refs":
            the best score over all of them.

    Raises:
        ValueError: the lengths differ, or a row has no reference.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} lists of references, expected as many")
    score = METRICS[metric]
    last = 1 if refs_policy == "single_first" else None
    scores = [score(answer, accepted[:last]) for answer, accepted in zip(predictions, references, strict=True)]
    return np.array(scores, dtype=np.float64)


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

    def to_csv(self) -> str:
        """Write one line per learned task and one column per task; entries of tasks not yet learned are empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["after", *self.tasks])
        for task, row in zip(self.tasks, self.rows, strict=False):
            writer.writerow([task, *row, *[""] * (len(self.tasks) - len(row))])
        return text.getvalue()

    def to_json(self) -> str:
        """Write `{"tasks": [...], "scores": [[...], ...]}`; `from_json` reads it back equal."""
        return json.dumps({"tasks": self.tasks, "scores": self.rows})

    @classmethod
    def from_json(cls, text: str) -> ScoreMatrix:
        """Read the matrix that `to_json` wrote.

        Raises:
            ValueError: the text is not such a matrix.
        """
        content = json.loads(text)
        match content:
            case {"tasks": [*tasks], "scores": [*rows]} if all(isinstance(row, list) for row in rows):
                return cls(tasks=tuple(tasks), rows=tuple(tuple(row) for row in rows))
        raise ValueError(f'score matrix: {text:.80} is not of the form {{"tasks": [...], "scores": [[...], ...]}}')

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


def _check_references(references: Sequence[str]) -> None:
    if isinstance(references, str) or not references:
        raise ValueError(f"references are {references!r}, expected a list of one or more accepted answers")


def _rouge(variant: str, prediction: str, references: Sequence[str]) -> float:
    _check_references(references)
    scorer = _rouge_scorer(variant)
    return max(scorer.score(target=reference, prediction=prediction)[variant].fmeasure for reference in references)


@lru_cache
def _rouge_scorer(variant: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # seconds to import

    return RougeScorer([variant], use_stemmer=True)
