"""What lies in a storage: its sweeps, what each of them refers to, and what none does; deleting and copying by that.

A sweep refers to the snapshots that its trials have left behind, or will leave behind: `sweep.json` names them. What is
shared is deleted only when no sweep of the storage refers to it.
"""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from latent_sweep.errors import ConfigError, StorageError
from latent_sweep.storage.files import committing
from latent_sweep.storage.folders import LOCKS, SWEEP_FILE, TUNE_FOLDER, SweepFolder, driving, training_lock
from latent_sweep.storage.journal import stages
from latent_sweep.storage.storage import JOURNAL, NODE_LOCAL, PROBES, FileFacts, Storage, open_storage

Kind = Literal["snapshots", "checkpoints", "damaged", "partial files", "probes", "caches"]

CHECKPOINTS, SNAPSHOTS = "checkpoints", "snapshots"
CACHES = NODE_LOCAL - {"profiles"}
"""Folders of what is made again when it is needed; profiles are measurements, and small."""

DAY = 24 * 3600.0
AT_WORK = 3600.0
"""Seconds for which what is being written is left alone, however few days are to be kept."""

_LINEAGE_FILE = re.compile(r"[0-9a-f]{16,}\.(json|safetensors|lock)")
_ARCHIVES = {".tar": "w", ".tar.gz": "w:gz", ".tgz": "w:gz", ".tar.xz": "w:xz"}
_OTHER_ARCHIVES = (".zip", ".gz", ".xz", ".bz2", ".zst", ".7z")


# --- sweeps ----------------------------------------------------------------------------------------------------------


def sweeps_in(storage: Storage, files: Iterable[Path]) -> list[SweepFolder]:
    """Return the sweeps among the files of a storage, by name; their `sweep.json` is here then."""
    found = sorted(path for path in files if path.name == SWEEP_FILE and path.parent.parent == storage.folder)
    for path in found:
        storage.sync(path)
    return [SweepFolder(storage, path.parent.name) for path in found]


def lineages_of(sweep: SweepFolder) -> frozenset[str]:
    """Return the snapshots that a sweep refers to.

    Those of trials whose data was not at hand when the sweep was planned are as many as their journals tell.

    Raises:
        StorageError: its `sweep.json` or a journal is damaged.
    """
    found: set[str] = set()
    for trial in sweep:
        if trial.lineages is None:
            sweep.storage.sync(trial.journal.path)
            found.update(event.lineage for event in stages(trial.events()))
        else:
            found.update(trial.lineages)
    return frozenset(found)


@dataclass(frozen=True)
class Size:
    """Bytes that a sweep takes."""

    own: int
    """In its folder."""
    snapshots: int
    """Of the snapshots that it alone refers to."""
    shared: int
    """Of those that other sweeps refer to as well."""


class Inventory:
    """The files of a storage, looked at once.

    Raises:
        StorageError: the object store cannot be reached.
    """

    def __init__(self, storage: Storage):
        self.storage = storage
        self.files: Mapping[Path, FileFacts] = storage.files(storage.folder)
        self.sweeps = sweeps_in(storage, self.files)

    @cached_property
    def references(self) -> Mapping[str, frozenset[str]]:
        """The snapshots that each sweep refers to, by its name.

        Raises:
            StorageError: what a sweep refers to cannot be read.
        """
        return {sweep.name: lineages_of(sweep) for sweep in self.sweeps}

    @cached_property
    def readable(self) -> Mapping[str, frozenset[str]]:
        """The same of those sweeps that can be read: enough for whoever deletes nothing."""
        found = {}
        for sweep in self.sweeps:
            with suppress(StorageError):
                found[sweep.name] = lineages_of(sweep)
        return found

    def with_tuning(self, name: str) -> list[SweepFolder]:
        """Return the sweep of this name, and before it those whose trials are its candidates.

        It is not there yet while its choices are being made.

        Raises:
            ConfigError: there is neither.
        """
        by_name = {sweep.name: sweep for sweep in self.sweeps}
        candidates = [by_name[other] for other in self.readable if by_name[other].tuning_of == name]
        if name not in by_name and not candidates:
            known = ", ".join(by_name) or "none"
            raise ConfigError(f"{self.storage.location}: found no sweep {name!r}; there are: {known}")
        return candidates + [sweep for sweep in self.sweeps if sweep.name == name]

    def size(self, sweep: SweepFolder) -> Size:
        """Add up what a sweep takes; sweeps that cannot be read count as sharing nothing with it.

        Raises:
            StorageError: what it refers to cannot be read.
        """
        others = [found for name, found in self.readable.items() if name != sweep.name]
        mine = lineages_of(sweep)
        shared = mine & frozenset().union(*others)
        own = sum(facts.size for path, facts in self.files.items() if path.is_relative_to(sweep.path))
        return Size(own, self.snapshot_bytes(mine - shared), self.snapshot_bytes(shared))

    def changed(self, sweep: SweepFolder) -> float:
        """Return when a file of a sweep was last written, in Unix seconds."""
        return max(facts.modified for path, facts in self.files.items() if path.is_relative_to(sweep.path))

    def snapshot_bytes(self, lineages: Iterable[str]) -> int:
        """Add up the files of snapshots."""
        folder = self.storage.folder / SNAPSHOTS
        files = (folder / f"{lineage}{suffix}" for lineage in lineages for suffix in (".safetensors", ".json"))
        return sum(self.files[path].size for path in files if path in self.files)


# --- garbage ---------------------------------------------------------------------------------------------------------


class Garbage(NamedTuple):
    """A file that no sweep needs."""

    path: Path
    kind: Kind
    size: int
    """In bytes."""


def garbage(inventory: Inventory, keep_days: float, caches: bool = False) -> list[Garbage]:
    """Find what no sweep refers to, and what was left over: nothing that was written within the last `keep_days`.

    Args:
        caches: also what is made again when it is needed: tokens, factors, embeddings, known answers.

    Raises:
        StorageError: what a sweep refers to cannot be read, so that nothing can be said of snapshots.
    """
    referred = frozenset().union(*inventory.references.values())
    found, now = [], inventory.storage.now()
    for path, facts in sorted(inventory.files.items()):
        age = now - facts.modified
        kind = _kind(path.relative_to(inventory.storage.folder), referred, inventory.files)
        if kind is not None and (caches or kind != "caches") and age >= max(keep_days * DAY, AT_WORK):
            found.append(Garbage(path, kind, facts.size))
    return found


def _kind(path: Path, referred: frozenset[str], files: Mapping[Path, FileFacts]) -> Kind | None:
    """Say what kind of garbage a file is, by its path in the storage; None where it is none."""
    first = path.parts[0]
    inside = path.parts[1:] or path.parts  # for a sweep may be called anything
    if ".damaged" in (Path(part).suffix for part in inside) or path.parts[:2] == (SNAPSHOTS, "damaged"):
        return "damaged"
    if any(part.endswith(".partial") for part in inside):
        return "partial files"
    if first == PROBES or first.startswith(".doctor-"):
        return "probes"
    if first in (SNAPSHOTS, CHECKPOINTS) and _LINEAGE_FILE.fullmatch("/".join(path.parts[1:])):
        if path.stem not in referred:
            return "snapshots" if first == SNAPSHOTS else "checkpoints"
        return None
    if first in CACHES:
        return "caches"
    return None


def collect(inventory: Inventory, found: Sequence[Garbage]) -> list[Garbage]:
    """Delete garbage, and return what was deleted.

    A snapshot that somebody learns is left alone; so is everything where a sweep was written since the inventory was
    taken, for it may refer to it.

    Raises:
        StorageError: the storage cannot be written, or a sweep was written meanwhile: take stock again.
    """
    storage = inventory.storage
    by_lineage: dict[str, list[Garbage]] = {}
    for one in found:
        if one.kind == "snapshots":
            by_lineage.setdefault(one.path.stem, []).append(one)
    _check_unwritten(inventory)

    def delete(one: Garbage) -> list[Garbage]:
        with committing(one.path):
            storage.remove(one.path)
        return [one]

    def delete_snapshot(files: list[Garbage]) -> list[Garbage]:
        lease = storage.lease(storage.folder / SNAPSHOTS / f"{files[0].path.stem}.lock")
        if not lease.take():
            return []
        try:
            # the facts first: without them there is no snapshot; the lease's own file last
            in_order = sorted(files, key=lambda one: (".json", ".safetensors", ".lock").index(one.path.suffix))
            return [gone for one in in_order for gone in delete(one)]
        finally:
            lease.release()

    with ThreadPoolExecutor(16) as pool:  # an object store's leases take half a second each
        deleted = list(pool.map(delete_snapshot, by_lineage.values()))
        deleted += pool.map(delete, (one for one in found if one.kind != "snapshots"))
    _remove_empty({one.path.parent for one in found} - {storage.folder}, storage.folder)
    return [one for files in deleted for one in files]


def _check_unwritten(inventory: Inventory) -> None:
    """Check that no sweep was written since the inventory was taken: it may refer to what is to be deleted.

    Raises:
        StorageError: one was.
    """
    then, now = (
        {sweep.path: one.files[sweep.path / SWEEP_FILE] for sweep in one.sweeps}
        for one in (inventory, Inventory(inventory.storage))
    )
    if then != now:
        raise StorageError(
            f"{inventory.storage.location}: a sweep was written during the inventory, so nothing was deleted. Run the "
            "same command again"
        )


def _remove_empty(folders: Iterable[Path], root: Path) -> None:
    """Remove folders, and those above them up to `root`, that are empty."""
    for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
        while folder != root and folder.parent != root and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


# --- deleting a sweep ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deletion:
    """What deleting a sweep takes away, and what it leaves."""

    sweeps: Sequence[SweepFolder]
    """The sweep, and before it those of its candidates."""
    files: Mapping[Path, FileFacts]
    """Of their folders."""
    snapshots: Mapping[Path, FileFacts]
    """Snapshots and checkpoints that only these sweeps refer to."""
    shared: int
    """Snapshots that stay, because other sweeps refer to them."""


def deletion(inventory: Inventory, name: str) -> Deletion:
    """Find what deleting a sweep takes away.

    Raises:
        ConfigError: there is no such sweep, or it is being run.
        StorageError: what a sweep refers to cannot be read.
    """
    sweeps = inventory.with_tuning(name)
    going = {sweep.name for sweep in sweeps}
    mine = frozenset().union(*(inventory.references[one] for one in going))
    others = frozenset().union(*(found for other, found in inventory.references.items() if other not in going))
    files = {p: facts for p, facts in inventory.files.items() if any(p.is_relative_to(one.path) for one in sweeps)}
    # its driver's, and those of workers that may have outlived their driver: an object store's are not among the files
    locks = {path for path in files if path.parent.name == LOCKS}
    locks |= {training_lock(sweep, trial.training_id) for sweep in sweeps for trial in sweep}
    leases = {path: inventory.storage.lease(path) for path in sorted(locks)}
    with ThreadPoolExecutor(16) as pool:
        held = pool.map(lambda lease: lease.held_since(), leases.values())
        for (path, lease), since in zip(leases.items(), held, strict=True):
            if since is not None:
                raise ConfigError(f"{path.parent.parent}: is being run by {lease.holder()}; stop that first")
    alone = mine - others
    shared_folders = (inventory.storage.folder / SNAPSHOTS, inventory.storage.folder / CHECKPOINTS)
    snapshots = {p: f for p, f in inventory.files.items() if p.parent in shared_folders and p.stem in alone}
    kept = sum(inventory.storage.folder / SNAPSHOTS / f"{one}.json" in inventory.files for one in mine & others)
    return Deletion(sweeps, files, snapshots, kept)


def delete(inventory: Inventory, going: Deletion) -> None:
    """Delete a sweep: its `sweep.json` first, so that what is left of a deletion that was cut is no sweep.

    Raises:
        ConfigError: it is being run by now.
        StorageError: the storage cannot be written, or a sweep was written meanwhile: take stock again.
    """
    storage = inventory.storage
    locks = {path for path in going.files if path.parent.name == LOCKS}
    with ExitStack() as stack:
        for sweep in going.sweeps:
            stack.enter_context(_undriven(sweep))
        _check_unwritten(inventory)
        marks = [sweep.path / SWEEP_FILE for sweep in going.sweeps]
        for path in dict.fromkeys((*marks, *going.snapshots, *going.files)):
            if path not in locks:
                storage.remove(path)
    for path in locks:
        storage.remove(path)
    for sweep in going.sweeps:
        shutil.rmtree(sweep.path, ignore_errors=True)


@contextmanager
def _undriven(sweep: SweepFolder) -> Iterator[None]:
    """Hold the right to drive a sweep, which nobody else may have."""

    def refuse(driver: str) -> None:
        raise ConfigError(f"{sweep.path}: is being run by {driver}; stop that first")

    with driving(sweep, refuse):
        yield


# --- copying a sweep -------------------------------------------------------------------------------------------------


def is_archive(place: str) -> bool:
    """Whether a place is named as an archive is: `.tar`, `.tar.gz`, `.tgz` or `.tar.xz`."""
    return place.endswith(tuple(_ARCHIVES))


def _check_target(place: str) -> None:
    """Refuse what would become a storage by mistake.

    Raises:
        ConfigError: it is named as an archive of another kind, or lies in a sweep's folder.
    """
    if place.endswith(_OTHER_ARCHIVES) and not is_archive(place):
        raise ConfigError(f"{place}: no archive of this kind is written; expected {', '.join(_ARCHIVES)}, or a folder")
    if "://" in place:
        if is_archive(place):
            raise ConfigError(f"{place}: archives are written on this machine; name a file here, or a storage there")
        return
    folder = Path(place).absolute()
    if (inside := next((each for each in (folder, *folder.parents) if (each / SWEEP_FILE).exists()), None)) is not None:
        raise ConfigError(f"{place}: lies in the folder of a sweep, {inside}; name a storage beside its own")


class Copied(NamedTuple):
    """What a copy took."""

    sweeps: Sequence[str]
    files: int
    size: int
    """In bytes."""
    snapshots: bool
    """Whether weights are among the files."""


def copy_sweep(source: Storage, name: str, place: str, with_snapshots: bool = True) -> Copied:
    """Copy a sweep, those of its candidates, and the snapshots that they refer to, into a storage or an archive.

    Caches stay behind: they are made again. A copy that was cut is no sweep, and the same command goes on with it.

    Args:
        place: a folder, the URI of an object store, or the path of an archive, which is one storage in a file.
        with_snapshots: whether the weights go with it. What its tables, pictures and scores come from is in the copy
            either way, and its trials that have ended stay ended.

    Raises:
        ConfigError: there is no such sweep; there is another one of this name where it is to go, or the same one,
            which has gone on since; or the place is in a sweep's folder, or named as an archive of another kind.
        StorageError: one of both places cannot be read or written.
    """
    _check_target(place)
    inventory = Inventory(source)
    sweeps = inventory.with_tuning(name)
    for sweep in sweeps:
        source.pull(sweep.path)
    # journals speak of files that were written before them: they are read first and written last
    journals = {t.journal.path: t.journal.path.read_bytes() for s in sweeps for t in s if t.journal.path.exists()}
    marks = {sweep.path / SWEEP_FILE: (sweep.path / SWEEP_FILE).read_bytes() for sweep in sweeps}
    files = list(_to_copy(source, sweeps, with_snapshots))
    if is_archive(place):
        return _archive(source, sweeps, files, journals | marks, Path(place))
    target = open_storage(place)
    placed = {path: target.folder / path.relative_to(source.folder) for path in (*files, *journals, *marks)}
    if target.folder == source.folder:
        raise ConfigError(f"{place}: is the storage that sweep {name} lies in; expected another one, or an archive")
    for path, content in marks.items():
        if target.sync(placed[path]) and placed[path].read_bytes() != content:
            found = f"there is a sweep {path.parent.name} already, and it is another one"
            raise ConfigError(f"{placed[path].parent}: {found}; {_ELSEWHERE}")
    for path, content in journals.items():
        if target.sync(placed[path]) and not content.startswith(placed[path].read_bytes()):
            sweep_path = target.folder / path.relative_to(source.folder).parts[0]
            raise ConfigError(f"{sweep_path}: the sweep has gone on there since it was copied; {_ELSEWHERE}")
    target.create()
    size = 0
    for path in files:
        content = path.read_bytes()
        size += len(content)
        if not target.sync(placed[path]) or placed[path].read_bytes() != content:
            target.write(placed[path], content)
    for path, content in (journals | marks).items():
        target.write(placed[path], content)
        size += len(content)
    return _copied(source, sweeps, placed, size)


_ELSEWHERE = "delete it (latent-sweep delete), or copy into another storage"


def _to_copy(source: Storage, sweeps: Sequence[SweepFolder], with_snapshots: bool) -> Iterator[Path]:
    """Yield the files that sweeps need, present here then; journals and what makes a folder a sweep are not among them.

    Nor is what Ray Tune keeps: pickles, and paths of where it ran. Snapshots are whole when their facts are there,
    which come after the tensors.
    """
    for sweep in sweeps:
        for path in sorted(path for path in sweep.path.rglob("*") if path.is_file()):
            name = path.relative_to(sweep.path)
            left = (
                name.parts[0] in (LOCKS, TUNE_FOLDER) or name.name in (JOURNAL, SWEEP_FILE) or name.name.startswith(".")
            )
            if not left and path.suffix not in (".damaged", ".lock"):
                yield path
    for lineage in sorted(frozenset().union(*map(lineages_of, sweeps))) if with_snapshots else ():
        tensors, facts = (source.folder / SNAPSHOTS / f"{lineage}{suffix}" for suffix in (".safetensors", ".json"))
        if source.share(facts) and source.share(tensors):
            yield from (tensors, facts)
        elif source.share(checkpoint := source.folder / CHECKPOINTS / f"{lineage}.safetensors"):
            yield checkpoint


def _archive(
    source: Storage, sweeps: Sequence[SweepFolder], files: Sequence[Path], last: Mapping[Path, bytes], archive: Path
) -> Copied:
    """Write an archive under a temporary name, and rename it."""
    if archive.exists():
        raise ConfigError(f"{archive}: is there already; remove it, or name another file")
    size, partial = 0, archive.with_name(f".{archive.name}.partial")
    mode = next(mode for suffix, mode in _ARCHIVES.items() if archive.name.endswith(suffix))
    with committing(archive):
        archive.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(partial, mode) as tar:  # type: ignore[call-overload]  # the modes are those of a table
                for path in (*files, *last):
                    content = last[path] if path in last else path.read_bytes()
                    entry = tarfile.TarInfo(path.relative_to(source.folder).as_posix())
                    entry.size, entry.mtime, entry.mode = len(content), int(path.stat().st_mtime), 0o644
                    tar.addfile(entry, io.BytesIO(content))
                    size += len(content)
            partial.replace(archive)
        finally:
            partial.unlink(missing_ok=True)
    return _copied(source, sweeps, (*files, *last), size)


def _copied(source: Storage, sweeps: Sequence[SweepFolder], files: Collection[Path], size: int) -> Copied:
    weights = (source.folder / SNAPSHOTS, source.folder / CHECKPOINTS)
    return Copied([sweep.name for sweep in sweeps], len(files), size, any(path.parent in weights for path in files))


@contextmanager
def unpacked(archive: Path) -> Iterator[tuple[Storage, str]]:
    """Give the storage that an archive holds, in a folder that is gone after the block, and its sweep's name.

    Raises:
        ConfigError: it is no archive of a sweep.
    """
    with tempfile.TemporaryDirectory(prefix="latent_sweep-") as folder:
        try:
            with tarfile.open(archive) as tar:
                for entry in tar:
                    parts = PurePosixPath(entry.name).parts
                    if not entry.isfile() or ".." in parts or PurePosixPath(entry.name).is_absolute():
                        raise ConfigError(f"{archive}: holds {entry.name!r}, which is no file below its own folder")
                    path = Path(folder, *parts)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    content = tar.extractfile(entry)
                    assert content is not None, "a regular file"
                    with path.open("wb") as file:
                        shutil.copyfileobj(content, file)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise ConfigError(f"{archive}: cannot be read as an archive: {error}") from error
        storage = Storage(Path(folder))
        sweeps = Inventory(storage).sweeps
        names = [sweep.name for sweep in sweeps if sweep.tuning_of is None] or [sweep.name for sweep in sweeps]
        if len(names) != 1:
            raise ConfigError(f"{archive}: found {len(names)} sweeps; expected an archive of one, as `cp` writes it")
        yield storage, names[0]
