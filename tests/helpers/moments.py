"""Moments of a running program, made and not raced for: a process halts where it calls a function until it is let go.

What a test does to it in the meantime (kill it, end the tracker, take the disk away) meets it there on any machine,
fast or slow. The programs know nothing of it: a folder with a `sitecustomize.py`, which Python imports at its start,
wraps the function in the processes of one sweep.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from helpers.sweeps import wait_until

ARRIVALS = """
import importlib.util
import sys


class Arrival:
    # Calls `then(module)` when it is imported, and not before: Ray gives a worker a minute to appear, and torch takes
    # long on a busy machine.

    def __init__(self, name, then):
        self.name, self.then = name, then
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), self.then(module))
        return spec
"""
"""The beginning of a `sitecustomize` that changes a module as soon as it is there."""

HALTING = (
    ARRIVALS
    + """
import contextlib
import os

PLACE = os.environ["MOMENT"]
PROGRAMS = ("latent_sweep.run", "latent_sweep.cli.main", "default_worker.py")


def wrap():
    import functools
    import json
    import time

    with open(os.path.join(PLACE, "moment.json"), encoding="utf-8") as file:
        moment = json.load(file)
    name, _, names = moment["function"].partition(":")

    def arrived(module):
        *owners, name = names.split(".")
        owner = functools.reduce(getattr, owners, module)
        call, halts = getattr(owner, name), eval(moment["when"])

        @functools.wraps(call)
        def halting(*arguments, **named):
            if halts(*arguments, **named):
                with contextlib.suppress(FileExistsError):  # somebody has halted before: only the first one does
                    with open(os.path.join(PLACE, "reached"), "x", encoding="utf-8") as file:
                        file.write(str(os.getpid()))
                    while os.path.isdir(PLACE) and not os.path.exists(os.path.join(PLACE, "let go")):
                        time.sleep(0.02)
            return call(*arguments, **named)

        setattr(owner, name, halting)

    Arrival(name, arrived)


if any(name in argument for argument in sys.orig_argv for name in PROGRAMS):
    wrap()
"""
)


class Moment:
    """The first time that one of the processes started with `environment` is about to call a function.

    Args:
        folder: a new one.
        function: "module:name" or "module:Class.name".
        when: an expression for a function of the call's arguments that says whether this is the call.
    """

    def __init__(self, folder: Path, function: str, when: str):
        self._folder = folder
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(HALTING, encoding="utf-8")
        (folder / "moment.json").write_text(json.dumps({"function": function, "when": when}), encoding="utf-8")
        before = os.environ.get("PYTHONPATH")
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(folder), before] if before else [str(folder)]),
            "MOMENT": str(folder),
        }

    @property
    def reached(self) -> bool:
        """Whether a process has halted and said which one it is."""
        path = self._folder / "reached"
        return path.exists() and bool(path.read_text())

    @property
    def pid(self) -> int:
        """The process that has halted."""
        return int((self._folder / "reached").read_text())

    def wait(self, process: subprocess.Popen[str]) -> None:
        """Wait until a process has halted, while `process` runs, which is the one or has started it."""
        wait_until(lambda: self.reached, process)

    def let_go(self) -> None:
        """Have the process that halts go on, and no other halt."""
        (self._folder / "let go").touch()
        (self._folder / "reached").touch()


def at_step(folder: Path, position: int, step: int, of: int | None = None) -> Moment:
    """When a training has taken so many steps of the task at this position, and a checkpoint that was due is written.

    Args:
        of: how many steps the task must have in all; None is for any number.
    """
    when = f"lambda self, at: at.doing == 'learning' and (at.position, at.step) == ({position}, {step})"
    when += "" if of is None else f" and at.steps == {of}"
    return Moment(folder, "latent_sweep.monitor.progress:ProgressWriter.write", when)
