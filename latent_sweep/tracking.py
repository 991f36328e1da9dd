"""What a trial did, on disk: an append-only journal of events, and the sweep folder that holds the trials.

A journal is one JSON object a line, each with `seq` (0, 1, 2, ...), `time` (Unix seconds), `event` and, at its end,
`sha256` of all that stands before it in the line:

    started   attempt, node, versions, hardware
    stage     tasks_seen (from 1), task, lineage, reused, scores {task: fraction}, metrics {name: finite number},
              key (what the row was computed from), files {name: sha256}
    finished  metrics, files {name: sha256}
    failed    kind, message, task, step
    lost      kind, message: the worker is gone, or what it left is; the trial is tried again, or `failed` follows
    stopped   tasks_seen, reason

A trial may start several times; its journal is the truth: the files beside it are checked against the digests that it
tells, and trackers and reports only mirror it. One driver at a time
runs a sweep, and one worker at a time writes a trial: `driving` and `writing` see to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from latent_sweep.errors import StoreError
from latent_sweep.files import committing, read_file
from latent_sweep.leases import held
from latent_sweep.snapshots import is_sealed
from latent_sweep.storage import JOURNAL, storage_of

log = logging.getLogger(__name__)

Event = dict[str, Any]
EventName = Literal["started", "stage", "finished", "failed", "lost", "stopped"]
Status = Literal["pending", "running", "finished", "failed", "stopped"]

_STATUS_AFTER: Mapping[str, Status] = {
    "started": "running",
    "stage": "running",
    "finished": "finished",
    "failed": "failed",
    "lost": "running",
    "stopped": "stopped",
}


class Journal:
    """The append-only record of one trial's events; one writer at a time, any number of readers."""

    def __init__(self, path: Path):
        self.path = Path(path)

    def append(self, event: EventName, /, **fields: Any) -> Event:
        """Write one event durably and return it as `read` will give it.

        A torn last line, left by a kill, is cut off first. What another node has written is fetched first.

        Raises:
            StoreError: a field is not plain JSON (finite numbers, strings, lists, mappings), the journal is damaged, or
                it cannot be written.
        """
        try:
            content = json.dumps({"time": time.time(), "event": event, **fields}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"{self.path}: event {event!r} is not plain JSON ({error}). Give finite Python numbers, strings, "
                f"lists and mappings; convert arrays and tensors first."
            ) from error
        storage = storage_of(self.path)
        storage.sync(self.path)
        with committing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the driver too has something to say of a trial whose worker is lost
                earlier = self.read()
                line = _sealed(json.dumps({"seq": len(earlier), **json.loads(content)}))
                file.truncate(len(self._whole_lines()))
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
            if not earlier:
                _sync_folder(self.path.parent)  # the new file's name must survive a power cut as well
        storage.push(self.path)
        return json.loads(line)

    def read(self) -> list[Event]:
        """Every event in order; empty where there is no journal yet.

        A last line without its line end was cut by a kill and never acknowledged: it does not count.

        Raises:
            StoreError: any other line is not as it was written, or stands elsewhere; the message names file and line.
        """
        return [self._parse(number, line) for number, line in enumerate(self._whole_lines().split(b"\n")[:-1])]

    def _whole_lines(self) -> bytes:
        content = read_file(self.path)
        return content[: content.rfind(b"\n") + 1]

    def _parse(self, seq: int, line: bytes) -> Event:
        try:
            record = json.loads(line)
            if not (isinstance(record, dict) and _is_event(record)):
                found = "an entry without seq, time and a known event"
            elif line[-_SEAL_BYTES:] != _seal(line[:-_SEAL_BYTES]):
                found = "does not check against its digest: it is damaged, or was written by an earlier version"
            elif record["seq"] != seq:
                found = f"seq is {record['seq']}, where {seq} comes next: lines are missing, or there twice"
            else:
                return record
        except (ValueError, RecursionError) as error:
            found = str(error)
        raise StoreError(
            f"{self.path}, line {seq + 1}: {found}; expected one JSON object with seq, time, event and, last, sha256. "
            f"{mending(self.path.parent.parent.parent)}: stages in the store are not learned twice."
        )


def _sealed(text: str) -> bytes:
    """The text of a JSON object as a line that ends with the digest of what stands before it."""
    body = text[:-1].encode()
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return b', "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}'


_SEAL_BYTES = len(_seal(b""))


def mending(sweep_folder: Path) -> str:
    """What to do about a file that is damaged, for messages."""
    command = f"latent-sweep verify --repair {shlex.quote(str(sweep_folder))}"
    return f"`{command}` sets it aside, and the same run command makes it again"


def trial_journal(sweep_folder: Path, trial_id: str) -> Journal:
    """The journal of a sweep's trial."""
    return Journal(sweep_folder / "trials" / trial_id / JOURNAL)


def _is_event(record: Mapping[str, Any]) -> bool:
    seq, at, event = (record.get(name) for name in ("seq", "time", "event"))
    return type(seq) is int and isinstance(at, (int, float)) and isinstance(event, str) and event in _STATUS_AFTER


def driving(sweep_folder: Path, on_wait: Callable[[str], None]) -> AbstractContextManager[None]:
    """The right to drive a sweep: to write what it is, to hand out its packs and to mirror it.

    Args:
        on_wait: told who drives it, where that has to be waited for.
    """
    return held(storage_of(sweep_folder).lease(sweep_folder / "locks" / "driver.lock"), on_wait)


@contextmanager
def writing(sweep_folder: Path, trials: Mapping[str, Iterable[str]]) -> Iterator[None]:
    """The right to write these trials' folders, which are up to date then.

    A worker whose driver was killed, or that Ray has given up, may still be at work when its successor comes.

    Args:
        sweep_folder: the trials' folders lie in its `trials/`.
        trials: trial ids by training id; a training is what is waited for.
    """

    def say_waiting(holder: str) -> None:
        log.warning("%s: waiting for %s, which is at work on the same trials", sweep_folder, holder)

    storage = storage_of(sweep_folder)
    with ExitStack() as stack:
        for training_id in sorted(trials):  # all take them in the same order, so nobody waits in a circle
            lease = storage.lease(sweep_folder / "locks" / f"{training_id}.lock")
            stack.enter_context(held(lease, say_waiting))
            for trial_id in trials[training_id]:
                storage.sync_folder(sweep_folder / "trials" / trial_id)
        yield


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stages(events: Sequence[Event]) -> list[Event]:
    """The stage events by tasks seen; where one is there twice, the later wins."""
    latest = {event["tasks_seen"]: event for event in events if event["event"] == "stage"}
    return [latest[tasks_seen] for tasks_seen in sorted(latest)]


def status(events: Sequence[Event]) -> Status:
    """Where the trial stands: what its last event left behind. Started again after a failure, it is running."""
    return _STATUS_AFTER[events[-1]["event"]] if events else "pending"


def attempts(events: Sequence[Event]) -> list[Event]:
    """The started events, one for each time that a worker took the trial up."""
    return [event for event in events if event["event"] == "started"]


def restarts(events: Sequence[Event]) -> list[str]:
    """Why the trial was started again each time, in order: the kind of the loss or failure before."""
    pairs = itertools.pairwise(events)
    return [
        before["kind"]
        for before, after in pairs
        if before["event"] in ("lost", "failed") and after["event"] == "started"
    ]


@dataclass(frozen=True)
class TrialFolder:
    """One trial of a sweep on disk; the folder is empty or missing until the trial starts."""

    path: Path
    trial_id: str
    training_id: str
    values: Mapping[str, Any]
    """The settings that vary in the sweep, by dotted path."""
    params: Mapping[str, Any]
    """Every resolved setting, by dotted path."""
    n_tasks: int

    def events(self) -> list[Event]:
        """Everything in the trial's journal."""
        return Journal(self.path / JOURNAL).read()

    def read_json(self, name: str) -> Any:
        """The content of the trial's file `name`, or None where it is not there.

        Raises:
            StoreError: the file cannot be read as JSON.
        """
        return _read_json(self.path / name) if (self.path / name).exists() else None


@dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk: `<storage>/<sweep name>`. Its `sweep.json` is read once, the trials' journals every time."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether a sweep has been written here."""
        return (self.path / "sweep.json").exists()

    @cached_property
    def _content(self) -> dict[str, Any]:
        file = self.path / "sweep.json"
        if not file.exists():
            raise StoreError(
                f"{self.path}: found no sweep.json; expected the folder of a sweep, <storage>/<sweep name>. "
                f"Run the sweep first, or check the path."
            )
        if not is_sealed(file):
            raise StoreError(
                f"{file}: does not check against its digest: it is damaged, or was written by an earlier version. "
                "Run the sweep again: that writes it anew, and repeats nothing that is complete."
            )
        return _read_json(file)["content"]

    @property
    def name(self) -> str:
        """The sweep's name, which is its folder's name and its experiment's."""
        return self._content["name"]

    @property
    def sweep_id(self) -> str:
        """The hash of the resolved sweep, 16 hexadecimal digits."""
        return self._content["sweep_id"]

    @property
    def axes(self) -> list[str]:
        """The dotted paths that vary, in the sweep file's order."""
        return self._content["axes"]

    @property
    def seed_axis(self) -> str:
        """The axis that repeats a configuration; `seed` also where the sweep does not vary it."""
        return self._content["seed_axis"]

    @property
    def tracking_uri(self) -> str | None:
        """The MLflow address that the sweep file names; None leaves it to the environment."""
        return self._content.get("tracking_uri")

    @property
    def storage(self) -> Path:
        """The folder that all sweeps share, with the snapshots."""
        return self.path.parent

    def __iter__(self) -> Iterator[TrialFolder]:
        for entry in self._content["trials"]:
            yield TrialFolder(path=self.path / "trials" / entry["trial_id"], **entry)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise StoreError(f"{path}: cannot be read as JSON: {error}") from error
