"""The trackers that a sweep file asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latent_sweep.settings.paths import local_path
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.tracking.mlflow import tracker_for
from latent_sweep.tracking.tensorboard import TensorboardTracker
from latent_sweep.tracking.tracker import Tracker
from latent_sweep.tracking.wandb import WandbTracker


def trackers_for(settings: Mapping[str, Any], sweep: SweepFolder, allow_insecure: bool = False) -> list[Tracker]:
    """Return the trackers that `run.tracking` asks for; ConfigError for an unusable or insecure address."""
    trackers: list[Tracker] = []
    if (mlflow := tracker_for(settings.get("uri"), sweep, allow_insecure)) is not None:
        trackers.append(mlflow)
    if (folder := settings.get("tensorboard")) is not None:
        trackers.append(TensorboardTracker(local_path(folder), sweep))
    if (project := settings.get("wandb")) is not None:
        directory = Path(os.environ.get("WANDB_DIR") or ".").absolute()  # W&B's process may have another one
        trackers.append(WandbTracker(project, directory, sweep))
    return trackers


def close_all(trackers: Sequence[Tracker]) -> int:
    """Close all trackers, and then raise the first error; return the number of runs that changed."""
    changed, errors = 0, list[Exception]()
    for tracker in trackers:
        try:
            changed += tracker.close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return changed


def compare_text(trackers: Sequence[Tracker]) -> str:
    """Return how to look at a sweep, for the terminal; empty without a tracker."""
    lines = [line for tracker in trackers for line in tracker.compare_lines()]
    return "\n".join(f"{'' if number else 'compare':10}{line}" for number, line in enumerate(lines))
