"""Versions of what computes: of our own code, which name what it makes, and of the libraries, which results repeat.

Our own are raised by whoever changes what the code gives for the same input; then nothing that the old code has made is
taken for the new one's. `tests/sweep/test_identities.py` lists what must change with each of them.
"""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

TRAINING = 4
"""Of the loop over steps: part of every snapshot's lineage."""
TOKENS = 2
"""Of how rows become token ids, and of the columns of their cache: part of lineages and of the cache's name."""
FACTORS = 1
"""Of the truncated SVD and its conventions: part of the lineages of Latent-LoRA and of the cache's name."""
RANDOMIZED = 2
"""Of randomised factors, part of the lineages of Latent-LoRA with them: since 2 every rank has its own, no prefix."""
POOLING = 1
"""Of how token embeddings become one embedding per input: part of routed rows and of the cache's name."""
RECORDS = 1
"""Of how a task's components, scatter and n-grams are fitted: part of routed rows and of the records' names."""
DECODING = 4
"""Of how prompts, snapshots and weights become answers: part of rows and of the names of known answers."""
SCORING = 3
"""Of how snapshots are weighed, and answers scored: part of rows."""

LIBRARIES = ("torch", "transformers", "numpy", "scikit-learn", "datasets", "rouge-score", "rapidfuzz", "sacrebleu")
"""What can move a result in its last digits, and with them a decision that hangs on a near tie."""


@cache
def library(name: str) -> str:
    """The installed version of a package."""
    return version(name)


def installed() -> dict[str, str]:
    """Versions of what computes the results."""
    return {"python": platform.python_version(), **{name: library(name) for name in ("latent-sweep", *LIBRARIES)}}
