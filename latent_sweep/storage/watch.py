"""Has what other nodes push of a sweep arrive here while it runs, by what their processes tell of it.

An object store is not asked what is new of thousands of trials: processes tell which journals they have written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latent_sweep.errors import StorageError
from latent_sweep.storage.files import read_json_or_nothing
from latent_sweep.storage.heartbeat import ADVERTISED_SECONDS, FOLDER, JournalWrite, heartbeat_of, journal_writes
from latent_sweep.storage.storage import CONNECTIONS, JOURNAL, Storage

log = logging.getLogger(__name__)

POLL_SECONDS = 30.0
"""How often to look for what other nodes have pushed."""
ENDS = ("finished", "stopped", "failed")
"""Events after which all files of a trial are wanted."""
OLD_SECONDS = 3600.0
"""Processes that have told nothing for so long have ended."""


class Watcher:
    """Brings what is new of a sweep from an object store; from a folder there is nothing to bring.

    Journals come as they are written, and the files of a trial when it has ended. A journal whose process was lost
    before it could tell of it comes when another process takes the trial up.

    Args:
        folder: the sweep's, all of which is here as it was when this is made.
    """

    def __init__(self, storage: Storage, folder: Path):
        self._storage, self._folder = storage, folder
        self._followed = time.monotonic()

    def poll(self) -> None:
        """Bring what is new since the last time.

        Raises:
            StorageError: the object store cannot be reached or refuses.
        """
        began = time.monotonic()
        if began - self._followed > ADVERTISED_SECONDS / 2:  # what was told meanwhile may not be told any more
            self._storage.pull(self._folder)
        else:
            self._storage.pull_heartbeats(self._folder)
            moved = [pair for told in read_heartbeats(self._folder).values() for pair in journal_writes(told).items()]
            with ThreadPoolExecutor(CONNECTIONS) as pool:
                list(pool.map(lambda pair: self._bring(*pair), moved))
        self._followed = began

    def _bring(self, trial_id: str, written: JournalWrite) -> None:
        journal = self._folder / "trials" / trial_id / JOURNAL
        if journal.is_file() and journal.stat().st_size >= written.size:
            return
        if written.event in ENDS:
            self._storage.pull(journal.parent)
        else:
            self._storage.pull_journal(journal)


def read_heartbeats(sweep_folder: Path) -> dict[Path, dict[str, Any]]:
    """Read what processes tell of a sweep, as far as it is here and can be read."""
    found = {path: read_json_or_nothing(path) for path in sorted((sweep_folder / FOLDER).glob("*.json"))}
    return {path: content for path, content in found.items() if isinstance(content, dict)}


def remove_stale_heartbeats(storage: Storage, folder: Path) -> None:
    """Remove what processes have told of a sweep that have told nothing for `OLD_SECONDS`.

    Raises:
        StorageError: the object store cannot be reached or refuses.
    """
    now = storage.now()
    for path, facts in storage.files(folder / FOLDER).items():
        if now - facts.modified > OLD_SECONDS:
            storage.remove(path)


def reported_requests(folder: Path, since: float) -> Counter[str]:
    """Add up the requests to object stores that other processes tell of, by kind.

    Args:
        folder: the sweep's.
        since: leave out processes that have told nothing since then, in Unix seconds.
    """
    found: Counter[str] = Counter()
    for path, content in read_heartbeats(folder).items():
        sent, told_at = content.get("requests"), content.get("time")
        if path.name == heartbeat_of(folder).name or not isinstance(sent, dict) or not isinstance(told_at, float):
            continue
        if told_at >= since:
            found.update({kind: count for kind, count in sent.items() if type(count) is int})
    return found


@contextmanager
def watching(storage: Storage, folder: Path) -> Iterator[None]:
    """Have what other nodes push of a sweep arrive here within the block; the rest at its end.

    Raises:
        StorageError: at its end the object store cannot be reached. Before that it is logged and tried again.
    """
    if not storage.is_remote:
        yield
        return
    watcher, stopping = Watcher(storage, folder), threading.Event()

    def poll() -> None:
        while not stopping.wait(POLL_SECONDS):
            try:
                watcher.poll()
            except StorageError as error:
                log.warning("what workers have done could not be fetched and is tried again: %s", error)

    thread = threading.Thread(target=poll, name="watching", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        storage.pull(folder)
