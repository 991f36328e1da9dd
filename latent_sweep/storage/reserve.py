"""A few kilobytes in a sweep's folder that are freed on a full disk, so that journals can record why trials stopped."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

NAME = ".reserve"
"""File in the sweep's folder; files with a leading dot are neither copied nor uploaded."""
BYTES = 1 << 16

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exhausted quota."""


def write_reserve(sweep_folder: Path) -> None:
    with suppress(OSError):
        (sweep_folder / NAME).write_bytes(b"\1" * BYTES)


def free_reserve(sweep_folder: Path) -> bool:
    try:
        (sweep_folder / NAME).unlink()
    except OSError:
        return False
    return True


def is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in FULL
