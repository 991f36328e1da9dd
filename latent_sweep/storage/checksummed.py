"""Safetensors and JSON files that contain their own SHA-256. Nothing is unpickled; every read checks the digest."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_sweep.storage.files import committing, write_file

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)

_KEY = b'"sha256":"'
NO_CHECKSUM = {"sha256": "0" * 64}
QUARANTINED = ".corrupt"
"""Suffix of a quarantined file."""


def write_checksummed(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    import numpy as np
    from safetensors.numpy import save

    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write_file(path, checksummed(save(in_order, metadata=NO_CHECKSUM)))


def write_checksummed_json(path: Path, content: Any, indent: int | None = None) -> None:
    write_file(path, checksummed_json(content, indent))


def checksummed_json(content: Any, indent: int | None = None) -> bytearray:
    text = json.dumps(NO_CHECKSUM | {"content": content}, indent=indent, separators=(",", ":"), allow_nan=False)
    return checksummed(text.encode())


def read_checksummed_json(path: Path) -> Any:
    return json.loads(path.read_bytes())["content"] if verified(path) else None


def checksummed(content: bytes) -> bytearray:
    """Replace the placeholder in `content` with the SHA-256 of all other bytes."""
    file = bytearray(content)
    start = file.index(_KEY) + len(_KEY)
    file[start : start + 64] = _digest_without(file, start)
    return file


def verified(path: Path) -> bool:
    if not path.exists():
        return False
    if has_valid_checksum(path):
        return True
    quarantine(path, "does not match its digest")
    return False


def quarantine(path: Path, fault: str) -> None:
    """Rename a corrupt file to `*.corrupt` and log the fault."""
    target = path.with_suffix(QUARANTINED)
    log.warning("%s %s; it is quarantined as %s and made again", path, fault, target.name)
    with committing(target), suppress(FileNotFoundError):  # another process was faster
        os.replace(path, target)


def has_valid_checksum(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return _matches(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _matches(path: Path, size: int, modified_ns: int) -> bool:
    """Compare once for each size and time of modification."""
    if size == 0 or not path.is_file():
        return False  # mmap rejects an empty file
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_KEY) + len(_KEY)
        return content[start : start + 64] == _digest_without(content, start)


def _digest_without(content: bytearray | mmap.mmap, start: int) -> bytes:
    digest = hashlib.sha256(content[:start])
    with memoryview(content) as view, view[start + 64 :] as rest:
        digest.update(rest)
    return digest.hexdigest().encode()
