"""Versions of what computes: of our own code, which name what it makes, and of the libraries, which results repeat.

Our own are raised by whoever changes what the code gives for the same input; then nothing that the old code has made is
taken for the new one's. `tests/sweep/test_identities.py` lists what must change with each of them.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from latent_sweep import __version__

TRAINING = 4
"""Of the loop over steps: part of every snapshot's lineage."""
TOKENS = 2
"""Of how rows become token ids, and of the columns of their cache: part of lineages and of the cache's name."""
OWN_ROWS = 2
"""Of how data of a benchmark of one's own becomes rows and token ids, part of what names its rows: since 2 text that
spells a special token stays text, and more shapes of records are read. Published rows have neither."""
OFFICIAL_TRUNCATION = 2
"""Of `truncation: official`, part of lineages and of the cache's name with it: since 2 T5's cut prompts are tokenized
again."""
FACTORS = 1
"""Of the truncated SVD and its conventions: part of the lineages of Latent-LoRA and of the cache's name."""
RANDOMIZED = 3
"""Of randomised factors: part of the lineages of Latent-LoRA with them and of the cache's name. Since 2 every rank has
its own, no prefix; since 3 they are those of scikit-learn's TruncatedSVD, as in LoRA-XS."""
POOLING = 1
"""Of how token embeddings become one embedding per input: part of routed rows and of the cache's name."""
RECORDS = 1
"""Of how a task's components, scatter and n-grams are fitted: part of routed rows and of the records' names."""
DECODING = 5
"""Of how prompts, snapshots and weights become answers: part of rows and of the names of known answers."""
SCORING = 4
"""Of how snapshots are weighed, and answers scored: part of rows."""
DRAWN = 1
"""Of the weights of `random:` backbones: part of what names such a backbone, so of all that it makes."""

OURS = "latent-sweep"
"""This package."""

LIBRARIES = ("torch", "transformers", "numpy", "scikit-learn", "datasets", "rouge-score", "rapidfuzz", "sacrebleu")
"""What can move a result in its last digits, and with them a decision that hangs on a near tie."""


@dataclass(frozen=True)
class Declared:
    """What this package asks for, as it says to those who install it."""

    version: str
    python: str
    """A range of versions, as in `>=3.10`."""
    requirements: tuple[str, ...]
    """What pip installs with it, a line each; those of its extras have a marker, where they are told at all."""


def declared() -> Declared:
    """Return what this package asks for: by its metadata, or where nobody has installed it, by its pyproject.toml.

    The nodes of a cluster get it in the working directory of a job, with that file beside its folder.

    Raises:
        PackageNotFoundError: neither is there, or it takes Python 3.11 to read the latter.
    """
    try:
        found = metadata(OURS)
        return Declared(found["Version"], found["Requires-Python"], tuple(found.get_all("Requires-Dist") or ()))
    except PackageNotFoundError:
        if sys.version_info >= (3, 11):
            import tomllib

            path = Path(__file__).parents[2] / "pyproject.toml"
            project = tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.is_file() else {}
            if project.get("name") == OURS:
                return Declared(project["version"], project["requires-python"], tuple(project["dependencies"]))
        raise


@cache
def library(name: str) -> str:
    """The installed version of a package; of this one that of its code, which need not be installed."""
    return __version__ if name == OURS else version(name)


def libraries() -> dict[str, str]:
    """Versions of this package and of the libraries that compute the results."""
    return {name: library(name) for name in (OURS, *LIBRARIES)}


def installed() -> dict[str, str]:
    """Versions of what computes the results, Python's too."""
    return {"python": platform.python_version(), **libraries()}
