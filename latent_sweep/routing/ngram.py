"""The string match, a control for the router: whose definition has most letter sequences in common with a prompt?

It learns nothing and knows no meaning. A task is the character n-grams of what all its training prompts begin with, its
definition, or, where they begin alike in nothing, the share of them that has each n-gram. A prompt goes to the task of
the largest cosine; that of two sets of n-grams a and b is `|a & b| / sqrt(|a| |b|)`. Where this control is as good as
the router, the router's accuracy shows no more than that every task has a text of its own. Where prompts begin with
words that are the same in all tasks, as without definitions, nothing tells tasks apart, and the earliest is nearest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from latent_sweep.storage.checksummed import verified, write_checksummed

SIZES = (3, 4, 5)
"""Characters of an n-gram."""


@dataclass(frozen=True, eq=False)
class TaskNgrams:
    """One task as the string match knows it."""

    shares: Mapping[str, float]
    """The weight of each n-gram: 1, or the share of the training prompts that has it."""

    def save(self, path: Path) -> None:
        """Write them to `path`, atomically and with their digest: n-grams as code points, (n-grams, longest)."""
        ordered = sorted(self.shares)
        codes = np.array(ordered, dtype=f"<U{max(SIZES)}").view("<u4").reshape(len(ordered), max(SIZES))
        write_checksummed(path, {"codes": codes, "shares": np.array([self.shares[ngram] for ngram in ordered])})

    @classmethod
    def load(cls, path: Path) -> TaskNgrams | None:
        """Read what `save` wrote; None where there is nothing, or nothing intact."""
        if not verified(path):
            return None
        arrays = load_file(path)
        ngrams = arrays["codes"].view(f"<U{max(SIZES)}").ravel().tolist()
        return cls(dict(zip(ngrams, arrays["shares"].tolist(), strict=True)))


def ngrams_of(text: str) -> set[str]:
    """The character n-grams of a text, in small letters and with single spaces."""
    plain = " ".join(text.lower().replace("\0", " ").split())
    return {plain[i : i + size] for size in SIZES for i in range(len(plain) - size + 1)}


def fit_ngrams(prompts: Sequence[str]) -> TaskNgrams:
    """Make a task of its training prompts."""
    alike = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))
    if common := ngrams_of(prompts[0][:alike]):
        return TaskNgrams(dict.fromkeys(common, 1.0))
    counts = Counter(ngram for prompt in prompts for ngram in ngrams_of(prompt))
    return TaskNgrams({ngram: count / len(prompts) for ngram, count in counts.items()})


def similarities(prompts: Sequence[str], tasks: Sequence[TaskNgrams]) -> npt.NDArray[np.float64]:
    """The cosine of every prompt with every task, (prompts, tasks); 0 with what has no n-gram."""
    lengths = [math.hypot(*task.shares.values()) for task in tasks]

    def cosine(found: set[str], task: TaskNgrams, length: float) -> float:
        common = sum(map(task.shares.__getitem__, found & task.shares.keys()))
        return common / (length * math.sqrt(len(found))) if common else 0.0

    rows = (
        [cosine(found, task, length) for task, length in zip(tasks, lengths, strict=True)]
        for found in map(ngrams_of, prompts)
    )
    return np.array(list(rows)).reshape(len(prompts), len(tasks))


def nearest(prompts: Sequence[str], tasks: Sequence[TaskNgrams]) -> npt.NDArray[Any]:
    """Weight 1 for every prompt's nearest task, the earliest where several are, (prompts, tasks)."""
    return np.eye(len(tasks))[similarities(prompts, tasks).argmax(axis=1)]
