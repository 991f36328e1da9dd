"""Folders of arrow files that are written once, with the digests of their files: caches of tokens and of hub data."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from latent_sweep.settings import canonical_json

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DIGESTS = "sha256.json"


def write_folder(dataset: Dataset, target: Path) -> None:
    """Write a data set as a folder with the digests of its files; the rename at the end commits it."""
    partial = target.with_suffix(".partial")
    remove(partial)
    with no_progress_bars():
        dataset.save_to_disk(str(partial))
    digests = {path.name: file_digest(path) for path in sorted(partial.iterdir())}
    (partial / DIGESTS).write_text(canonical_json(digests), encoding="utf-8")
    partial.rename(target)


def checks(target: Path) -> bool:
    """Whether a folder is there, complete and unchanged; changes nothing."""
    try:
        digests = json.loads((target / DIGESTS).read_text(encoding="utf-8"))
        return bool(digests) and {name: file_digest(target / name) for name in digests} == digests
    except (OSError, ValueError, TypeError):
        return False


def is_intact(target: Path, what: str) -> bool:
    """Whether a folder `checks`; a damaged one is reported and set aside.

    Args:
        what: what the message calls it.
    """
    if checks(target):
        return True
    if not target.exists():
        return False
    damaged = target.with_suffix(".damaged")
    logger.warning("The %s %s is damaged; it is set aside as %s and built again.", what, target, damaged.name)
    remove(damaged)
    target.rename(damaged)
    return False


def file_digest(path: Path) -> str:
    """SHA-256 of a file of any size.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Keep other processes from making the same folder within the block."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        yield


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Draw no bars within the block: they have no place in a job's log."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
