"""Leases: the right to do what only one process at a time may do, on one node or on many."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from latent_sweep.errors import StoreError
from latent_sweep.store.files import committing
from latent_sweep.store.objects import Bucket

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 60.0
"""A lease in an object store whose holder has not renewed it for so long is taken over."""
RENEWAL_SECONDS = 5.0
"""How often its holder renews it."""
SETTLING_SECONDS = 0.5
"""Between writing a lease and reading it again: of two that write it at once, the later write decides."""


class Lease(Protocol):
    """The right to do something that only one process at a time may do."""

    def take(self, wait: bool = False) -> bool:
        """Take it if nobody has it, or wait until that is so; whether this process has it now."""

    def release(self) -> None:
        """Give it up."""

    def holder(self) -> str:
        """Name who has it, for messages: host, process id and since when."""

    def held_since(self) -> float | None:
        """When somebody has taken it who still has it, in Unix seconds; None where nobody has it. Changes nothing."""


@contextmanager
def held(lease: Lease, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Have the lease within the block. `on_wait` is told who has it, where it has to be waited for."""
    if not lease.take():
        on_wait(lease.holder())
        lease.take(wait=True)
    try:
        yield
    finally:
        lease.release()


class FileLease:
    """A lease as a file lock: the operating system ends it with its process, however that ends.

    The file stays when the lease is released: removing it would split those who wait from those who come.
    """

    def __init__(self, path: Path):
        self._path, self._lock = path, FileLock(str(path))

    def take(self, wait: bool = False) -> bool:
        """Take it if nobody has it, or wait until that is so; whether this process has it now.

        Raises:
            StoreError: the lock's file cannot be written.
        """
        with committing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=-1 if wait else 0)
            except Timeout:
                return False
            with suppress(OSError):  # only messages read it
                self._path.write_text(json.dumps(_this_process()), encoding="utf-8")
        return True

    def release(self) -> None:
        """Give it up."""
        self._lock.release()

    def holder(self) -> str:
        """Name who has it, for messages."""
        try:
            return _describe(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError):
            return "another process"

    def held_since(self) -> float | None:
        """When somebody has taken it who still has it; None where nobody has it.

        Raises:
            StoreError: the lock's file is there and cannot be opened.
        """
        try:
            with self._path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    with suppress(ValueError, RecursionError, OSError):
                        return _since(json.loads(file.read()))
                    return 0.0
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self._path}: {error}; expected the file of a lock that can be read") from error
        return None


class ObjectLease:
    """A lease as an object that its holder renews, and that expires when the holder does so no longer.

    pyarrow offers no conditional put, so this is no perfect lock: two that find it free write it and wait a moment, and
    the one whose write is there goes on; where a put takes longer than that moment, both go on. It expires when it was
    not written for `EXPIRY_SECONDS` by the object store's clock: a holder that was suspended for longer wakes up
    beside its successor. All that costs is time: both learn the same snapshot (equal bits on a CPU; on a GPU
    the first one committed stays), and a journal is read again before each append.
    """

    def __init__(self, bucket: Bucket, key: str):
        self._bucket, self._key = bucket, key
        self._mine = _this_process() | {"owner": uuid.uuid4().hex}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, wait: bool = False) -> bool:
        """Take it if nobody has it, or wait until that is so; whether this process has it now.

        Raises:
            StoreError: the object store cannot be reached or refuses.
        """
        while not (self._is_free() and self._claim()):
            if not wait:
                return False
            time.sleep(RENEWAL_SECONDS)
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        """Give it up. One that cannot be given up now expires."""
        assert self._thread is not None, "take it first"
        self._stopping.set()
        self._thread.join()
        with suppress(StoreError):
            if self._is_mine():
                self._bucket.delete(self._key)

    def holder(self) -> str:
        """Name who has it, for messages."""
        return _describe(self._read() or {})

    def held_since(self) -> float | None:
        """When somebody has taken it who still has it, or seems to by this machine's clock; None where nobody has it.

        The object store's own clock is not asked: that takes writing an object.

        Raises:
            StoreError: the object store cannot be reached or refuses.
        """
        info = self._bucket.info(self._key)
        if info is None or time.time() - info.mtime_ns / 1e9 > EXPIRY_SECONDS:
            return None
        return _since(self._read() or {})

    def _is_free(self) -> bool:
        info = self._bucket.info(self._key)
        return info is None or self._bucket.now() - info.mtime_ns / 1e9 > EXPIRY_SECONDS

    def _claim(self) -> bool:
        self._mine["since"] = time.time()  # it may have waited for long
        self._put()
        time.sleep(SETTLING_SECONDS)
        return self._is_mine()

    def _renew(self) -> None:
        while not self._stopping.wait(RENEWAL_SECONDS):
            try:
                if not self._is_mine():
                    log.warning("%s was taken over: it was not renewed for %.0f s", self._key, EXPIRY_SECONDS)
                    return
                self._put()
            except StoreError as error:
                log.warning("%s could not be renewed and is tried again: %s", self._key, error)

    def _is_mine(self) -> bool:
        return (self._read() or {}).get("owner") == self._mine["owner"]

    def _put(self) -> None:
        self._bucket.put(self._key, json.dumps(self._mine).encode())

    def _read(self) -> dict[str, Any] | None:
        """Read the lease's object; something unreadable belongs to nobody that we know, and expires."""
        try:
            found = json.loads(self._bucket.get(self._key) or b"null")
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}


def _since(holder: Any) -> float:
    """When a lease was taken; 0 where what says so cannot be read."""
    since = holder.get("since") if isinstance(holder, dict) else None
    return float(since) if isinstance(since, (int, float)) else 0.0


def _describe(holder: Any) -> str:
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"process {holder['pid']} on {holder['host']}, since {since}"
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "another process"
