"""Bytes of a sweep's folder that its driver keeps, so that a full disk leaves room to record what it has stopped."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

NAME = ".reserve"
"""In the sweep's folder; a name that begins with a dot is neither copied nor uploaded."""
BYTES = 1 << 16

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the operating system says where a disk, or what a user may have of it, is full."""


def write_reserve(sweep_folder: Path) -> None:
    """Write the bytes, as far as the disk has room for them."""
    with suppress(OSError):
        (sweep_folder / NAME).write_bytes(b"\1" * BYTES)


def free_reserve(sweep_folder: Path) -> bool:
    """Delete them; return whether there were some."""
    try:
        (sweep_folder / NAME).unlink()
    except OSError:
        return False
    return True


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk is full, or was raised because of one that does."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL
