"""Progress of a running sweep: its workers and its driver tell what they do (`store/telling.py`).

In files, so that it works for workers on other machines and for whoever looks from another terminal (`state.py` reads
them).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from latent_sweep.errors import StoreError
from latent_sweep.store.folders import SweepFolder
from latent_sweep.store.telling import telling_of
from latent_sweep.sweep.plan import Pack

if TYPE_CHECKING:
    from latent_sweep.learn.events import Begun, Step

WORKING, DRIVING = "working", "driving"
"""What a worker tells of its pack, and what a driver tells as long as no worker does."""
PAUSE_SECONDS = 1.0
"""Between two steps that are told."""

MEASURING = "measuring how many trainings learn fastest side by side"


class ProgressWriter:
    """Tells what a worker does with its pack: each thing it begins, and its steps at most once a second.

    What has to be pushed goes with the next sign that the worker lives.

    Args:
        workers: how many work on the pack together.
    """

    def __init__(self, sweep: SweepFolder, pack: Pack, workers: int = 1):
        self._sweep = sweep
        self._tasks = [task.name for task in pack.tasks]
        self._written = float("-inf")
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
        new = (doing, at.position) != self._doing
        steps: dict[str, Any] = {"step": 0, "steps": 0, "loss": None}
        if at.doing == "learning" or at.doing == "scoring":
            if not new and time.monotonic() - self._written < PAUSE_SECONDS and at.step < at.steps:
                return
            steps = {"step": at.step, "steps": at.steps, "loss": sum(at.losses.values()) if at.losses else None}
        if new:
            self._doing, self._since = (doing, at.position), time.time()
        self._written = time.monotonic()
        task = None if at.position is None else self._tasks[at.position]
        content = {"doing": doing, "task": task, "position": at.position, "since": self._since, "time": time.time()}
        _say(self._sweep, WORKING, self._worker | content | steps, at_once=at.doing == "starting")

    def __enter__(self) -> ProgressWriter:
        """Begin; nothing is said yet."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Say that the pack has come to its end here, and which journals it has written."""
        _say(self._sweep, WORKING, {"trials": [], "time": time.time()}, at_once=True)


def say_driving(sweep: SweepFolder, doing: str) -> None:
    """Say what a sweep's driver does before workers say what they do."""
    _say(sweep, DRIVING, {"doing": doing, "time": time.time()}, at_once=True)


def _say(sweep: SweepFolder, part: str, content: dict[str, Any], at_once: bool) -> None:
    telling_of(sweep.path).say(part, content)
    with suppress(StoreError):
        sweep.storage.tell(sweep.path, at_once)
