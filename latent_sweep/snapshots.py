"""Snapshots: what learning one task leaves behind. Written once, named by lineage, committed by rename, never changed.

Safetensors and JSON only: nothing is unpickled. Every read checks a digest; what does not check is set aside, reported
and made again. Caches (factors, embeddings, router records, answers) and checkpoints are single files that carry the
digest of themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_sweep.files import committing
from latent_sweep.storage import storage_of, write_atomically, write_json

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
    """JSON values that repeat with the training: task, steps, losses, what it was computed with. Nothing about a clock
    or an order."""


_SEAL = b'"sha256":"'
"""How a sealed file introduces its digest; quotes inside JSON's texts are escaped, so nothing else looks so."""
_UNSEALED = {"sha256": "0" * 64}
DAMAGED = ".damaged"
"""Suffix of a sealed file that was set aside."""


def write_sealed(path: Path, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Write arrays as one safetensors file, atomically, sealed in its metadata."""
    import numpy as np
    from safetensors.numpy import save

    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write_atomically(path, _sealed(save(in_order, metadata=_UNSEALED)))


def write_sealed_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write a JSON value as one file, atomically, sealed; indented where people read it."""
    text = json.dumps(_UNSEALED | {"content": content}, indent=indent, separators=(",", ":"), allow_nan=False)
    write_atomically(path, _sealed(text.encode()))


def read_sealed_json(path: Path) -> Any:
    """What `write_sealed_json` has written, or None where there is none that is `intact`."""
    return json.loads(path.read_bytes())["content"] if intact(path) else None


def _sealed(content: bytes) -> bytearray:
    """`content` with the sha256 of all bytes but its own 64 in the place that is left for it."""
    sealed = bytearray(content)
    start = sealed.index(_SEAL) + len(_SEAL)
    sealed[start : start + 64] = _digest_without(sealed, start)
    return sealed


def intact(path: Path) -> bool:
    """Whether a sealed file is there and checks against its digest, which is computed once a process.

    One that does not check is renamed to `*.damaged` and reported, and counts as not there.
    """
    if not path.exists():
        return False
    if is_sealed(path):
        return True
    set_aside(path, "does not check against its digest")
    return False


def set_aside(path: Path, found: str) -> None:
    """Rename a damaged file to `*.damaged` and say what was found; it need not be there any more."""
    damaged = path.with_suffix(DAMAGED)
    log.warning("%s %s; it is set aside as %s and made again", path, found, damaged.name)
    with committing(damaged), suppress(FileNotFoundError):  # another process has done so
        os.replace(path, damaged)


def is_sealed(path: Path) -> bool:
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
    """sha256 of all bytes but the 64 from `start`, in hexadecimal."""
    digest = hashlib.sha256(content[:start])
    with memoryview(content) as view, view[start + 64 :] as rest:
        digest.update(rest)
    return digest.hexdigest().encode()


class SnapshotStore:
    """Append-only, content-addressed snapshots in one folder of a storage, shared by all sweeps that use it.

    Raises:
        StoreError: the storage cannot be read or written; every method may.
    """

    def __init__(self, folder: Path):
        self.folder, self._storage = folder, storage_of(folder)

    def __contains__(self, lineage: str) -> bool:
        """Whether the snapshot was committed; its digest is checked when it is read."""
        return self._storage.holds(self._facts_path(lineage)) and self._storage.holds(self.path(lineage))

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
        write_json(self._facts_path(snapshot.lineage), facts | {"facts_sha256": _facts_digest(snapshot.facts)})

    def get(self, lineage: str) -> Snapshot | None:
        """A committed snapshot, or None where there is none; a damaged one is set aside and counts as none."""
        files = self.path(lineage), self._facts_path(lineage)
        for _ in range(2):  # an object store may have what was damaged here
            if not all(map(self._storage.share, files)):
                return None
            if (found := self._read(lineage)) is not None:
                return found
            self._set_aside(lineage)
        for path in reversed(files):  # without its facts it is not committed
            self._storage.remove(path)
        return None

    def fault(self, lineage: str) -> str | None:
        """What is wrong with a snapshot that should be there, or None; it is left as it is."""
        files = self.path(lineage), self._facts_path(lineage)
        if not all(map(self._storage.share, files)):
            return "is missing"
        return None if self._facts(lineage, files[0].read_bytes()) is not None else "does not check against its digest"

    def _read(self, lineage: str) -> Snapshot | None:
        """The snapshot as it lies here, or None where it does not check against its digest."""
        from safetensors.torch import load

        content = self.path(lineage).read_bytes()
        facts = self._facts(lineage, content)
        return None if facts is None else Snapshot(lineage, load(content), facts)

    def _facts(self, lineage: str, content: bytes) -> dict[str, Any] | None:
        """The facts beside these tensors, or None where they, or the tensors, do not check against their digests."""
        try:
            found = json.loads(self._facts_path(lineage).read_text(encoding="utf-8"))
            facts = found["facts"]
            digests = found["sha256"], found["facts_sha256"]
            if found["lineage"] == lineage and digests == (hashlib.sha256(content).hexdigest(), _facts_digest(facts)):
                return facts
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        return None

    def _set_aside(self, lineage: str) -> None:
        damaged = self.folder / "damaged"
        log.warning("snapshot %s does not check against its digest; it is moved to %s and made again", lineage, damaged)
        with committing(damaged):
            damaged.mkdir(exist_ok=True)
            for path in (self._facts_path(lineage), self.path(lineage)):
                if path.is_file():
                    os.replace(path, damaged / path.name)

    @contextmanager
    def leases(self, lineages: Sequence[str], on_wait: Callable[[str], None]) -> Iterator[list[str]]:
        """The right to learn these snapshots, as far as nobody else has it: gives those that this process may learn.

        Where others learn all of them, it waits for one and gives that; whoever learned it may have committed by then.
        No process waits while it holds a lease, so two that want the same snapshots cannot block each other. A lease
        ends with the process that has it, however that ends: in a folder at once, in an object store when it expires.
        """
        leases = {lineage: self._storage.lease(self.folder / f"{lineage}.lock") for lineage in lineages}
        held = []
        try:
            for lineage, lease in leases.items():
                if lease.take():
                    held.append(lineage)
            if not held:
                first = lineages[0]
                on_wait(first)
                leases[first].take(wait=True)
                held.append(first)
            yield held
        finally:
            for lineage in held:
                leases[lineage].release()

    def checkpoint(self, lineage: str) -> TaskCheckpoint:
        """The checkpoint inside the task that will become this snapshot."""
        return TaskCheckpoint(self.folder.parent / "checkpoints" / f"{lineage}.safetensors")


class TaskCheckpoint:
    """Adapter, optimizer and position inside one task: replaced every N steps, removed when the snapshot is there."""

    def __init__(self, path: Path):
        self.path = path

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Replace the checkpoint; facts are JSON values.

        Raises:
            StoreError: the storage cannot be written.
        """
        write_atomically(self.path, _sealed(_tensor_bytes(tensors, _UNSEALED | {"facts": json.dumps(facts)})))

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and facts, or None where there is none; one that is damaged is set aside, says so, counts as none."""
        from safetensors import safe_open

        if not storage_of(self.path).sync(self.path):
            return None
        if not intact(self.path):
            log.warning("checkpoint %s is damaged; the task starts from its first step", self.path)
            return None
        with safe_open(self.path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            return {name: file.get_tensor(name).clone() for name in file.keys()}, facts  # noqa: SIM118

    def remove(self) -> None:
        """The snapshot is committed: nothing to resume, and nothing to learn from a damaged one that was set aside."""
        storage_of(self.path).remove(self.path)
        self.path.with_suffix(DAMAGED).unlink(missing_ok=True)


def _facts_digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(json.loads(json.dumps(facts)), sort_keys=True).encode()).hexdigest()


def _tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata=metadata)
