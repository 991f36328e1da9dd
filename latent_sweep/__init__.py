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
    """Give `ContinualModel`, which loads torch, to whoever asks for it."""
    if name != "ContinualModel":
        raise AttributeError(f"module 'latent_sweep' has no attribute {name!r}")
    from latent_sweep.deploy.model import ContinualModel

    return ContinualModel


def open_sweep(*places: str | Path) -> SweepResults:
    """Return the results of a sweep as data frames, also while it runs: `open_sweep("runs/lambda").trials()`.

    Several sweeps are put together: `open_sweep("runs/a", "runs/b")` has a column for every setting in which they
    differ.

    Args:
        places: the sweep's folder `<storage>/<sweep name>`, as a path or as the URI of an object store, or several. A
            name alone is looked for in `LATENT_SWEEP_STORAGE`, else in `runs`.

    Raises:
        ConfigError: no folder can have this path, there are two such sweeps, none is named, or one is named twice.
        StorageError: there is no sweep, or the object store cannot be reached or refuses.
    """
    from latent_sweep.results.frames import SweepResults  # pandas: whoever only imports this package does not wait
    from latent_sweep.storage import folders

    return SweepResults(*map(folders.open_sweep, places))
