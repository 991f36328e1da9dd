"""Objects below one prefix of an object store, through pyarrow, with errors that say what to do."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

from latent_sweep.errors import StorageError, clause
from latent_sweep.security import has_credentials, quoted

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

SCHEMES = ("s3", "gs", "gcs")
"""Object stores that pyarrow reaches by itself."""

RequestKind = Literal["put", "get", "head", "list", "delete"]
LIST_PAGE = 1000
"""Objects that one request lists."""
PART_BYTES = 10 * 2**20
"""An object from this size on is put in parts, with a request before them and one after."""

_REQUESTS: Counter[RequestKind] = Counter()
"""Requests of this process, by kind; several threads count them."""
_COUNTING = threading.Lock()
_CLOCKS: dict[str, float] = {}
"""What an object store's clock shows, less what `elapsed` does, by URI: no change of this node's clock counts."""


class ObjectFacts(NamedTuple):
    """The size and the time of an object."""

    size: int
    """In bytes."""
    mtime_ns: int
    """When it was put, by the object store's clock, in nanoseconds since 1970; S3 tells whole seconds."""


def elapsed() -> float:
    """Seconds since some moment: nobody sets this clock, and it goes on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def requests() -> Mapping[RequestKind, int]:
    """Return how many requests this process has sent to object stores, by kind."""
    with _COUNTING:
        return dict(_REQUESTS)


def _count(kind: RequestKind, number: int = 1) -> None:
    with _COUNTING:
        _REQUESTS[kind] += number


class Bucket:
    """The objects below a URI such as `s3://bucket/prefix`; keys are relative to it. A put is atomic.

    Every method raises `StorageError` when the object store cannot be reached or refuses.
    """

    def __init__(self, uri: str):
        self._uri = uri
        self._filesystem, self._root = _connect(uri)

    def put(self, key: str, content: bytes | bytearray) -> None:
        """Write an object, or replace it: one request."""
        parts = -(-len(content) // PART_BYTES)
        _count("put", parts + 2 if parts > 1 else 1)
        with self._talking(key), self._filesystem.open_output_stream(self._path(key)) as stream:
            stream.write(content)

    def get(self, key: str) -> bytes | None:
        """An object's content, or None where there is none: as many requests as `read`."""
        found = self._open(key, content=True)
        return None if found is None else found[0]

    def read(self, key: str) -> tuple[bytes, ObjectFacts] | None:
        """An object's content, size and time: two requests or, where there is none, one."""
        found = self._open(key, content=True)
        if found is None:
            return None
        content, facts = found
        return None if (facts := facts or self.info(key)) is None else (content, facts)

    def info(self, key: str) -> ObjectFacts | None:
        """An object's size and time, or None where there is none: one request.

        What pyarrow offers for it sends a second one where there is no object, to see whether there is a folder.
        """
        opened = self._open(key, content=False)
        if opened is None or opened[1] is not None:
            return opened and opened[1]
        with self._talking(key):
            (found,) = self._filesystem.get_file_info([self._path(key)])
        return ObjectFacts(found.size, self._whole(found.mtime_ns)) if found.is_file else None

    def list(self, prefix: str) -> dict[str, ObjectFacts]:
        """Size and time of every object below a prefix, by key: a request for each `LIST_PAGE` of them."""
        from pyarrow.fs import FileSelector

        with self._talking(prefix):
            selector = FileSelector(self._path(prefix), recursive=True, allow_not_found=True)
            found = self._filesystem.get_file_info(selector)
        _count("list", max(1, -(-len(found) // LIST_PAGE)))
        files = (info for info in found if info.is_file)
        return {info.path[len(self._root) + 1 :]: ObjectFacts(info.size, self._whole(info.mtime_ns)) for info in files}

    def delete(self, key: str) -> None:
        """Delete an object, if there is one: three requests, since pyarrow keeps its folder; or one."""
        _count("head")
        with self._talking(key):
            try:
                self._filesystem.delete_file(self._path(key))
            except FileNotFoundError:
                return
        _count("delete")
        _count("put")

    def now(self) -> float:
        """Seconds since 1970 by the object store's clock."""
        if self._uri not in _CLOCKS:
            key = f".preflight/clock-{uuid.uuid4().hex}"
            self.put(key, b"")
            self.set_clock(key)
            self.delete(key)
        return _CLOCKS.get(self._uri, time.time() - elapsed()) + elapsed()

    def set_clock(self, key: str) -> None:
        """Learn what the object store's clock shows from an object that was put just now."""
        if self._uri not in _CLOCKS and (info := self.info(key)) is not None:
            _CLOCKS[self._uri] = info.mtime_ns / 1e9 - elapsed()

    def _open(self, key: str, content: bool) -> tuple[bytes, ObjectFacts | None] | None:
        """An object's content, where it is wanted, and what opening it has told of it; None where there is none."""
        _count("head")
        with self._talking(key):
            try:
                with self._filesystem.open_input_stream(self._path(key)) as stream:
                    told = stream.metadata()
                    if content:
                        _count("get")
                    found = stream.read() if content else b""
            except FileNotFoundError:
                return None
        if "Last-Modified" not in told:
            return found, None
        return found, ObjectFacts(int(told["Content-Length"]), _nanoseconds(told["Last-Modified"].decode()))

    def _whole(self, nanoseconds: int) -> int:
        """The time of an object as `info` tells it: of some S3 servers, lists alone tell parts of seconds."""
        return nanoseconds - nanoseconds % 1_000_000_000 if self._filesystem.type_name == "s3" else nanoseconds

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    @contextmanager
    def _talking(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"object store, {self._path(key)}: {clause(error)}. Check that the bucket exists, that this node "
                f"({socket.gethostname()}) can reach it, and that the credentials here may list, read, write and "
                "delete. Then run the same command again."
            ) from error


@lru_cache(maxsize=64)
def _connect(uri: str) -> tuple[FileSystem, str]:
    """Open pyarrow's file system for a URI; return it and the path in it."""
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    try:
        try:
            filesystem, root = FileSystem.from_uri(_with_short_puts(uri))
        except ArrowInvalid:  # an option that this pyarrow does not know: of ours, or of the URI's
            filesystem, root = FileSystem.from_uri(uri)
    except (ArrowInvalid, OSError, ImportError) as error:
        raise StorageError(
            f"{uri}: pyarrow cannot open it: {clause(error)}. Check the URI and its options, and that the environment "
            "has the credentials."
        ) from error
    return filesystem, root.rstrip("/")


def _with_short_puts(uri: str) -> str:
    """Have S3 objects that are small be put by one request instead of three."""
    if urlsplit(uri).scheme != "s3" or "allow_delayed_open=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true"


def _nanoseconds(told: str) -> int:
    """Read the time of an object, such as 2026-01-31T12:00:00Z."""
    moment = datetime.strptime(told, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return int(moment.timestamp()) * 1_000_000_000


def uri_faults(uri: str) -> list[str]:
    """Describe what is wrong with the URI of an object store, as far as its text tells."""
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        return [f"found {quoted(uri, 200)}; expected a path, or a URI that begins with one of {known}"]
    if not parts.netloc:
        return [f"found {quoted(uri, 200)}; expected a bucket after {parts.scheme}://"]
    if has_credentials(uri):
        return [
            "the URI holds credentials, which would be written into every copy of the sweep file; leave them out and "
            "give them to each node as its provider does (environment variables, an instance role)"
        ]
    return []
