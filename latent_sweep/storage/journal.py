"""What a trial did, on disk: an append-only journal of events.

A journal is one JSON object a line, each with `seq` (0, 1, 2, ...), `time` (Unix seconds), `event` and, at its end,
`sha256` of all that stands before it in the line:

    started   attempt, node, versions, hardware, halved: what is done with half the rows in a pass
    stage     tasks_seen (from 1), task, lineage, reused, scores {task: fraction}, metrics {name: finite number},
              key (what the row was computed from), files {name: sha256}, steps and trained_numbers of learning the
              task (null where an earlier version did not count them), learned_with and scored_with, scored_by {task:
              name of its metric}
    finished  metrics, files {name: sha256}
    failed    kind, message, task, step and, where it is known, during: learning, answering or statistics
    lost      kind, message: the worker is gone, or what it left is; the trial is tried again, or `failed` follows
    stopped   tasks_seen, reason

A trial may start several times; its journal is the truth: the files beside it are checked against the digests that it
tells, and trackers and reports only mirror it.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from latent_sweep.errors import StoreError
from latent_sweep.storage.files import committing, read_file
from latent_sweep.storage.heartbeat import telling_of
from latent_sweep.storage.reserve import free_reserve, is_full
from latent_sweep.storage.storage import Storage

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


class Place(NamedTuple):
    """Where reading a journal has ended."""

    offset: int
    """In bytes."""
    seq: int
    """Of the next event."""


START = Place(0, 0)


def told_by_worker(event: Event) -> bool:
    """Whether an event says that a worker was there; of its loss or stop somebody else tells, maybe days later."""
    return event["event"] not in ("lost", "stopped") and event.get("kind") != "lost"


class Journal:
    """The append-only record of one trial's events; one writer at a time, any number of readers."""

    def __init__(self, storage: Storage, path: Path):
        self.path, self._storage = path, storage

    def append(self, event: EventName, /, **fields: Any) -> Event:
        """Write one event durably and return it as `read` will give it.

        A torn last line, left by a kill, is cut off first. What another node has written is fetched first. Of the
        journal only the last line is read, however long it is: what stands before it is for its readers to check.

        Raises:
            StoreError: a field is not plain JSON (finite numbers, strings, lists, mappings), the journal's last line is
                damaged, or it cannot be written.
        """
        try:
            content = json.dumps({"time": time.time(), "event": event, **fields}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"{self.path}: event {event!r} is not plain JSON ({error}). Give finite Python numbers, strings, "
                f"lists and mappings; convert arrays and tensors first."
            ) from error
        self._storage.sync(self.path)
        try:
            return self._write(event, content)
        except StoreError as error:  # the end of an attempt is recorded even then
            ends = event in ("lost", "failed") and is_full(error)
            if not (ends and free_reserve(self.path.parent.parent.parent)):
                raise
            return self._write(event, content)

    def _write(self, event: EventName, content: str) -> Event:
        """Write an event, which is a JSON object's text that lacks its number."""
        with committing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b", buffering=0) as file:  # closing it must not write what has failed before
                fcntl.flock(file, fcntl.LOCK_EX)  # the driver too has something to say of a trial whose worker is lost
                last, end = _last_line(file)
                seq = self._seq(last) + 1 if end else 0
                line = _sealed(json.dumps({"seq": seq, **json.loads(content)}))
                file.truncate(end)
                try:
                    rest = memoryview(line + b"\n")
                    while rest:
                        rest = rest[file.write(rest) :]
                    os.fsync(file.fileno())
                except OSError:  # what is not acknowledged does not stay, or it would be there twice
                    with suppress(OSError):
                        os.ftruncate(file.fileno(), end)
                    raise
            if seq == 0:
                _sync_folder(self.path.parent)  # the new file's name must survive a power cut as well
            size = self.path.stat().st_size
        self._storage.push(self.path)
        telling_of(self.path.parent.parent.parent).wrote(self.path.parent.name, size, event)
        return json.loads(line)

    def read(self) -> list[Event]:
        """Every event in order; empty where there is no journal yet.

        A last line without its line end was cut by a kill and never acknowledged: it does not count.

        Raises:
            StoreError: any other line is not as it was written, or stands elsewhere; the message names file and line.
        """
        return self.read_on(START)[0]

    def read_on(self, place: Place) -> tuple[list[Event], Place]:
        """Return the events after a place where reading ended before, and where it ends now.

        Raises:
            StoreError: as `read`.
        """
        content = self._whole_lines(place.offset)
        events = [self._parse(place.seq + number, line) for number, line in enumerate(content.split(b"\n")[:-1])]
        return events, Place(place.offset + len(content), place.seq + len(events))

    def _whole_lines(self, offset: int = 0) -> bytes:
        content = read_file(self.path, offset)
        return content[: content.rfind(b"\n") + 1]

    def _seq(self, last: bytes) -> int:
        """The number of the last line, where that is as it was written."""
        if last[-_SEAL_BYTES:] != _seal(last[:-_SEAL_BYTES]):
            self.read()  # says which line is at fault
        return json.loads(last)["seq"]

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
    """Write a JSON object's text as a line that ends with the digest of what stands before it."""
    body = text[:-1].encode()
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return b', "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}'


_SEAL_BYTES = len(_seal(b""))
_BLOCK = 2**16
"""Bytes that are read at once of a journal's end."""


def _last_line(file: BinaryIO) -> tuple[bytes, int]:
    """Find the last line that has its line end; return it without that, and where it ends: nothing, and 0, if none."""
    tail, start = b"", file.seek(0, os.SEEK_END)
    while start and tail.count(b"\n") < 2:  # that of the line before is where it begins
        length = min(_BLOCK, start)
        start = file.seek(start - length)
        tail = file.read(length) + tail
    end = tail.rfind(b"\n")
    if end < 0:
        return b"", 0
    return tail[tail.rfind(b"\n", 0, end) + 1 : end], start + end + 1


def mending(sweep_folder: Path) -> str:
    """Advise what to do about a file that is damaged, for messages."""
    command = f"latent-sweep verify --repair {shlex.quote(str(sweep_folder))}"
    return f"`{command}` sets it aside, and the same run command makes it again"


def _is_event(record: Mapping[str, Any]) -> bool:
    seq, at, event = (record.get(name) for name in ("seq", "time", "event"))
    return type(seq) is int and isinstance(at, (int, float)) and isinstance(event, str) and event in _STATUS_AFTER


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stages(events: Sequence[Event]) -> list[Event]:
    """The stage events by tasks seen; where one is there twice, the later wins.

    Where it tells of another snapshot or of other rows than before, as when data has changed, those behind it are gone.
    """
    latest: dict[int, Event] = {}
    for event in events:
        if event["event"] == "stage":
            seen = event["tasks_seen"]
            if seen in latest and to_example(latest[seen]) != to_example(event):
                latest = {earlier: row for earlier, row in latest.items() if earlier < seen}
            latest[seen] = event
    return [latest[tasks_seen] for tasks_seen in sorted(latest)]


def to_example(stage: Event) -> int:
    """Hash what a row of the score matrix is of, in this process: what is scored how, and the newest snapshot."""
    return hash((stage.get("key"), stage.get("lineage")))


def status(events: Sequence[Event]) -> Status:
    """Return where the trial stands: what its last event left behind. Started again after a failure, it is running."""
    return _STATUS_AFTER[events[-1]["event"]] if events else "pending"


def attempts(events: Sequence[Event]) -> list[Event]:
    """The started events, one for each time that a worker took the trial up."""
    return [event for event in events if event["event"] == "started"]


def restarts(events: Sequence[Event]) -> list[str]:
    """Return why the trial was started again each time, in order: the kind of the loss or failure before."""
    pairs = itertools.pairwise(events)
    return [
        before["kind"]
        for before, after in pairs
        if before["event"] in ("lost", "failed") and after["event"] == "started"
    ]
