"""Inject faults into a real tiny sweep and count what each one costs.

    PYTHONPATH=tests python -m tools.faults [NAME ...] [--short]

Prints a Markdown table. Exit code 1 if a fault breaks one of these promises:

- Nothing that was committed before the fault is lost or changed: snapshots, score rows, journal events.
- No training takes more than `training.checkpoint_every` optimizer steps twice.
- No stage is learned twice, except the one whose snapshot the fault itself corrupts.
- Score matrices, answers and snapshots equal those of the undisturbed run, byte for byte.

Every process reports each optimizer step after taking it, so steps are counted, not estimated. A fault strikes shortly
before a checkpoint is due, where it costs most.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import io
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from helpers.mlflow_server import Server, empty_database
from helpers.moments import HALTING, at_step
from helpers.patience import PATIENCE
from helpers.ray_heads import node, nodes
from helpers.sweeps import end, events, family, results, start, sweep_folder, tiny, wait_for_line, wait_until, write

from latent_sweep.cli.main import main as latent_sweep
from latent_sweep.storage.folders import SweepFolder

CHECKPOINT_EVERY = 20
STEPS_PER_TASK = 80
STRIKE_AT = 3 * CHECKPOINT_EVERY - 5
"""Step of the second task at which a fault strikes: after two checkpoints, shortly before the next."""

Step = tuple[str, int, int]
"""Training id, position of the task from 0, step from 1."""

REPORTING = """
if any(name in argument for argument in sys.orig_argv for name in PROGRAMS):
    from latent_sweep.monitor.progress import ProgressWriter

    pipe, write = os.open(os.environ["STEPS_TAKEN"], os.O_WRONLY), ProgressWriter.write

    def reporting(self, at):
        if at.doing == "learning":
            os.write(pipe, f"{at.training_id} {at.position} {at.step}\\n".encode())
        write(self, at)

    ProgressWriter.write = reporting
"""
"""Imported by each process as `sitecustomize`; processes that learn report their steps."""


class StepsTaken:
    """The optimizer steps of all processes of a sweep, written into a pipe, which no full disk stops.

    The first training that has taken `STRIKE_AT` steps of its second task halts there, until `strike` is released.
    """

    def __init__(self, folder: Path):
        self.strike = at_step(folder, position=1, step=STRIKE_AT)
        (folder / "sitecustomize.py").write_text(HALTING + REPORTING, encoding="utf-8")  # reports, then halts
        pipe = folder / "steps"
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # also as a writer, so that it never ends
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for all steps of a sweep
        self.environment = self.strike.environment | {"STEPS_TAKEN": str(pipe)}
        self._read = b""

    def count(self) -> Counter[Step]:
        with contextlib.suppress(BlockingIOError):
            while content := os.read(self._pipe, 1 << 20):
                self._read += content
        lines = (line.split() for line in self._read.decode().splitlines())
        return Counter((training, int(position), int(step)) for training, position, step in lines)

    def close(self) -> None:
        os.close(self._pipe)


def learned_again(taken: Mapping[Step, int]) -> list[tuple[str, int]]:
    fewest: dict[tuple[str, int], int] = {}
    for (training, position, _), times in taken.items():
        fewest[training, position] = min(times, fewest.get((training, position), times))
    return [stage for stage, times in fewest.items() if times > 1]


def taken_twice(taken: Mapping[Step, int]) -> Counter[str]:
    again = learned_again(taken)
    twice: Counter[str] = Counter()
    for (training, position, _), times in taken.items():
        if times > 1 and (training, position) not in again:
            twice[training] += times - 1
    return twice


def committed(sweep: SweepFolder) -> dict[str, Any]:
    """Return journal events, score rows and snapshots by name; a snapshot's facts commit it."""
    contents: dict[str, Any] = {}
    for trial in sweep:
        rows = (trial.read_json("scores.json") or {"scores": []})["scores"]
        for kind, entries in (("event", trial.events()), ("row", rows)):
            contents |= {f"{kind} {number} of {trial.trial_id}": content for number, content in enumerate(entries)}
    for facts in sweep.snapshots.folder.glob("*.json"):
        tensors = facts.with_suffix(".safetensors")
        contents |= {path.name: path.read_bytes() for path in (facts, tensors) if path.is_file()}
    return contents


def lost(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name, content in before.items() if now.get(name) != content]


@dataclass
class Disturbed:
    """A sweep of two trainings of two tasks, four trials, and what it had committed when the fault struck."""

    folder: Path
    steps: StepsTaken
    path: str = ""
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    processes: set[psutil.Process] = field(default_factory=set)
    committed: Mapping[str, Any] = field(default_factory=dict)

    def describe(self, tracker: str = "none") -> None:
        content = tiny(
            trial__training__epochs=STEPS_PER_TASK // 8,
            trial__training__checkpoint_every=CHECKPOINT_EVERY,
            run__tracking__uri=tracker,
        )
        self.path = write(self.folder, content)

    @property
    def sweep(self) -> SweepFolder:
        return sweep_folder(self.folder)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = start(self.path, *arguments, **self.steps.environment, **environment)
        self.started.append(process)
        return process

    def reach_the_middle(self, process: subprocess.Popen[str]) -> psutil.Process:
        self.steps.strike.wait(process)
        self.processes |= set(family(process))
        self.committed = committed(self.sweep)
        return psutil.Process(self.steps.strike.pid)

    def finish(self, process: subprocess.Popen[str], codes: Collection[int] = (0,)) -> str:
        self.steps.strike.release()
        self.processes |= set(family(process))
        printed, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode in codes, f"ended with {process.returncode}, expected {codes}:\n{printed}"
        return printed

    def close(self) -> None:
        for process in self.started:
            end(process, self.processes)
        self.steps.close()

    def losses(self) -> str:
        kinds = sorted({event.kind for event in events(self.sweep, "lost")})
        return f"the journal says {', '.join(kinds)}" if kinds else ""


# --- the faults ------------------------------------------------------------------------------------------------------


def _driver(sweep: Disturbed) -> str:
    process = sweep.start()
    sweep.reach_the_middle(process)
    process.kill()  # alone: its workers notice
    process.wait()
    sweep.finish(sweep.start())
    return "the same command went on"


def _worker(sweep: Disturbed) -> str:
    process = sweep.start()
    sweep.reach_the_middle(process).kill()
    sweep.finish(process)
    return sweep.losses()


def _raylet(sweep: Disturbed) -> str:
    with nodes(0, 1, 1, **sweep.steps.environment) as (_, environment):
        process = sweep.start(**environment)
        raylet = sweep.reach_the_middle(process).parent()
        assert raylet is not None
        assert raylet.name() == "raylet"
        raylet.kill()
        raylet.wait()  # its workers notice when it is not a zombie any more
        sweep.finish(process)
    return sweep.losses()


def _node(sweep: Disturbed) -> str:
    with nodes(0, 1, **sweep.steps.environment) as (cluster, environment):
        process = sweep.start(**environment)
        sweep.reach_the_middle(process)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        wait_until(lambda: events(sweep.sweep, "lost"), process)
        cluster.add_node(**node(1))
        sweep.finish(process)
    return sweep.losses()


def _no_tracker(sweep: Disturbed) -> str:
    with tracker(sweep) as server:
        sweep.finish(sweep.start("--local"))
        server.start()
        return _arrived(sweep)


def _tracker(sweep: Disturbed) -> str:
    with tracker(sweep) as server:
        server.start()
        process = sweep.start("--local")
        sweep.reach_the_middle(process)
        server.kill()
        sweep.steps.strike.release()
        before = len(events(sweep.sweep, "stage"))
        wait_until(lambda: len(events(sweep.sweep, "stage")) > before, process)
        server.start()
        sweep.finish(process)
        return _arrived(sweep)


def _disk(sweep: Disturbed) -> str:
    process = sweep.start("--local")
    sweep.reach_the_middle(process)
    psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (1, psutil.RLIM_INFINITY))  # no file grows any more
    printed = sweep.finish(process, codes=(1, 2))
    assert os.strerror(errno.EFBIG) in printed, printed
    sweep.finish(sweep.start("--local"))
    return "the error names the file and says what to do"


def _snapshot(sweep: Disturbed) -> str:
    process = sweep.start("--local")
    sweep.reach_the_middle(process)
    process.kill()
    process.wait()
    (path,) = (sweep.sweep.snapshots.folder).glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    printed = sweep.finish(sweep.start("--local"))
    assert path.stem in printed, printed
    assert (path.parent / "corrupt" / path.name).read_bytes() == content
    return "quarantined in `snapshots/corrupt`"


def _two_drivers(sweep: Disturbed) -> str:
    first = sweep.start("--local")
    sweep.reach_the_middle(first)
    second = sweep.start("--local")
    wait_for_line("waiting for its end", second)
    for driver in (first, second):
        sweep.finish(driver)
    return "the second waited; nothing was left to do"


@dataclass(frozen=True)
class Fault:
    """A description, and a function that runs the sweep to its end with the fault and returns a remark."""

    injected: str
    disturb: Callable[[Disturbed], str]
    corrupted_stages: int = 0
    """Stages whose snapshots the fault itself corrupts."""


FAULTS = {
    "driver": Fault("SIGKILL of the driver; the same command again", _driver),
    "worker": Fault("SIGKILL of a worker", _worker),
    "raylet": Fault("SIGKILL of the raylet of one of two worker nodes", _raylet),
    "node": Fault("The only worker node removed; another one later", _node),
    "no-tracker": Fault("No MLflow server during the sweep; `sync` afterwards", _no_tracker),
    "tracker": Fault("SIGKILL of the MLflow server; started again later; `sync`", _tracker),
    "disk": Fault("No file can grow any more; with room again, the same command", _disk),
    "snapshot": Fault("SIGKILL of the driver and a bit flipped in a snapshot; the same command", _snapshot, 1),
    "two-drivers": Fault("Two drivers at once", _two_drivers),
}
SHORT = ("raylet", "disk")


@contextlib.contextmanager
def tracker(sweep: Disturbed) -> Iterator[Server]:
    server = Server(sweep.folder / "server", empty_database(sweep.folder))
    sweep.describe(server.uri)
    try:
        yield server
    finally:
        server.kill()


def _arrived(sweep: Disturbed) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        codes = [latent_sweep([command, str(sweep.sweep.path)]) for command in ("sync", "verify")]
    assert codes == [0, 0], printed.getvalue()
    assert printed.getvalue().count("\nequal; ") == 2, printed.getvalue()  # the disk, and MLflow
    return "`sync`, then `verify`: equal"


# --- what they cost --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a fault cost: items lost of those committed, steps taken twice by training, stages learned twice."""

    fault: Fault
    committed: int
    lost: Sequence[str]
    twice: Sequence[int]
    again: int
    equal: bool
    """Whether every result equals the undisturbed run's."""
    seen: str
    seconds: float

    def broken(self) -> list[str]:
        promises = [f"lost: {name}" for name in self.lost]
        if (most := max(self.twice, default=0)) > CHECKPOINT_EVERY:
            promises.append(f"a training took {most} steps twice; promised are {CHECKPOINT_EVERY} at most")
        if self.again != self.fault.corrupted_stages:
            promises.append(f"{self.again} stages were learned twice; expected {self.fault.corrupted_stages}")
        if not self.equal:
            promises.append("the results differ from those of the undisturbed run")
        return promises

    def row(self) -> str:
        lost = f"{len(self.lost)} of {self.committed}" if self.committed else "0"
        twice = " + ".join(map(str, self.twice)) or "0"
        again = f"{self.again} (the corrupt one)" if self.fault.corrupted_stages else f"{self.again}"
        equal = "equal" if self.equal else "DIFFERENT"
        cells = (self.fault.injected, lost, twice, again, equal, self.seen, f"{self.seconds:.0f}")
        return f"| {' | '.join(cells)} |"


HEADER = """\
| fault | committed before, lost | steps taken twice, by training | stages learned twice | results | seen | s |
|---|---|---|---|---|---|---|"""


def undisturbed(folder: Path) -> dict[str, bytes]:
    with _sweep(folder) as sweep:
        sweep.finish(sweep.start("--local"))
        taken = sweep.steps.count()
        assert set(taken.values()) == {1}
        assert len(taken) == 2 * 2 * STEPS_PER_TASK, "every step is reported"
        return results(sweep.sweep)


def disturb(fault: Fault, folder: Path, expected: Mapping[str, bytes]) -> Outcome:
    """Run the sweep with a fault and count what that cost; raise AssertionError if it does not end as it should."""
    began = time.monotonic()
    with _sweep(folder) as sweep:
        seen = fault.disturb(sweep)
        seconds = time.monotonic() - began
        taken = sweep.steps.count()
        return Outcome(
            fault,
            committed=len(sweep.committed),
            lost=lost(sweep.committed, committed(sweep.sweep)),
            twice=sorted(taken_twice(taken).values(), reverse=True),
            again=len(learned_again(taken)),
            equal=results(sweep.sweep) == expected,
            seen=seen,
            seconds=seconds,
        )


@contextlib.contextmanager
def _sweep(folder: Path) -> Iterator[Disturbed]:
    folder.mkdir(exist_ok=True)
    sweep = Disturbed(folder, StepsTaken(folder / "steps"))
    sweep.describe()
    try:
        yield sweep
    finally:
        sweep.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Inject faults into a tiny sweep and print what each one costs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--short", action="store_true", help=f"only {', '.join(SHORT)}")
    options = parser.parse_args(arguments)
    names = options.names or (SHORT if options.short else tuple(FAULTS))
    if unknown := set(names) - set(FAULTS):
        parser.error(f"found {', '.join(sorted(unknown))}; expected some of {', '.join(FAULTS)}")
    print(
        f"tiny-llama, 2 trainings of 2 tasks with {STEPS_PER_TASK} optimizer steps each, 4 trials; "
        f"a checkpoint every {CHECKPOINT_EVERY} steps\n\n{HEADER}",
        flush=True,
    )
    broken = []
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        expected = undisturbed(Path(folder) / "undisturbed")
        for name in names:
            try:
                outcome = disturb(FAULTS[name], Path(folder) / name, expected)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                broken.append(f"{name}: {error}")
            else:
                print(outcome.row(), flush=True)
                broken += [f"{name}: {promise}" for promise in outcome.broken()]
    print("\n".join(["", *broken]) if broken else "\nevery promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
