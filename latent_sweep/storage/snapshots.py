"""Snapshots: what learning one task leaves behind. Written once, named by lineage, committed by rename, never changed.

Safetensors and JSON only: nothing is unpickled. Every read checks a digest; what does not check is set aside, reported
and made again. Caches (factors, embeddings, router records, answers) and checkpoints are single files that carry the
digest of themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_sweep.errors import StorageError
from latent_sweep.storage.checksummed import NO_CHECKSUM, QUARANTINED, checksummed, verified
from latent_sweep.storage.files import FileState, committing, state_of
from latent_sweep.storage.storage import Storage, json_bytes

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

OPEN_FILES = 256
"""Snapshots whose files stay mapped, at most; what is mapped takes no memory that the system could not have back."""


@dataclass(frozen=True)
class Snapshot:
    """The tensors and facts that learning one task left behind."""

    lineage: str
    """Hash chain that names it: settings, data, seed, code version, and the parent where history is read."""
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    """JSON values that repeat with the training: task, steps, losses, what it was computed with. Nothing about a clock
    or an order."""


class SnapshotStorage:
    """Append-only, content-addressed snapshots of a storage, in its folder `snapshots`, shared by all its sweeps.

    Raises:
        StorageError: the storage cannot be read or written; every method may.
    """

    def __init__(self, storage: Storage):
        self.folder, self._storage = storage.folder / "snapshots", storage

    def __contains__(self, lineage: str) -> bool:
        """Whether the snapshot was committed: its facts are written last. Its digest is checked when it is read."""
        return self._storage.holds(self._facts_path(lineage)) and self._storage.holds(self.path(lineage))

    def lineages(self) -> set[str]:
        """All snapshots that were committed, by one look: asking for thousands one by one takes an object store hours.

        Their digests are checked when they are read.
        """
        names = self._storage.names(self.folder)  # damaged ones lie below
        found = {name.removesuffix(".json") for name in names if name.endswith(".json")}
        return {lineage for lineage in found if self.path(lineage).name in names}

    def path(self, lineage: str) -> Path:
        """The file of a snapshot's tensors."""
        return self.folder / f"{lineage}.safetensors"

    def _facts_path(self, lineage: str) -> Path:
        return self.folder / f"{lineage}.json"

    def append(self, snapshot: Snapshot) -> Snapshot:
        """Commit a snapshot, and return what is there now as `recall` does; one that is there already stays."""
        if snapshot.lineage in self and (there := self.recall(snapshot.lineage)) is not None:
            return there
        content = _tensor_bytes(snapshot.tensors)
        self._storage.write_once(self.path(snapshot.lineage), content)
        digest = hashlib.sha256(content).hexdigest()
        # the second rename commits: without this file the snapshot does not exist
        facts = {"lineage": snapshot.lineage, "sha256": digest, "facts": snapshot.facts}
        facts |= {"facts_sha256": _facts_digest(snapshot.facts)}
        self._storage.write_once(self._facts_path(snapshot.lineage), written := json_bytes(facts))
        tensors = StoredTensors(self, snapshot.lineage, snapshot.tensors)
        return Snapshot(snapshot.lineage, tensors, json.loads(written)["facts"])

    def get(self, lineage: str) -> Snapshot | None:
        """Return a committed snapshot, or None where there is none; a damaged one is set aside and counts as none."""
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

    def recall(self, lineage: str) -> Snapshot | None:
        """Return a snapshot as `get` does, but leave its tensors where they are: each is read when it is asked for.

        So a trial's history takes no memory, however long it is, but what its method is looking at.
        """
        found = self.get(lineage)
        return None if found is None else Snapshot(lineage, StoredTensors(self, lineage, found.tensors), found.facts)

    def fault(self, lineage: str) -> str | None:
        """Describe what is wrong with a snapshot that should be there, or None; it is left as it is."""
        files = self.path(lineage), self._facts_path(lineage)
        if not all(map(self._storage.share, files)):
            return "is missing"
        return None if self._facts(lineage, files[0].read_bytes()) is not None else "does not match its digest"

    def _read(self, lineage: str) -> Snapshot | None:
        """The snapshot as it lies here, or None where it does not match its digest."""
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
        log.warning("snapshot %s does not match its digest; it is moved to %s and made again", lineage, damaged)
        with committing(damaged):
            damaged.mkdir(exist_ok=True)
            for path in (self._facts_path(lineage), self.path(lineage)):
                if path.is_file():
                    os.replace(path, damaged / path.name)

    @contextmanager
    def leases(self, lineages: Sequence[str], on_wait: Callable[[str], None]) -> Iterator[list[str]]:
        """Hold the right to learn these snapshots, as far as nobody else has it; give those this process may learn.

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
        return TaskCheckpoint(self._storage, self._storage.folder / "checkpoints" / f"{lineage}.safetensors")


class StoredTensors(Mapping[str, "Tensor"]):
    """The tensors of a snapshot that has been checked, where they lie: each is read anew whenever it is asked for.

    Args:
        names: of the tensors.
    """

    def __init__(self, store: SnapshotStorage, lineage: str, names: Iterable[str]):
        self._store, self._lineage, self._names = store, lineage, dict.fromkeys(names)
        self._path = store.path(lineage)
        self._state = state_of(self._path)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            StorageError: the file is missing or damaged by now.
        """
        if name not in self._names:
            raise KeyError(name)
        if (state := state_of(self._path)) != self._state:
            if self._store.get(self._lineage) is None:
                raise StorageError(
                    f"{self._path}: was whole when this run took it up, and is missing or damaged now. Run the same "
                    "command again: the snapshot is learned again, and what is there is not."
                )
            state = self._state = state_of(self._path)
        tensor: Tensor = _mapped(self._path, state).get_tensor(name)
        return tensor.clone()  # memory of its own, laid out as that of a tensor that was computed

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor; nothing is read."""
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._names)


@lru_cache(maxsize=OPEN_FILES)
def _mapped(path: Path, state: FileState) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


class TaskCheckpoint:
    """Adapter, optimizer and position inside one task: replaced every N steps, removed when the snapshot is there."""

    def __init__(self, storage: Storage, path: Path):
        self.path, self._storage = path, storage

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Replace the checkpoint; facts are JSON values.

        Raises:
            StorageError: the storage cannot be written.
        """
        self._storage.write(self.path, checksummed(_tensor_bytes(tensors, NO_CHECKSUM | {"facts": json.dumps(facts)})))

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read tensors and facts, or None where there is none; a damaged one is set aside, says so, counts as none."""
        from safetensors import safe_open

        if not self._storage.sync(self.path):
            return None
        if not verified(self.path):
            log.warning("checkpoint %s is damaged; the task starts from its first step", self.path)
            return None
        with safe_open(self.path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            return {name: file.get_tensor(name).clone() for name in file.keys()}, facts  # noqa: SIM118

    def remove(self) -> None:
        """Remove it once the snapshot is committed: nothing to resume, nor to learn from a damaged one set aside."""
        self._storage.remove(self.path)
        self.path.with_suffix(QUARANTINED).unlink(missing_ok=True)


def _facts_digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(json.loads(json.dumps(facts)), sort_keys=True).encode()).hexdigest()


def _tensor_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata=metadata)
