"""Where everything that is computed lies: a folder, or an object store (`s3://bucket/prefix`) behind a working folder.

All code works on local files. Below an object store's working folder, which is a cache, what is committed is pushed at
once, and what is missing or older here is fetched before it counts as missing. Shared are snapshots, checkpoints inside
tasks and the folders of sweeps; the caches in `NODE_LOCAL` are made again on each node.

A put to an object store is atomic, as a rename in a folder is; commits of several files keep their order on both.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from latent_sweep.errors import ConfigError, StorageError
from latent_sweep.settings import content_hash, local_path
from latent_sweep.storage.files import cache_folder, committing, modified, private_folder, read_file, stamp, write_file
from latent_sweep.storage.heartbeat import FOLDER, heartbeat_of
from latent_sweep.storage.leases import FileLease, Lease, ObjectLease, Presence
from latent_sweep.storage.objects import Bucket, ObjectFacts, uri_faults

NODE_LOCAL = frozenset({"tokens", "factors", "embeddings", "router", "predictions", "profiles"})
"""Caches directly below a storage that stay on their node: cheaper to make again than to fetch, with equal results."""
JOURNAL = "journal.jsonl"
"""Name of a trial's journal: the only shared file that grows instead of being replaced."""

PROBES = ".preflight"
"""Folder of what is written to find out what a node, or a clock, sees."""

DEFAULT_LOCATION = "runs"
"""Where a sweep's files lie if it does not say so. Nobody has chosen who may read this folder, so its owner alone may;
that of a folder with another name is the umask's and its administrator's."""
STORAGE_VARIABLE = "LATENT_SWEEP_STORAGE"
"""Environment variable with the storage of commands and sweep files that do not name one by an absolute path."""

CONNECTIONS = 16
"""Requests to an object store at the same time."""
_PRESENCES: dict[tuple[int, Path], Presence] = {}
"""Of this process, by process id and working folder."""


def json_bytes(content: Any) -> bytes:
    """Write `content` as indented JSON with sorted keys."""
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


# --- storages --------------------------------------------------------------------------------------------------------


class FileFacts(NamedTuple):
    """The size and the age of a file."""

    size: int
    """In bytes."""
    modified: float
    """When it was last written, in Unix seconds."""


class Storage:
    """A plain folder, which all nodes share or there is one node only: what is written is where it belongs.

    Args:
        folder: where the files are.
        place: what `run.storage` says, for messages; None is the folder's path.
    """

    is_remote = False
    """Whether `folder` is only a cache of what is elsewhere."""

    def __init__(self, folder: Path, location: str | None = None):
        self.folder, self.location = folder, location or str(folder)

    def create(self) -> None:
        """Make the folder where that is not left to the first file in it.

        Raises:
            StorageError: it cannot be made.
        """
        if self.location == DEFAULT_LOCATION:
            private_folder(self.folder)

    def write(self, path: Path, content: bytes | bytearray) -> None:
        """Commit a file: a reader sees the old one or the whole new one, here and where all nodes read it.

        Raises:
            StorageError: it cannot be written (a full or read-only disk, an object store that is away); the old file
                stays.
        """
        write_file(path, content)
        self.push(path)

    def write_once(self, path: Path, content: bytes | bytearray) -> None:
        """Do as `write` for a file that never changes: nobody will ask which of two is newer.

        Raises:
            StorageError: as `write`.
        """
        self.write(path, content)

    def write_together(self, files: Mapping[Path, bytes]) -> None:
        """Do as `write` for files below one folder, in no certain order.

        Raises:
            StorageError: as `write`; some may have been written.
        """
        for path, content in files.items():
            self.write(path, content)

    def push(self, path: Path) -> None:
        """Bring a file that was written here to where all nodes read it."""

    def holds(self, path: Path) -> bool:
        """Whether there is such a file, here or where all nodes read it."""
        return path.is_file()

    def sync(self, path: Path) -> bool:
        """Have the newer one of a file both here and where all nodes read it; return whether there is one."""
        return path.is_file()

    def share(self, path: Path) -> bool:
        """Do as `sync` for a file that never changes: it goes only where it is missing; return whether there is one."""
        return path.is_file()

    def sync_folder(self, folder: Path) -> None:
        """Do as `sync` for all files below a folder. Only for the one who may write there."""

    def pull(self, folder: Path, only: Container[str] | None = None) -> None:
        """Bring what is newer below a folder here.

        Args:
            only: names of the files that are wanted; None is all.
        """

    def files(self, folder: Path) -> dict[Path, FileFacts]:
        """Return all files below a folder, here and where all nodes read it."""
        found = {}
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # removed while we look
                facts = path.stat()
                if stat.S_ISREG(facts.st_mode):
                    found[path] = FileFacts(facts.st_size, facts.st_mtime)
        return found

    def names(self, folder: Path) -> set[str]:
        """Return the names of the files in a folder itself, as `files` finds them, without a look at each."""
        try:
            with os.scandir(folder) as entries:
                return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
        except FileNotFoundError:
            return set()

    def remove(self, path: Path) -> None:
        """Remove a file here and where all nodes read it; it need not be there."""
        path.unlink(missing_ok=True)

    def now(self) -> float:
        """Seconds since 1970 by the clock that gives files their times. An object store's is asked by writing to it.

        Raises:
            StorageError: the object store cannot be reached or refuses.
        """
        return time.time()

    def pull_heartbeats(self, sweep_folder: Path) -> None:
        """Bring here what other processes tell of a sweep (`telling.py`)."""

    def pull_journal(self, path: Path) -> None:
        """Bring a journal here, unless the one here continues it. For those who only read it."""

    def lease(self, path: Path) -> Lease:
        """Return the lease of this name; it guards against processes on all nodes."""
        return FileLease(path)

    def publish_heartbeat(self, sweep_folder: Path, at_once: bool) -> None:
        """Write what this process tells of a sweep.

        Args:
            at_once: where files have to be pushed, whether this one is before its time.

        Raises:
            StorageError: as `write`.
        """
        telling = heartbeat_of(sweep_folder)
        write_file(sweep_folder / FOLDER / telling.name, telling.content(), durable=False)


class ObjectStorage(Storage):
    """An object store behind a working folder on each node.

    Whether a file is newer here or there is told by its time: once pushed or fetched it has the object's time, once
    written again a later one. Of two journals, the one that continues the other is newer.

    Every method that talks to the object store raises `StorageError` when it cannot be reached or refuses.
    """

    is_remote = True

    def __init__(self, uri: str):
        super().__init__(_working_folder(uri, cache_folder()), uri)
        self._bucket = Bucket(uri)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the working folder: another node has another one."""
        return ObjectStorage, (self.location,)

    def write_once(self, path: Path, content: bytes | bytearray) -> None:
        """Do as `write` for a file that never changes: nobody will ask which of two is newer."""
        write_file(path, content)
        if self._shared(path):
            self._bucket.put(self._key(path), content)

    def write_together(self, files: Mapping[Path, bytes]) -> None:
        """Do as `write` for files below one folder, in no certain order."""
        for path, content in files.items():
            write_file(path, content)
        shared = [path for path in files if self._shared(path)]
        if len(shared) < 2:
            for path in shared:
                self.push(path)
            return
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(self._bucket.put, map(self._key, shared), map(files.__getitem__, shared)))
        there = self._list(Path(os.path.commonpath([path.parent for path in shared])))
        for path in shared:
            if path in there:
                stamp(path, there[path].mtime_ns)

    def push(self, path: Path) -> None:
        """Put a file that was written here; nothing where it is not shared."""
        if self._shared(path):
            self._bucket.put(self._key(path), path.read_bytes())
            if (info := self._bucket.info(self._key(path))) is not None:
                stamp(path, info.mtime_ns)

    def holds(self, path: Path) -> bool:
        """Whether there is such a file, here or in the object store."""
        return path.is_file() or (self._shared(path) and self._bucket.info(self._key(path)) is not None)

    def sync(self, path: Path) -> bool:
        """Have the newer one of a file both here and in the object store; return whether there is one."""
        if self._shared(path):
            self._bring(path, self._bucket.info(self._key(path)))
        return path.is_file()

    def share(self, path: Path) -> bool:
        """Do as `sync` for a file that never changes: it goes only where it is missing; return whether there is one."""
        if self._shared(path):
            info = self._bucket.info(self._key(path))
            if info is None or not path.is_file():
                self._bring(path, info)
        return path.is_file()

    def sync_folder(self, folder: Path) -> None:
        """Do as `sync` for all files below a folder. Only for the one who may write there."""
        there = self._list(folder)
        for path in {*there, *(path for path in folder.rglob("*") if path.is_file() and self._shared(path))}:
            self._bring(path, there.get(path))

    def pull(self, folder: Path, only: Container[str] | None = None) -> None:
        """Bring what is newer below a folder here.

        Events of a journal speak of files that were pushed before them: journals are read first and put in place last.

        Args:
            only: names of the files that are wanted; None is all.
        """
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            journals = self._newer(folder, lambda path: path.name == JOURNAL)
            events = list(pool.map(self._get, journals))
            files = self._newer(folder, lambda path: path.name != JOURNAL and (only is None or path.name in only))
            list(pool.map(self._fetch, files, files.values()))
        for (path, info), content in zip(journals.items(), events, strict=True):
            self._take_journal(path, content, info)

    def files(self, folder: Path) -> dict[Path, FileFacts]:
        """Return all files below a folder, here and in the object store."""
        there = {path: FileFacts(info.size, info.mtime_ns / 1e9) for path, info in self._list(folder).items()}
        return super().files(folder) | there

    def names(self, folder: Path) -> set[str]:
        """Return the names of the files in a folder itself, here and in the object store."""
        return super().names(folder) | {path.name for path in self._list(folder) if path.parent == folder}

    def remove(self, path: Path) -> None:
        """Remove a file here and in the object store; it need not be there."""
        if self._shared(path):
            self._bucket.delete(self._key(path))
        path.unlink(missing_ok=True)

    def lease(self, path: Path) -> Lease:
        """Return the lease of this name; it guards against processes on all nodes."""
        first, *others = path.relative_to(self.folder).parts
        about = first if len(others) > 1 else PROBES  # of a sweep, or of what all sweeps share
        return ObjectLease(self._bucket, self._key(path), self._presence, about)

    def now(self) -> float:
        """Seconds since 1970 by the object store's clock."""
        return self._bucket.now()

    def publish_heartbeat(self, sweep_folder: Path, at_once: bool) -> None:
        """Write what this process tells of a sweep; it is put at once, or with the next sign that the process lives."""
        super().publish_heartbeat(sweep_folder, at_once)
        self._presence.publish(self._key(sweep_folder), at_once)

    def pull_heartbeats(self, sweep_folder: Path) -> None:
        """Bring here what other processes tell of a sweep, as far as it is newer."""
        mine = heartbeat_of(sweep_folder).name
        for path in self._newer(sweep_folder / FOLDER, lambda path: path.name != mine):
            if (found := self._bucket.read(self._key(path))) is not None:
                write_file(path, found[0], found[1].mtime_ns)

    def pull_journal(self, path: Path) -> None:
        """Bring a journal here, unless the one here continues it. For those who only read it."""
        if (found := self._bucket.read(self._key(path))) is not None:
            self._take_journal(path, *found)

    @property
    def _presence(self) -> Presence:
        """What shows other nodes that this process lives, one for all storages of this working folder."""
        mine = os.getpid(), self.folder
        if mine not in _PRESENCES:
            _PRESENCES[mine] = Presence(self._bucket, lambda folder: heartbeat_of(self.folder / folder))
        return _PRESENCES[mine]

    def _bring(self, path: Path, info: ObjectFacts | None) -> None:
        """Make this file the newer one of both, here and there."""
        if info is None:
            if path.is_file():
                self.push(path)
        elif path.name == JOURNAL:
            self._bring_journal(path, info)
        elif _behind(path, info):
            self._fetch(path, info)
        elif modified(path) > info.mtime_ns:
            self.push(path)

    def _bring_journal(self, path: Path, info: ObjectFacts) -> None:
        if path.is_file() and (path.stat().st_size, modified(path)) == (info.size, info.mtime_ns):
            return
        self._take_journal(path, self._get(path), info)
        if path.stat().st_size > info.size:
            self.push(path)  # written here, and the node or the network failed before it was pushed

    def _take_journal(self, path: Path, there: bytes, info: ObjectFacts) -> None:
        """Put a journal in place, unless the one here is the same or continues it."""
        if not path.is_file():
            write_file(path, there, info.mtime_ns)
            return
        with committing(path), path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # a worker on this node may append to it
            here = read_file(path)
            if here.startswith(there) and here != there:
                return
            if there.startswith(here):
                file.write(there[len(here) :])
                file.flush()
                os.fsync(file.fileno())
                stamp(path, info.mtime_ns)
            else:
                write_file(path, there, info.mtime_ns)

    def _fetch(self, path: Path, info: ObjectFacts) -> None:
        write_file(path, self._get(path), info.mtime_ns)

    def _get(self, path: Path) -> bytes:
        content = self._bucket.get(self._key(path))
        if content is None:
            raise StorageError(f"object store, {self._key(path)}: removed by somebody else while it was being fetched")
        return content

    def _newer(self, folder: Path, wanted: Callable[[Path], bool]) -> dict[Path, ObjectFacts]:
        """The objects of this kind below a folder that are newer than the files here."""
        return {path: info for path, info in self._list(folder).items() if wanted(path) and _behind(path, info)}

    def _list(self, folder: Path) -> dict[Path, ObjectFacts]:
        """List what the object store has below a folder, by its path here."""
        files = {self.folder / key: info for key, info in self._bucket.list(self._key(folder)).items()}
        return {path: info for path, info in files.items() if self._shared(path)}

    def _shared(self, path: Path) -> bool:
        first = path.relative_to(self.folder).parts[0]
        return first not in NODE_LOCAL and path.suffix not in (".lock", ".damaged") and not path.name.startswith(".")

    def _key(self, path: Path) -> str:
        key = path.relative_to(self.folder).as_posix()
        return "" if key == "." else key


def open_storage(place: str) -> Storage:
    """The storage that `run.storage` names: a path, or the URI of an object store.

    Raises:
        ConfigError: no folder can have this path.
        StorageError: pyarrow cannot open such a URI.
    """
    if "://" not in place:
        return Storage(local_path(place).resolve(), place if place == DEFAULT_LOCATION else None)
    return ObjectStorage(place)


def storage_in(folder: Path) -> Storage:
    """The storage whose files are in this folder on this node: an object store's, where it is its working folder."""
    folder = folder.resolve()
    if folder.parent != _working_folders(cache_folder()):
        return Storage(folder)
    return ObjectStorage(read_file(folder / "uri").decode())


def location_faults(place: str) -> list[str]:
    """Describe what is wrong with a value of `run.storage`, as far as the text tells."""
    if "://" in place:
        return uri_faults(place)
    try:
        local_path(place)
    except ConfigError as error:
        return [str(error)]
    return []


def default_location() -> str:
    """Return the storage of a command that names none: that of `LATENT_SWEEP_STORAGE`, else `runs`.

    Raises:
        ConfigError: the variable's value can name no storage.
    """
    place = os.environ.get(STORAGE_VARIABLE) or DEFAULT_LOCATION
    if faults := location_faults(place):
        raise ConfigError(f"{STORAGE_VARIABLE}: {'; '.join(faults)}")
    return place


def in_job_package(path: Path) -> bool:
    """Return whether a path is inside Ray's copy of a job's working directory, which later jobs do not see."""
    return ("runtime_resources", "working_dir_files") in pairwise(path.resolve().parts)


def _working_folders(cache: Path) -> Path:
    return cache.resolve() / "storage"


@lru_cache(maxsize=64)
def _working_folder(uri: str, cache: Path) -> Path:
    """The working folder of an object store on this node; the file `uri` in it names the object store."""
    private_folder(_working_folders(cache))  # it holds results, and nobody has chosen who may read them
    folder = _working_folders(cache) / content_hash(uri)
    write_file(folder / "uri", uri.encode())
    return folder


def _behind(path: Path, info: ObjectFacts) -> bool:
    """Whether the object is newer than the file. Times of objects are whole seconds, so sizes are compared too."""
    here = modified(path)
    return info.mtime_ns > here or (info.mtime_ns == here and info.size != path.stat().st_size)


# --- nodes ------------------------------------------------------------------------------------------------------------


@contextmanager
def question(storage: Storage) -> Iterator[str]:
    """Write a file that shows whether a node sees this storage; its name is given, for `sees` and `has_answer`."""
    name = uuid.uuid4().hex
    folder = storage.folder / PROBES / name
    storage.write(folder / "question", b"does every node see this?\n")
    try:
        yield name
    finally:
        for path in [folder / "question", *folder.glob("*")]:
            storage.remove(path)
        shutil.rmtree(folder, ignore_errors=True)


def sees(storage: Storage, name: str, node: str | None = None) -> bool:
    """Whether the question is there, seen from any node. Given the node's id, leave an answer for the one who asked."""
    folder = storage.folder / PROBES / name
    if not storage.sync(folder / "question"):
        return False
    if node is not None:
        storage.write(folder / node, b"yes\n")
    return True


def has_answer(storage: Storage, name: str, node: str) -> bool:
    """Whether the answer of a node is there, looked for where the question was asked."""
    return storage.sync(storage.folder / PROBES / name / node)


def unseen_message(storage: Storage, nodes: list[str]) -> str:
    """Advise what to do about nodes that do not see the storage."""
    found = "these nodes do not see" if len(nodes) > 1 else "this node does not see"
    return (
        f"run.storage: {storage.location}: {found} what {socket.gethostname()} writes there: {', '.join(nodes)}. "
        "All nodes need the same storage: a folder of a file system that they share, at the same path, or an object "
        "store, e.g. --set run.storage=s3://bucket/prefix"
    )
