"""Random kills, seeded: a tiny sweep is killed again and again at random moments, and ends as if nothing had happened.

    PYTHONPATH=tests python -m tools.chaos [--seed N] [--kills N] [--modes local ray objects]

Every kill is SIGKILL: of the driver alone, of a worker of Ray, or of the whole tree of processes. Its moment is a
number of events, not of seconds: optimizer steps, or changes of files (before and after each flush, rename and upload),
drawn from the seed. The process that reaches it stops there until what is to be killed is dead; so a seed means about
the same on any machine. Then the same command again, in the same storage, until all kills have landed, and to the end.

Prints a Markdown table. Exit code 0 where these promises were kept each time, else 1, with the seed:

- Score matrices, answers, snapshots and the numbers of every result equal those of an undisturbed run, byte for byte.
- No training takes more than `training.checkpoint_every` optimizer steps twice for a kill.
- Nothing else is left: no checkpoint, nothing set aside as damaged, no process; files that a kill cut off before they
  were renamed stay as `.*.partial`, which nobody reads, and are counted.
- `latent-sweep verify` finds no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from helpers.sweeps import end, family, results, start, tiny, write

from latent_sweep.cli.main import main as latent_sweep
from latent_sweep.storage.folders import SweepFolder, open_sweep
from latent_sweep.storage.journal import status
from latent_sweep.storage.storage import open_storage

CHECKPOINT_EVERY = 10
MODES = ("local", "ray", "objects")
Mode = Literal["local", "ray", "objects"]
"""Without Ray; with it; without it on an object store, whose driver comes back on this node or on a new one."""
TARGETS: Mapping[str, Sequence[str]] = {
    "local": ["tree"],
    "ray": ["worker", "driver", "worker", "tree"],
    "objects": ["tree", "node"],
}
"""What may be killed: the tree is everything that the driver has started, and itself; a node loses its files too."""
KILLS_PER_SWEEP = 10
"""A kill comes, on average, after this part of the events that the undisturbed sweep has."""
KINDS = ("steps", "files")
SIZE = 240
"""Bytes of a record of an event."""
LONGEST_SECONDS = 300.0
"""Until a kill lands, or the sweep ends."""
GONE_SECONDS = 60.0
"""What was left behind by a killed driver ends by itself within this time."""

EVENTS = f"""
import fcntl
import os
import signal
import sys

if any(name in argument for argument in sys.orig_argv for name in ("latent_sweep.run", "default_worker.py")):
    from latent_sweep.storage import leases
    from latent_sweep.storage.objects import Bucket
    from latent_sweep.monitor.progress import ProgressWriter

    folder, within = os.environ["CHAOS_EVENTS"], os.environ["CHAOS_WITHIN"]
    by_the_clock = ("/ray/", "/progress/", ".lock", "/clock-")  # Tune's own files, and what is renewed every so often
    leases.EXPIRY_SECONDS, leases.RENEWAL_SECONDS = 5.0, 0.5  # a minute for each kill would be long

    def happened(kind, what):
        with open(f"{{folder}}/{{kind}}", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(f"{{os.getpid()}} {{what}}".encode()[: {SIZE} - 1].ljust({SIZE} - 1) + b"\\n")
            file.flush()
            with open(f"{{folder}}/{{kind}}.at", "r+") as at:
                number = int(at.read() or 0)
                here = 0 < number <= file.tell() // {SIZE}
                if here:
                    at.seek(0)
                    at.truncate()
        if here:
            with open(f"{{folder}}/reached", "w") as reached:
                reached.write(f"{{os.getpid()}} {{kind}} {{what}}\\n")
            os.kill(os.getpid(), signal.SIGSTOP)

    def around(owner, name, path_of):
        real = getattr(owner, name)

        def hooked(*arguments, **named):
            path = str(path_of(*arguments))
            short = path.removeprefix(within)
            if short == path or any(part in short for part in by_the_clock):
                return real(*arguments, **named)
            happened("files", f"before {{name}} {{short[-160:]}}")
            result = real(*arguments, **named)
            happened("files", f"after {{name}} {{short[-160:]}}")
            return result

        setattr(owner, name, hooked)

    around(os, "replace", lambda old, new: new)
    around(os, "rename", lambda old, new: new)
    around(os, "fsync", lambda file: os.readlink(f"/proc/self/fd/{{file}}"))
    around(Bucket, "put", lambda bucket, key, content: f"{{within}}/{{key}}")
    write = ProgressWriter.write

    def learned(self, at):
        if at.doing == "learning":
            happened("steps", f"{{at.training_id}} {{at.position}} {{at.step}}")
        write(self, at)

    ProgressWriter.write = learned
"""
"""What each process imports at its start, as `sitecustomize`: it counts events, and stops at the one that is wanted."""


class Events:
    """What happens in the processes of one sweep, in the order in which it happens, and where they are to stop."""

    def __init__(self, folder: Path, within: Path):
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(EVENTS, encoding="utf-8")
        self._folder = folder
        for kind in KINDS:
            (folder / kind).touch()
            (folder / f"{kind}.at").touch()
        self.environment = {
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CHAOS_EVENTS": str(folder),
            "CHAOS_WITHIN": str(within),
        }

    def all(self, kind: str) -> list[str]:
        """Every event of a kind, without who had it."""
        return [line.split(maxsplit=1)[1].rstrip() for line in (self._folder / kind).read_text().splitlines()]

    def count(self, kind: str) -> int:
        """How many there were."""
        return (self._folder / kind).stat().st_size // SIZE

    def stop_at(self, kind: str, number: int) -> None:
        """Let whoever has the event of this number stop there."""
        (self._folder / "reached").unlink(missing_ok=True)
        partial = self._folder / "at"
        partial.write_text(str(number))
        partial.replace(self._folder / f"{kind}.at")

    def forget(self) -> None:
        """Let nobody stop any more."""
        for kind in KINDS:
            self.stop_at(kind, 0)

    def reached(self) -> tuple[psutil.Process, str] | None:
        """Who has stopped, and at what; None where nobody has."""
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            pid, _, what = (self._folder / "reached").read_text().partition(" ")
            if what.endswith("\n") and (process := psutil.Process(int(pid))).status() == psutil.STATUS_STOPPED:
                return process, what.strip()
        return None


# --- what is killed, and when ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One kill as the seed has it."""

    mode: str
    target: str
    kind: str
    share: float
    """Of the events of this kind in the undisturbed sweep: so many pass between the kill before and this one."""


def planned(seed: int, kills: int, modes: Sequence[str] = MODES) -> list[Kill]:
    """The kills of a seed, those of one mode together; every target of a mode comes about equally often."""
    source = random.Random(seed)
    found = []
    for number, mode in enumerate(modes):
        count = len(range(number, kills, len(modes)))
        targets = [TARGETS[mode][i % len(TARGETS[mode])] for i in range(count)]
        source.shuffle(targets)
        found += [Kill(mode, t, source.choice(KINDS), source.uniform(0, 2 / KILLS_PER_SWEEP)) for t in targets]
    return found


@dataclass
class Landed:
    """A kill that has landed."""

    kill: Kill
    moment: str
    step: int
    """How many steps all processes had taken by then."""
    twice: Counter[str] = field(default_factory=Counter)
    """By training, steps taken between this kill and the next one that had been taken before."""

    def row(self, number: int) -> str:
        """A row of the table."""
        twice = " + ".join(map(str, sorted(self.twice.values(), reverse=True))) or "0"
        return f"| {number} | {self.kill.mode} | {self.kill.target} | {self.moment} | {twice} |"


HEADER = """\
| kill | mode | of | at | steps taken twice, by training |
|---|---|---|---|---|"""


def repeated(steps: Sequence[str], landed: Sequence[Landed]) -> int:
    """Say at each kill which steps were taken again after it, given all steps in order; returns those before any."""
    seen: set[str] = set()
    without_reason = 0
    for number, step in enumerate(steps):
        if step in seen:
            before = [kill for kill in landed if kill.step <= number]
            if before:
                before[-1].twice[step.split()[0]] += 1
            else:
                without_reason += 1
        seen.add(step)
    return without_reason


def moment(what: str) -> str:
    """What `Events.reached` has given, in few words."""
    kind, _, what = what.partition(" ")
    if kind == "steps":
        training, position, step = what.split()
        return f"step {step} of task {int(position) + 1} of {training[:4]}"
    when, name, path = what.split(maxsplit=2)
    path = re.sub(r"\.([^/]*)\.[0-9a-f]{32}\.partial$", r"\1", path)
    return f"{when} {name} of `{re.sub(r'[0-9a-f]{12,}', lambda found: found[0][:4], path).strip('/')}`"


# --- a sweep that is killed ------------------------------------------------------------------------------------------


def outcome(sweep: SweepFolder) -> dict[str, Any]:
    """What came out: files byte for byte, and of each result the numbers that say nothing of the way there."""
    found: dict[str, Any] = dict(results(sweep))
    for trial in sweep:
        result = trial.read_json("result.json") or {}
        kept = ("trial_id", "training_id", "status", "metrics", "scores", "snapshots", "values")
        found[f"result of {trial.trial_id}"] = {name: result.get(name) for name in kept}
    return found


class Killed:
    """One sweep in a storage of its own, and every process that it has had."""

    def __init__(self, folder: Path, mode: str, place: str):
        self.folder, self.mode, self.place = folder, mode, place
        self.nodes = 0
        self.events = Events(folder / "events", folder / ("cache" if mode == "objects" else "runs"))
        content = tiny(trial__training__checkpoint_every=CHECKPOINT_EVERY, run__max_failures=1000, run__storage=place)
        self.path = write(folder, content)
        self.members: set[psutil.Process] = set()
        self.process: subprocess.Popen[str] | None = None
        self.landed: list[Landed] = []

    def launch(self) -> subprocess.Popen[str]:
        """The main job, if it is not there already."""
        if self.process is None:
            environment = self.events.environment | {"LATENT_SWEEP_CACHE": str(self.cache)}
            self.process = start(self.path, *(["--local"] if self.mode != "ray" else []), **environment)
            assert self.process.stdout is not None
            fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for what it prints before it is read
        return self.process

    @property
    def cache(self) -> Path:
        """Of the node that the driver is on."""
        return self.folder / "cache" / str(self.nodes)

    def suffer(self, kill: Kill, totals: Mapping[str, int]) -> bool:
        """Run until the kill lands; False where the sweep has ended before."""
        self.events.stop_at(kill.kind, self.events.count(kill.kind) + 1 + int(kill.share * totals[kill.kind]))
        looked, deadline = 0.0, time.monotonic() + LONGEST_SECONDS
        process = self.launch()
        while (reached := self.events.reached()) is None:
            if self._ended(process):
                return False
            process = self.launch()  # it may have had a reason to end, and is to go on
            if time.monotonic() - looked > 1.0:  # children that came in between are found below one of these
                self.members |= set(family(process))
                looked = time.monotonic()
            assert looked < deadline, f"{kill} did not land, and the sweep did not end"
            time.sleep(0.02)
        self._strike(kill, process, *reached)
        return True

    def _strike(self, kill: Kill, process: subprocess.Popen[str], stopped: psutil.Process, what: str) -> None:
        of_driver = stopped.pid == process.pid
        target = "driver" if kill.target == "worker" and of_driver else kill.target  # nobody learns yet, or any more
        self.members |= set(family(process))
        self.landed.append(
            Landed(Kill(kill.mode, target, kill.kind, kill.share), moment(what), self.events.count("steps"))
        )
        if target == "worker":
            stopped.kill()
            return
        if target == "driver":
            process.kill()
            if not of_driver:
                stopped.send_signal(signal.SIGCONT)  # it goes on until it notices
        else:
            end(process, [stopped])  # which may be a worker of a driver that was killed before
        forget(process)
        self.process = None
        if target == "node":
            self.nodes += 1

    def _ended(self, process: subprocess.Popen[str]) -> bool:
        """Whether the job has come to its end; any other than a good one is a fault."""
        if process.poll() is None:
            return False
        printed, _ = process.communicate()
        self.process = None
        assert process.returncode == 0, f"ended with {process.returncode}:\n{printed}"
        return True

    def finish(self) -> None:
        """Let it run to its end."""
        self.events.forget()
        process = self.launch()
        self.members |= set(family(process))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
        self.members |= set(family(process))
        printed, _ = process.communicate(timeout=LONGEST_SECONDS)
        self.process = None
        assert process.returncode == 0, f"ended with {process.returncode}:\n{printed}"

    def close(self) -> None:
        """End everything that is left of its processes."""
        if self.process is not None:
            end(self.process)
        for member in self.members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()

    def sweep(self) -> SweepFolder:
        """What it has left, as another node finds it."""
        if self.mode != "objects":
            return open_sweep(self.folder / "runs" / "tiny")
        storage = open_storage(self.place)
        for name in ("snapshots", "checkpoints"):
            storage.pull(storage.folder / name)
        return open_sweep(self.place.replace("?", "/tiny?", 1))

    def faults(self, expected: Mapping[str, Any]) -> list[str]:
        """The promises that were not kept."""
        with cache(self.folder / "cache" / "another"):
            sweep = self.sweep()
            found = [*differences(expected, outcome(sweep)), *self._left_over(sweep), *journal_faults(sweep)]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                if latent_sweep(["verify", str(sweep.path)]) != 0:
                    found.append(f"verify: {printed.getvalue()}")
        if without_reason := repeated(self.events.all("steps"), self.landed):
            found.append(f"{without_reason} steps were taken twice before any kill")
        for number, kill in enumerate(self.landed, start=1):
            if max(kill.twice.values(), default=0) > CHECKPOINT_EVERY:
                found.append(f"kill {number}: {dict(kill.twice)} steps were taken twice; promised {CHECKPOINT_EVERY}")
        return found + [f"process {member} is still there" for member in still_there(self.members)]

    def _left_over(self, sweep: SweepFolder) -> list[str]:
        """Files that an undisturbed sweep does not leave; what a kill cut off is hidden, and nobody reads it."""
        files = [path.relative_to(sweep.storage.folder) for path in sweep.storage.folder.rglob("*") if path.is_file()]
        wrong = [p for p in files if "damaged" in str(p) or p.parts[0] == "checkpoints" or p.suffix == ".partial"]
        return [f"{path} was left" for path in wrong if not (path.name.startswith(".") and path.suffix == ".partial")]

    def partials(self) -> int:
        """How many files were cut off before they were renamed."""
        return sum(1 for path in self.folder.rglob(".*.partial"))


def forget(process: subprocess.Popen[str]) -> None:
    """Wait for a process that was killed, and leave what it has printed unread."""
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def still_there(members: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end by themselves in time; one that only waits to be reaped has ended."""

    def runs(member: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
        return False

    deadline = time.monotonic() + GONE_SECONDS
    while (alive := list(filter(runs, members))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What is missing, too many, or of another content."""
    names = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return [f"{name} differs from the undisturbed run's" for name in names]


def journal_faults(sweep: SweepFolder) -> list[str]:
    """Journals that do not tell of a trial that ran to its end."""
    found = []
    for trial in sweep:
        events = trial.events()
        stages = sorted({event.tasks_seen for event in events if event.name == "stage"})
        if status(events) != "finished" or stages != list(range(1, trial.n_tasks + 1)):
            found.append(f"the journal of {trial.trial_id} ends as {status(events)} with the stages {stages}")
    return found


@contextlib.contextmanager
def cache(folder: Path) -> Iterator[None]:
    """This process on a node with this cache."""
    before = os.environ.get("LATENT_SWEEP_CACHE")
    os.environ["LATENT_SWEEP_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("LATENT_SWEEP_CACHE")
        if before is not None:
            os.environ["LATENT_SWEEP_CACHE"] = before


@contextlib.contextmanager
def object_store(around: Callable[[Any], Any] = lambda application: application) -> Iterator[str]:
    """An imitated S3 in this process; gives the options of its URIs.

    Args:
        around: gives what serves instead of its WSGI application.
    """
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import FileSystem

    logging.getLogger("werkzeug").disabled = True  # a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._server.app = around(server._server.app)
    try:
        os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
        _, port = server.get_host_and_port()
        options = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
        FileSystem.from_uri(f"s3://chaos?{options}")[0].create_dir("chaos")
        yield options
    finally:
        server.stop()


def undisturbed(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """What comes out where nothing happens, and how many events there are."""
    sweep = Killed(folder, "local", str(folder / "runs"))
    try:
        sweep.finish()
        return outcome(sweep.sweep()), {kind: sweep.events.count(kind) for kind in KINDS}
    finally:
        sweep.close()


def disturbed(folder: Path, kills: list[Kill], place: str, totals: Mapping[str, int]) -> Iterator[Killed]:
    """Sweeps of one mode that ran to their ends, as many as it takes for all kills to land."""
    left, number = list(kills), 0
    while left:
        number += 1
        at = place.replace("runs", f"runs{number}", 1) if "://" in place else str(folder / str(number) / "runs")
        sweep = Killed(folder / str(number), kills[0].mode, at)
        try:
            while left and sweep.suffer(left[0], totals):
                left.pop(0)
            if not left:
                sweep.finish()
            yield sweep
        finally:
            sweep.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill sweeps and print what it cost; returns the exit code."""
    parser = argparse.ArgumentParser(description="Kill a tiny sweep at random moments and compare what it ends with.")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--kills", type=int, default=30, help="how many have to land")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args(arguments)
    kills = planned(options.seed, options.kills, options.modes)
    broken: list[str] = []
    number, partials, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        expected, totals = undisturbed(folder / "undisturbed")
        print(
            f"seed {options.seed}: {len(kills)} kills of a sweep of {totals['steps']} optimizer steps and "
            f"{totals['files']} changes of files; a checkpoint every {CHECKPOINT_EVERY} steps\n\n{HEADER}",
            flush=True,
        )
        for mode in options.modes:
            of_mode = [kill for kill in kills if kill.mode == mode]
            place = f"s3://chaos/runs?{stack.enter_context(object_store())}" if mode == "objects" and of_mode else ""
            try:
                for sweep in disturbed(folder / mode, of_mode, place, totals):
                    broken += [f"{mode}: {fault}" for fault in sweep.faults(expected)]
                    partials += sweep.partials()
                    for landed in sweep.landed:
                        number += 1
                        print(landed.row(number), flush=True)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                broken.append(f"{mode}: {error}")
    print(f"\n{number} kills in {time.monotonic() - began:.0f} s; {partials} files cut off before they were renamed")
    print("\n".join([*broken, f"seed {options.seed}"]) if broken else "every promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
