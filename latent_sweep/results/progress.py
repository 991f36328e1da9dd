"""Progress of a running sweep: its workers and its driver write what they do into small files.

Files, so that it works for workers on other machines and for whoever looks from another terminal (`state.py` reads
them); they are about display only and may be deleted at any time.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from latent_sweep.errors import StoreError
from latent_sweep.store.folders import SweepFolder
from latent_sweep.sweep.plan import Pack

if TYPE_CHECKING:
    from latent_sweep.learn.events import Begun, Step

FOLDER = "progress"
"""Where the files lie, in the sweep's folder."""
DRIVER = "driver.json"
"""The driver's file; all others are named after packs."""

MEASURING = "measuring how many trainings learn fastest side by side"


class ProgressWriter:
    """Writes what a worker does with its pack: each thing it begins, and its steps at most once a second.

    What has to be pushed is written at most every ten seconds while steps are taken.

    Args:
        workers: how many work on the pack together.
    """

    def __init__(self, sweep: SweepFolder, pack: Pack, workers: int = 1):
        self._storage, self._path = sweep.storage, sweep.path / FOLDER / f"{pack.pack_id}.json"
        self._tasks = [task.name for task in pack.tasks]
        self._pause = 10.0 if sweep.storage.is_remote else 1.0
        self._written = float("-inf")
        self._doing: tuple[str, int | None] | None = None
        self._since = 0.0
        self._worker = {
            "trials": [trial.trial_id for trial in pack.trials],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),  # Ray names them there
            "workers": workers,
        }

    def write(self, at: Step | Begun) -> None:
        """Say what the pack does. What cannot be said is left out: it is for display only."""
        doing = "answering" if at.doing == "scoring" else at.doing  # which takes the time
        new = (doing, at.position) != self._doing
        steps: dict[str, Any] = {"step": 0, "steps": 0, "loss": None}
        if at.doing == "learning" or at.doing == "scoring":
            if not new and time.monotonic() - self._written < self._pause and at.step < at.steps:
                return
            steps = {"step": at.step, "steps": at.steps, "loss": sum(at.losses.values()) if at.losses else None}
        if new:
            self._doing, self._since = (doing, at.position), time.time()
        self._written = time.monotonic()
        task = None if at.position is None else self._tasks[at.position]
        content = {"doing": doing, "task": task, "position": at.position, "since": self._since, "time": time.time()}
        with suppress(StoreError):
            self._storage.write(self._path, json.dumps(self._worker | content | steps).encode())


def say_driving(sweep: SweepFolder, doing: str) -> None:
    """Say what a sweep's driver does before workers say what they do."""
    with suppress(StoreError):
        sweep.storage.write(sweep.path / FOLDER / DRIVER, json.dumps({"doing": doing, "time": time.time()}).encode())
