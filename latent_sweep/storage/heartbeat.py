"""What a process tells of itself to whoever looks at a sweep: one small file for each process that works on it.

It says what the process does, and which journals it has written lately, so that nobody has to look at every trial to
see what is new. In an object store the same file shows that the process lives, and holds its leases (`leases.py`). It
is about display and leases only: what counts is in journals.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from latent_sweep.storage.objects import requests

FOLDER = "progress"
"""Where the files lie, in the sweep's folder."""
ADVERTISED_SECONDS = 300.0
"""For so long it is told that a journal has been written: several times the pause between two looks."""


class JournalWrite(NamedTuple):
    """A journal that a process has written."""

    size: int
    """In bytes, afterwards."""
    event: str
    """What was written last."""


class Heartbeat:
    """What this process tells of one sweep. Safe to use from several threads.

    Args:
        name: of its file; processes that tell of one sweep have different ones.
    """

    def __init__(self, name: str):
        self.name = name
        self._parts: dict[str, Any] = {}
        self._journals: dict[str, tuple[float, JournalWrite]] = {}
        self._lock = threading.Lock()

    def report(self, part: str, content: Mapping[str, Any]) -> None:
        """Replace a part of what is told, which is plain JSON."""
        with self._lock:
            self._parts[part] = content

    def record_write(self, trial_id: str, size: int, event: str) -> None:
        """Tell for a while that the journal of a trial was written."""
        now = time.monotonic()
        with self._lock:
            old = [trial for trial, (at, _) in self._journals.items() if now - at > ADVERTISED_SECONDS]
            for trial in old:
                del self._journals[trial]
            self._journals[trial_id] = now, JournalWrite(size, event)

    def recent_writes(self) -> dict[str, JournalWrite]:
        """The journals that this process has written lately, by trial id."""
        with self._lock:
            return {trial_id: written for trial_id, (_, written) in self._journals.items()}

    def content(self) -> bytes:
        """All of it, as the content of the file."""
        with self._lock:
            parts = dict(self._parts)
        process = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        sent = {"requests": found} if (found := requests()) else {}
        return json.dumps(process | sent | {"journals": self.recent_writes()} | parts).encode()


_HEARTBEATS: dict[tuple[int, Path], Heartbeat] = {}
_NAMES: dict[int, str] = {}


def heartbeat_of(sweep_folder: Path) -> Heartbeat:
    """What this process tells of the sweep in a folder."""
    mine = pid, _ = os.getpid(), sweep_folder
    if mine not in _HEARTBEATS:
        name = _NAMES.setdefault(pid, f"{socket.gethostname()}-{pid}-{uuid.uuid4().hex[:8]}.json")
        _HEARTBEATS.setdefault(mine, Heartbeat(name))
    return _HEARTBEATS[mine]


def journal_writes(content: Mapping[str, Any]) -> dict[str, JournalWrite]:
    """The journals that a process tells of in the content of its file; what is not as we write it is left out."""
    found = content.get("journals")
    if not isinstance(found, dict):
        return {}
    pairs = {trial_id: one for trial_id, one in found.items() if isinstance(one, list) and len(one) == 2}
    return {
        trial_id: JournalWrite(size, event)
        for trial_id, (size, event) in pairs.items()
        if type(size) is int and isinstance(event, str) and "/" not in trial_id
    }
