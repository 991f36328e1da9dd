"""Sealed files: safetensors or JSON with the sha256 of themselves. Nothing is unpickled; every read checks the digest.

What does not check is set aside, reported and made again.
"""

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

_SEAL = b'"sha256":"'
"""How a sealed file introduces its digest; quotes inside JSON's texts are escaped, so nothing else looks so."""
NO_CHECKSUM = {"sha256": "0" * 64}
QUARANTINED = ".damaged"
"""Suffix of a sealed file that was set aside."""


def write_checksummed(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write arrays as one safetensors file, atomically, sealed in its metadata: a cache of this node."""
    import numpy as np
    from safetensors.numpy import save

    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write_file(path, checksummed(save(in_order, metadata=NO_CHECKSUM)))


def write_checksummed_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON value as one sealed file, atomically: a cache of this node."""
    write_file(path, checksummed_json(content, indent))


def checksummed_json(content: Any, indent: int | None = None) -> bytearray:
    """Write a JSON value as the bytes of a sealed file; indented where people read it."""
    text = json.dumps(NO_CHECKSUM | {"content": content}, indent=indent, separators=(",", ":"), allow_nan=False)
    return checksummed(text.encode())


def read_checksummed_json(path: Path) -> Any:
    """Read what `write_checksummed_json` has written, or None where there is none that is `intact`."""
    return json.loads(path.read_bytes())["content"] if verified(path) else None


def checksummed(content: bytes) -> bytearray:
    """Put the sha256 of all bytes of `content` but its own 64 in the place that is left for it."""
    sealed = bytearray(content)
    start = sealed.index(_SEAL) + len(_SEAL)
    sealed[start : start + 64] = _digest_without(sealed, start)
    return sealed


def verified(path: Path) -> bool:
    """Whether a sealed file is there and checks against its digest, which is computed once a process.

    One that does not check is renamed to `*.damaged` and reported, and counts as not there.
    """
    if not path.exists():
        return False
    if has_valid_checksum(path):
        return True
    quarantine(path, "does not check against its digest")
    return False


def quarantine(path: Path, found: str) -> None:
    """Rename a damaged file to `*.damaged` and say what was found; it need not be there any more."""
    damaged = path.with_suffix(QUARANTINED)
    log.warning("%s %s; it is set aside as %s and made again", path, found, damaged.name)
    with committing(damaged), suppress(FileNotFoundError):  # another process has done so
        os.replace(path, damaged)


def has_valid_checksum(path: Path) -> bool:
    """Whether a sealed file is there and checks against its digest; changes nothing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return _checks(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _checks(path: Path, size: int, modified_ns: int) -> bool:
    """Whether the file is sealed and whole; size and time tell a file that was written again from the one checked."""
    if size == 0 or not path.is_file():
        return False  # nothing to map
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_SEAL) + len(_SEAL)
        return content[start : start + 64] == _digest_without(content, start)


def _digest_without(content: bytearray | mmap.mmap, start: int) -> bytes:
    """Compute the sha256 of all bytes but the 64 from `start`, in hexadecimal."""
    digest = hashlib.sha256(content[:start])
    with memoryview(content) as view, view[start + 64 :] as rest:
        digest.update(rest)
    return digest.hexdigest().encode()
