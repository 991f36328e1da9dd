"""latent_sweep: sweeps of continual-learning trials on frozen language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from latent_sweep.deploy.model import ContinualModel
    from latent_sweep.results.frames import SweepResults

__all__ = ["ContinualModel", "open_sweep"]
__version__ = "0.1.0"


def __getattr__(name: str) -> type[ContinualModel]:
    """Import `ContinualModel`, which loads torch, on first access."""
    if name != "ContinualModel":
        raise AttributeError(f"module 'latent_sweep' has no attribute {name!r}")
    from latent_sweep.deploy.model import ContinualModel

    return ContinualModel


def open_sweep(*places: str | Path) -> SweepResults:
    """Return the results of a sweep as data frames, even while it runs: `open_sweep("runs/lambda").trials()`.

    `open_sweep("runs/a", "runs/b")` combines sweeps; it has a column for every setting in which they differ.

    Args:
        places: folders `<storage>/<sweep name>`, as paths or URIs of an object store. A bare name refers to
            `LATENT_SWEEP_STORAGE`, else to `runs`.

    Raises:
        ConfigError: no folder can have this path, the name is ambiguous, no sweep is named, or one is named twice.
        StorageError: there is no such sweep, or the object store cannot be reached or refuses.
    """
    from latent_sweep.results.frames import SweepResults  # pandas is slow to import
    from latent_sweep.storage import folders

    return SweepResults(*map(folders.open_sweep, places))
