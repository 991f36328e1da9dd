"""Objects below one prefix of an object store, through pyarrow, with errors that say what to do."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from latent_sweep.errors import StoreError
from latent_sweep.security import has_credentials, quoted

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

SCHEMES = ("s3", "gs", "gcs")
"""Object stores that pyarrow reaches by itself."""
_AHEAD: dict[str, float] = {}
"""Seconds that an object store's clock is ahead of this node's, by URI."""


class Bucket:
    """The objects below a URI such as `s3://bucket/prefix`; keys are relative to it. A put is atomic.

    Every method raises `StoreError` when the object store cannot be reached or refuses.
    """

    def __init__(self, uri: str):
        self._uri = uri
        self._filesystem, self._root = _connect(uri)

    def put(self, key: str, content: bytes) -> None:
        """Write an object, or replace it."""
        with self._talking(key), self._filesystem.open_output_stream(self._path(key)) as stream:
            stream.write(content)

    def get(self, key: str) -> bytes | None:
        """An object's content, or None where there is none."""
        with self._talking(key):
            try:
                with self._filesystem.open_input_file(self._path(key)) as stream:
                    return stream.read()
            except FileNotFoundError:
                return None

    def info(self, key: str) -> FileInfo | None:
        """An object's size and time, or None where there is none."""
        with self._talking(key):
            (found,) = self._filesystem.get_file_info([self._path(key)])
        return found if found.is_file else None

    def list(self, prefix: str) -> dict[str, FileInfo]:
        """Size and time of every object below a prefix, by key."""
        from pyarrow.fs import FileSelector

        with self._talking(prefix):
            selector = FileSelector(self._path(prefix), recursive=True, allow_not_found=True)
            found = self._filesystem.get_file_info(selector)
        return {info.path[len(self._root) + 1 :]: info for info in found if info.is_file}

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""
        with self._talking(key), suppress(FileNotFoundError):
            self._filesystem.delete_file(self._path(key))

    def now(self) -> float:
        """Seconds since 1970 by the object store's clock."""
        if self._uri not in _AHEAD:
            key = f".preflight/clock-{uuid.uuid4().hex}"
            began = time.time()
            self.put(key, b"")
            info = self.info(key)
            self.delete(key)
            _AHEAD[self._uri] = info.mtime_ns / 1e9 - began if info is not None else 0.0
        return time.time() + _AHEAD[self._uri]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    @contextmanager
    def _talking(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"object store, {self._path(key)}: {error}. Check that the bucket exists, that this node "
                f"({socket.gethostname()}) can reach it, and that the credentials here may list, read, write and "
                "delete. Then run the same command again: what was committed before is whole, and it resumes there."
            ) from error


@lru_cache(maxsize=64)
def _connect(uri: str) -> tuple[FileSystem, str]:
    """Open pyarrow's file system for a URI; return it and the path in it."""
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem

    try:
        filesystem, root = FileSystem.from_uri(uri)
    except (ArrowInvalid, OSError, ImportError) as error:
        raise StoreError(
            f"{uri}: pyarrow cannot open it: {error}. Check the URI and its options, and that the environment has the "
            "credentials."
        ) from error
    return filesystem, root.rstrip("/")


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
