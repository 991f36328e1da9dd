"""Progress of a running sweep: its workers and its driver tell what they do (`storage/heartbeat.py`).

In files, so that it works for workers on other machines and for whoever looks from another terminal (`state.py` reads
them).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from latent_sweep.errors import StoreError
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.heartbeat import telling_of
from latent_sweep.sweep.plan import Pack

if TYPE_CHECKING:
    from latent_sweep.training.events import Begun, Step

WORKING, DRIVING = "working", "driving"
"""What a worker tells of its pack, and what a driver tells as long as no worker does."""
PAUSE_SECONDS = 1.0
"""Between two times that a worker writes what it tells."""

MEASURING = "measuring how many trainings learn fastest side by side"


class ProgressWriter:
    """Tells what a worker does with its pack, within a second: what it begins, and its steps.

    A task may take less than that, and begins a dozen things. What has to be pushed goes with the next sign that the
    worker lives.

    Args:
        workers: how many work on the pack together.
    """

    def __init__(self, sweep: SweepFolder, pack: Pack, workers: int = 1):
        self._sweep = sweep
        self._tasks = [task.name for task in pack.tasks]
        self._written = float("-inf")
        self._later: threading.Timer | None = None
        """Writes what has been told since, once the pause is over."""
        self._writing = threading.Lock()
        self._doing: tuple[str, int | None] | None = None
        self._since = 0.0
        self._worker = {
            "trials": [trial.trial_id for trial in pack.trials],
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),  # Ray names them there
            "workers": workers,
        }

    def write(self, at: Step | Begun) -> None:
        """Say what the pack does. What cannot be said is left out: it is for display only."""
        doing = "answering" if at.doing == "scoring" else at.doing  # which takes the time
        if (doing, at.position) != self._doing:
            self._doing, self._since = (doing, at.position), time.time()
        steps: dict[str, Any] = {"step": 0, "steps": 0, "loss": None}
        if at.doing == "learning" or at.doing == "scoring":
            steps = {"step": at.step, "steps": at.steps, "loss": sum(at.losses.values()) if at.losses else None}
        task = None if at.position is None else self._tasks[at.position]
        content = {"doing": doing, "task": task, "position": at.position, "since": self._since, "time": time.time()}
        telling_of(self._sweep.path).say(WORKING, self._worker | content | steps)
        wait = self._written + PAUSE_SECONDS - time.monotonic()
        if at.doing == "starting" or wait <= 0:
            self._write(at_once=at.doing == "starting")
        elif self._later is None:
            self._later = threading.Timer(wait, self._write)
            self._later.daemon = True
            self._later.start()

    def _write(self, at_once: bool = False) -> None:
        """Write what is told by now."""
        with self._writing:  # or an older content could take the place of a newer one
            self._later, self._written = None, time.monotonic()
            _write(self._sweep, at_once)

    def __enter__(self) -> ProgressWriter:
        """Begin; nothing is said yet."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Say that the pack has come to its end here, and which journals it has written."""
        telling_of(self._sweep.path).say(WORKING, {"trials": [], "time": time.time()})
        if (later := self._later) is not None:
            later.cancel()
        self._write(at_once=True)


def say_driving(sweep: SweepFolder, doing: str) -> None:
    """Say what a sweep's driver does before workers say what they do."""
    telling_of(sweep.path).say(DRIVING, {"doing": doing, "time": time.time()})
    _write(sweep, at_once=True)


def _write(sweep: SweepFolder, at_once: bool) -> None:
    with suppress(StoreError):
        sweep.storage.tell(sweep.path, at_once)
