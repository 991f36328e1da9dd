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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from filelock import FileLock, Timeout

from latent_sweep.errors import StorageError
from latent_sweep.storage.files import committing
from latent_sweep.storage.heartbeat import FOLDER, Heartbeat
from latent_sweep.storage.objects import Bucket, elapsed

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 60.0
"""A lease in an object store is taken over when its holder has not shown for so long that it lives."""
RENEWAL_SECONDS = 15.0
"""How often a process that holds leases shows that it lives."""
LOOK_SECONDS = 5.0
"""How often a process that waits for a lease looks whether it is free."""
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

    def held_until(self) -> float | None:
        """When it ends if nobody renews it, in Unix seconds; None where it ends with its holder's process."""


@contextmanager
def held(lease: Lease, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Have the lease within the block. `on_wait` is told who has it, where it has to be waited for."""
    if not lease.take():
        until = lease.held_until()
        ending = f", until {_moment(until)} unless that shows again that it lives" if until is not None else ""
        on_wait(lease.holder() + ending)
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
            StorageError: the lock's file cannot be written.
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
            StorageError: the lock's file is there and cannot be opened.
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
            raise StorageError(f"{self._path}: {error}; expected the file of a lock that can be read") from error
        return None

    def held_until(self) -> float | None:
        """Return None: it ends with its holder's process."""
        return None


class Presence:
    """That this process lives, as one object that it renews while it holds leases: what it tells of its sweep.

    One for each process and object store, for all leases that it holds there.

    Args:
        telling: gives what this process tells of the sweep whose folder has this name.
    """

    def __init__(self, bucket: Bucket, telling: Callable[[str], Heartbeat]):
        self._bucket, self._telling = bucket, telling
        self._folder: str | None = None
        self._holds = 0
        self._put_at, self._told_at = float("-inf"), float("-inf")
        self._lapsed = float("-inf")
        """When this process had last not shown that it lives for so long that leases may have been taken over."""
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    @property
    def key(self) -> str:
        """Of the object, in the folder of the sweep whose lease was taken first."""
        assert self._folder is not None, "hold it first"
        return f"{self._folder}/{FOLDER}/{self._telling(self._folder).name}"

    def hold(self, folder: str) -> None:
        """Show that this process lives from now on, for one more lease.

        Args:
            folder: name of the folder, directly below the storage, that the lease is about.

        Raises:
            StorageError: the object store cannot be reached or refuses.
        """
        with self._lock:
            if self._thread is None or (self._holds == 0 and folder != self._folder):
                self._folder = folder
                self._put()
                self._bucket.set_clock(self.key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="presence", daemon=True)
                self._thread.start()
            self._holds += 1

    def drop(self) -> None:
        """Need it for one lease less; where none is left after a while, it is not renewed any more."""
        with self._lock:
            self._holds -= 1

    def publish(self, folder: str, at_once: bool) -> None:
        """Put what this process tells of a sweep: at once, or when its presence is renewed anyway.

        Raises:
            StorageError: the object store cannot be reached or refuses.
        """
        with self._lock:
            if self._thread is not None and folder == self._folder:
                if at_once:
                    self._put()
            elif at_once or elapsed() - self._told_at >= RENEWAL_SECONDS:
                telling = self._telling(folder)
                self._bucket.put(f"{folder}/{FOLDER}/{telling.name}", telling.content())
                self._told_at = elapsed()

    def lapsed_since(self, moment: float) -> bool:
        """Whether leases may have been taken over since then, by the clock `elapsed`."""
        return self._lapsed >= moment or elapsed() - self._put_at > EXPIRY_SECONDS

    def _put(self) -> None:
        assert self._folder is not None
        if elapsed() - self._put_at > EXPIRY_SECONDS and self._thread is not None:
            self._lapsed = elapsed()
            log.warning("%s was not renewed for %.0f s: leases may be others' now", self.key, EXPIRY_SECONDS)
        began = elapsed()
        self._bucket.put(self.key, self._telling(self._folder).content())
        self._put_at = began

    def _renew(self) -> None:
        while True:
            time.sleep(RENEWAL_SECONDS)
            with self._lock:
                if self._holds == 0:
                    self._thread = None
                    return
                try:
                    self._put()
                except StorageError as error:
                    log.warning("%s could not be renewed and is tried again: %s", self.key, error)


class ObjectLease:
    """A lease as an object that names its holder, and that ends when its holder's presence has expired.

    pyarrow offers no conditional put, so this is no perfect lock: two that find it free write it and wait a moment, and
    the one whose write is there goes on; where a put takes longer than that moment, both go on. It expires when neither
    it nor its holder's presence was written for `EXPIRY_SECONDS` by the object store's clock: a holder that was
    suspended for longer wakes up beside its successor. All that costs is time: both learn the same snapshot (equal bits
    on a CPU; on a GPU the first one committed stays), and a journal is read again before each append. A holder on this
    host whose process is gone has it no longer.

    Args:
        folder: where this process shows that it lives, if it holds no lease yet.
    """

    def __init__(self, bucket: Bucket, key: str, presence: Presence, folder: str):
        self._bucket, self._key, self._presence, self._folder = bucket, key, presence, folder
        self._mine = _this_process() | {"owner": uuid.uuid4().hex}
        self._taken = 0.0

    def take(self, wait: bool = False) -> bool:
        """Take it if nobody has it, or wait until that is so; whether this process has it now.

        Raises:
            StorageError: the object store cannot be reached or refuses.
        """
        self._presence.hold(self._folder)
        taken = False
        try:
            while not (taken := self._is_free() and self._claim()) and wait:
                time.sleep(LOOK_SECONDS)
        finally:
            if not taken:
                self._presence.drop()
        return taken

    def release(self) -> None:
        """Give it up. One that cannot be given up now expires."""
        with suppress(StorageError):
            if not self._presence.lapsed_since(self._taken) or self._is_mine():
                self._bucket.delete(self._key)
        self._presence.drop()

    def holder(self) -> str:
        """Name who has it, for messages."""
        return _describe(self._read() or {})

    def held_since(self) -> float | None:
        """When somebody has taken it who still has it, or seems to by this machine's clock; None where nobody has it.

        The object store's own clock is not asked: that takes writing an object.

        Raises:
            StorageError: the object store cannot be reached or refuses.
        """
        holder = self._read()
        shown = self._shown(holder)
        if shown is None or time.time() - shown > EXPIRY_SECONDS or _is_gone(holder):
            return None
        return _since(holder)

    def held_until(self) -> float | None:
        """When it ends if its holder does not show again that it lives, in Unix seconds by this machine's clock."""
        shown = self._shown(self._read())
        return None if shown is None else shown + EXPIRY_SECONDS + time.time() - self._bucket.now()

    def _is_free(self) -> bool:
        holder = self._read()
        if holder is None or _is_gone(holder):
            return True
        shown = self._shown(holder)
        return shown is None or self._bucket.now() - shown > EXPIRY_SECONDS

    def _shown(self, holder: dict[str, Any] | None) -> float | None:
        """When its holder has last shown that it lives, by the object store's clock; None where nobody has it."""
        if holder is None:
            return None
        alive = holder.get("alive")
        keys = [self._key, *([alive] if isinstance(alive, str) else [])]
        return max((info.mtime_ns / 1e9 for key in keys if (info := self._bucket.info(key)) is not None), default=None)

    def _claim(self) -> bool:
        self._mine |= {"since": time.time(), "alive": self._presence.key}  # it may have waited for long
        self._taken = elapsed()
        self._bucket.put(self._key, json.dumps(self._mine).encode())
        time.sleep(SETTLING_SECONDS)
        return self._is_mine()

    def _is_mine(self) -> bool:
        return (self._read() or {}).get("owner") == self._mine["owner"]

    def _read(self) -> dict[str, Any] | None:
        """Read the lease's object, None where there is none; what is unreadable is nobody's we know, and expires."""
        content = self._bucket.get(self._key)
        if content is None:
            return None
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _this_process() -> dict[str, Any]:
    seen = _seen_from_here(os.getpid())
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()} | (seen._asdict() if seen else {})


class _Seen(NamedTuple):
    """What tells a process of this host from all others, those of another boot and of another container included."""

    started: int
    boot: str
    namespace: str


def _seen_from_here(pid: int) -> _Seen | None:
    """Return what Linux tells of a process; None where it has ended, or nothing is told here."""
    try:
        # the name in the second field may hold anything, parentheses too
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if state in (b"Z", b"X"):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return _Seen(int(fields[18]), boot, os.readlink("/proc/self/ns/pid"))
    except (OSError, ValueError, IndexError):
        return None


def _is_gone(holder: Mapping[str, Any] | None) -> bool:
    """Whether the holder was a process of this host, of this boot and seen from this container, that has ended."""
    here = _seen_from_here(os.getpid())
    if holder is None or here is None or not isinstance(pid := holder.get("pid"), int):
        return False
    if (holder.get("boot"), holder.get("namespace")) != (here.boot, here.namespace):
        return False
    now = _seen_from_here(pid)
    return now is None or now.started != holder.get("started")


def _since(holder: Any) -> float:
    """When a lease was taken; 0 where what says so cannot be read."""
    since = holder.get("since") if isinstance(holder, dict) else None
    return float(since) if isinstance(since, (int, float)) else 0.0


def _describe(holder: Any) -> str:
    try:
        return f"process {holder['pid']} on {holder['host']}, since {_moment(holder['since'])}"
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "another process"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
