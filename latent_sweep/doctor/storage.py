"""The storage: written, read back, listed and deleted through what sweeps write with, and the folder of caches."""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from latent_sweep.doctor.findings import Finding, fault, ok
from latent_sweep.storage.files import cache_folder, read_file, write_file
from latent_sweep.storage.storage import Storage

CONTENT = b"latent-sweep doctor wrote this and removes it\n" * 1024
"""Some 45 KB: about a trial's files, and more than a network keeps back."""


def check_storage(storage: Storage) -> Iterator[Finding]:
    """Write a file, find it in a list, read it, remove it; a folder that was not there is gone again afterwards."""
    made = missing_folders(storage.folder)
    folder = storage.folder / f".doctor-{uuid.uuid4().hex}"
    began = time.monotonic()
    try:
        if fault_text := _round_trip(storage, folder / "probe"):
            advice = "have all nodes see one folder that keeps what is written, or use an object store"
            yield fault("storage", f"{storage.place}: {fault_text}", "what was written", advice)
        else:
            took = time.monotonic() - began
            yield ok(
                "storage", f"{storage.place}: {len(CONTENT):,} bytes written, listed, read, deleted in {took:.2f} s"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        remove_empty(made)


def _round_trip(storage: Storage, probe: Path) -> str:
    """Send a file there and back; returns what is wrong, or nothing."""
    try:
        storage.write(probe, CONTENT)
        if storage.is_remote:
            probe.unlink()  # what is read now comes from the object store
        storage.pull(probe.parent)
        if [path.name for path in probe.parent.iterdir()] != [probe.name]:
            return "a file that was just written is in no list"
        if read_file(probe) != CONTENT:
            return "a file that was just written reads otherwise"
    finally:
        if storage.holds(probe):
            storage.remove(probe)
    return "a file that was just removed is still there" if storage.holds(probe) else ""


def check_caches() -> Iterator[Finding]:
    """Write to the folder where backbones are kept."""
    folder = cache_folder()
    made, probe = missing_folders(folder), folder / f".doctor-{uuid.uuid4().hex}"
    try:
        write_file(probe, CONTENT)
        yield ok("caches", f"{folder} can be written")
    finally:
        probe.unlink(missing_ok=True)
        remove_empty(made)


def hostname() -> str:
    """Return this machine's name, as messages call it."""
    return socket.gethostname()


def missing_folders(folder: Path) -> list[Path]:
    """Return the folders that have to be made for this one, itself first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(made: list[Path]) -> None:
    """Remove folders that were made for a check, as far as nothing else is in them."""
    for path in made:
        try:
            os.rmdir(path)
        except OSError:  # somebody else has something there, or nothing was made
            return
