"""latent_sweep: sweeps of continual-learning trials on frozen language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latent_sweep.api import Plan, TrialEvent, open_sweep, plan_sweep, run_sweep
    from latent_sweep.deploy.model import ContinualModel
    from latent_sweep.report.sweep_results import SweepResults

_MODULES = {"ContinualModel": "deploy.model", "SweepResults": "report.sweep_results"}
"""Modules of the public names that are not in `latent_sweep.api`."""

__all__ = ["ContinualModel", "Plan", "SweepResults", "TrialEvent", "open_sweep", "plan_sweep", "run_sweep"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name on first access: torch and pandas take seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'latent_sweep' has no attribute {name!r}")
    return getattr(import_module(f"latent_sweep.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
