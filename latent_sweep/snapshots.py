"""Snapshots: what learning one task leaves behind. Written once, named by lineage, committed by rename, never changed.

Safetensors and JSON only: nothing is unpickled. Every read checks a digest; what does not check is set aside, reported
and made again. Caches (factors, embeddings, router records) are single files that carry the digest of themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """What learning one task left behind."""

    lineage: str
    """Hash chain that names it: settings, data, seed, code version, and the parent where history is read."""
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    """JSON values that repeat with the training: task, steps, losses. Nothing about a machine, a clock or an order."""


def write_atomically(path: Path, content: bytes | bytearray) -> None:
    """Write under a temporary name, flush to disk, rename: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # nodes may share a folder and a process id
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """`content` as indented JSON with sorted keys, written atomically."""
    write_atomically(path, (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


_SEAL = b'"sha256":"'
"""How the header of a sealed file introduces the digest; quotes inside names are escaped, so nothing else looks so."""


def write_sealed(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write arrays as one safetensors file, atomically; its metadata holds the sha256 of all bytes but its own 64."""
    import numpy as np
    from safetensors.numpy import save

    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    content = bytearray(save(in_order, metadata={"sha256": "0" * 64}))
    start = content.index(_SEAL) + len(_SEAL)
    content[start : start + 64] = _digest_without(content, start)
    write_atomically(path, content)


def intact(path: Path) -> bool:
    """Whether a sealed file is there and checks against its digest, which is computed once a process.

    One that does not check is renamed to `*.damaged` and reported, and counts as not there.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if _checks(path, status.st_size, status.st_mtime_ns):
        return True
    damaged = path.with_suffix(".damaged")
    log.warning("%s does not check against its digest; it is set aside as %s and made again", path, damaged.name)
    with suppress(FileNotFoundError):  # another process has done so
        os.replace(path, damaged)
    return False


@lru_cache(maxsize=4096)
def _checks(path: Path, size: int, modified_ns: int) -> bool:
    """Whether the file is sealed and whole; size and time tell a file that was written again from the one checked."""
    if size == 0:
        return False  # nothing to map
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_SEAL) + len(_SEAL)
        return content[start : start + 64] == _digest_without(content, start)


def _digest_without(content: bytearray | mmap.mmap, start: int) -> bytes:
    """sha256 of all bytes but the 64 from `start`, in hexadecimal."""
    digest = hashlib.sha256(content[:start])
    with memoryview(content) as view, view[start + 64 :] as rest:
        digest.update(rest)
    return digest.hexdigest().encode()


class SnapshotStore:
    """Append-only, content-addressed snapshots in one folder, shared by all sweeps that use it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __contains__(self, lineage: str) -> bool:
        """Whether the snapshot was committed; its digest is checked when it is read."""
        return self._facts_path(lineage).is_file() and self.path(lineage).is_file()

    def path(self, lineage: str) -> Path:
        """The file of a snapshot's tensors."""
        return self.folder / f"{lineage}.safetensors"

    def _facts_path(self, lineage: str) -> Path:
        return self.folder / f"{lineage}.json"

    def append(self, snapshot: Snapshot) -> None:
        """Commit a snapshot. One that is there already stays as it is."""
        if snapshot.lineage in self:
            return
        content = _tensor_bytes(snapshot.tensors)
        write_atomically(self.path(snapshot.lineage), content)
        digest = hashlib.sha256(content).hexdigest()
        # the second rename commits: without this file the snapshot does not exist
        facts = {"lineage": snapshot.lineage, "sha256": digest, "facts": snapshot.facts}
        write_json(self._facts_path(snapshot.lineage), facts)

    def get(self, lineage: str) -> Snapshot | None:
        """A committed snapshot, or None where there is none; a damaged one is set aside and counts as none."""
        from safetensors.torch import load

        if lineage not in self:
            return None
        content = self.path(lineage).read_bytes()
        try:
            facts = json.loads(self._facts_path(lineage).read_text(encoding="utf-8"))
            intact = facts["lineage"] == lineage and facts["sha256"] == hashlib.sha256(content).hexdigest()
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            self._set_aside(lineage)
            return None
        return Snapshot(lineage, load(content), facts["facts"])

    def _set_aside(self, lineage: str) -> None:
        damaged = self.folder / "damaged"
        damaged.mkdir(exist_ok=True)
        log.warning("snapshot %s does not check against its digest; it is moved to %s and made again", lineage, damaged)
        for path in (self._facts_path(lineage), self.path(lineage)):
            if path.is_file():
                os.replace(path, damaged / path.name)

    @contextmanager
    def leases(self, lineages: Sequence[str], on_wait: Callable[[str], None]) -> Iterator[list[str]]:
        """The right to learn these snapshots, as far as nobody else has it: gives those that this process may learn.

        Where others learn all of them, it waits for one and gives that; whoever learned it may have committed by then.
        No process waits while it holds a lease, so two that want the same snapshots cannot block each other. The locks
        belong to the process: the operating system releases them when the process ends, however it ends.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        locks = {lineage: FileLock(str(self.folder / f"{lineage}.lock")) for lineage in lineages}
        held = []
        try:
            for lineage, lock in locks.items():
                with suppress(Timeout):
                    lock.acquire(timeout=0)
                    held.append(lineage)
            if not held:
                first = lineages[0]
                on_wait(first)
                locks[first].acquire()
                held.append(first)
            yield held
        finally:
            for lineage in held:
                locks[lineage].release()

    def checkpoint(self, lineage: str) -> TaskCheckpoint:
        """The checkpoint inside the task that will become this snapshot."""
        return TaskCheckpoint(self.folder.parent / "checkpoints" / f"{lineage}.safetensors")


class TaskCheckpoint:
    """Adapter, optimizer and position inside one task: replaced every N steps, removed when the snapshot is there."""

    def __init__(self, path: Path):
        self.path = path

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Replace the checkpoint; facts are JSON values."""
        write_atomically(self.path, _tensor_bytes(tensors, {"facts": json.dumps(facts)}))

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and facts, or None where there is none; one that cannot be read counts as none and says so."""
        from safetensors import SafetensorError, safe_open

        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                facts = json.loads(file.metadata()["facts"])
                return {name: file.get_tensor(name).clone() for name in file.keys()}, facts  # noqa: SIM118
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("checkpoint %s cannot be read (%s); the task starts from its first step", self.path, error)
            return None

    def remove(self) -> None:
        """The snapshot is committed: nothing to resume."""
        self.path.unlink(missing_ok=True)


def _tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata=metadata)
