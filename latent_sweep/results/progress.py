"""Progress of a running sweep: workers write where they are, the driver reads it and prints lines.

Plain lines, no cursor tricks: the same text is readable in a terminal and in a job's log. Files, so that it works for
workers on other machines; they are about display only and may be deleted at any time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from latent_sweep.errors import StoreError
from latent_sweep.labels import label, short_names
from latent_sweep.store.folders import SweepFolder, TrialFolder
from latent_sweep.store.journal import stages, status
from latent_sweep.sweep.plan import Pack

if TYPE_CHECKING:
    from latent_sweep.learn.events import Step

Tell = Callable[[str], None]


class ProgressWriter:
    """Writes where a worker's pack is, at most once a second, or every ten seconds where it has to be pushed."""

    def __init__(self, sweep: SweepFolder, pack: Pack):
        self._storage, self._path = sweep.storage, sweep.path / "progress" / f"{pack.pack_id}.json"
        self._tasks = [task.name for task in pack.tasks]
        self._pause = 10.0 if sweep.storage.is_remote else 1.0
        self._written = 0.0

    def write(self, at: Step) -> None:
        """Say where the pack is. What cannot be said is left out: it is for display only."""
        if time.monotonic() - self._written < self._pause and at.step < at.steps:
            return
        self._written = time.monotonic()
        content = {
            "position": at.position,
            "task": self._tasks[at.position],
            "doing": at.doing,
            "step": at.step,
            "steps": at.steps,
            "loss": sum(at.losses.values()),
        }
        with suppress(StoreError):
            self._storage.write(self._path, json.dumps(content | {"time": time.time()}).encode())


class ProgressPrinter:
    """Prints, at the driver, a line for every stage that ends, and every so often one about what is running.

    Args:
        sweep: the sweep's folder.
        tell: prints a line.
        interval_seconds: between lines about what is running.
    """

    def __init__(self, sweep: SweepFolder, tell: Tell = print, interval_seconds: float = 15.0):
        self._sweep, self._tell, self._interval = sweep, tell, interval_seconds
        self._names = short_names(sweep.axes)
        self._told: dict[str, int] = {}
        self._ended: set[str] = set()
        self._began = time.monotonic()
        self._since = time.time()
        self._last_line = self._began
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)
        for trial in sweep:
            events = trial.events()
            self._told[trial.trial_id] = len(stages(events))
            if status(events) in ("finished", "stopped"):
                self._ended.add(trial.trial_id)
        self._at_start = self._fraction()

    def __enter__(self) -> ProgressPrinter:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _loop(self) -> None:
        while not self._stop.wait(1.0):
            self._look()
            if time.monotonic() - self._last_line >= self._interval:
                self._running_line()

    def _look(self) -> None:
        for trial in self._sweep:
            events = trial.events()
            done = stages(events)
            for event in done[self._told[trial.trial_id] :]:
                m = event["metrics"]
                how = "task reused" if event["reused"] else f"{m.get('seconds_train', 0):.0f} s"
                self._say(
                    f"{self._name(trial)}: {event['tasks_seen']}/{trial.n_tasks} {event['task']} ({how}) "
                    f"AP {100 * m['AP']:.1f} FM {100 * m['FM']:.1f}"
                )
            self._told[trial.trial_id] = max(self._told[trial.trial_id], len(done))
            state = status(events)
            if state in ("failed", "finished", "stopped") and trial.trial_id not in self._ended:
                last = events[-1]
                if last["time"] >= self._since:
                    self._ended.add(trial.trial_id)
                    self._say(f"{self._name(trial)}: {state}" + (f": {last['message']}" if state == "failed" else ""))

    def _running_line(self) -> None:
        running = []
        for path in sorted((self._sweep.path / "progress").glob("*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # for display only: left out
                p = json.loads(path.read_text(encoding="utf-8"))
                if time.time() - p["time"] < 3 * self._interval and p["step"] < p["steps"]:
                    at = f"{p['doing']} {p['task']} {p['step']}/{p['steps']}"
                    running.append(f"{at} loss {p['loss']:.3f}" if p["doing"] == "learning" else at)
        fraction = self._fraction()
        gained = fraction - self._at_start
        eta = ""
        if gained > 0.02:
            left = (1 - fraction) / gained * (time.monotonic() - self._began)
            eta = f", about {_duration(left)} left"
        best = self._best()
        trials = list(self._sweep)
        parts = [f"{len(self._ended)} of {len(trials)} trials done, {100 * fraction:.0f} % of all tasks{eta}"]
        parts += [f"best AP so far {100 * best:.1f}"] if best is not None else []
        self._say("; ".join(parts + running))

    def _fraction(self) -> float:
        trials = list(self._sweep)
        done = sum(trial.n_tasks if trial.trial_id in self._ended else len(stages(trial.events())) for trial in trials)
        return done / max(1, sum(trial.n_tasks for trial in trials))

    def _best(self) -> float | None:
        scores = [events[-1]["metrics"]["AP"] for trial in self._sweep if (events := stages(trial.events()))]
        return max(scores, default=None)

    def _name(self, trial: TrialFolder) -> str:
        return label({self._names[path]: value for path, value in trial.values.items()}) or trial.trial_id

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._tell(f"[{_duration(self._last_line - self._began)}] {text}")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
