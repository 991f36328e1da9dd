"""Data sets of the hub: a split is loaded once, at a commit, and read from this machine's cache ever after.

No code of a data set is run: `datasets` reads data files only. What is kept is a folder for each split, with the
digests of its files, and a digest of its values, which is the same on every machine whatever wrote the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from functools import lru_cache
from pathlib import Path

from latent_sweep.data.dataset_folders import is_intact, locked, no_progress_bars, remove, write_folder
from latent_sweep.data.mapping import SourceSpec
from latent_sweep.errors import MissingData
from latent_sweep.settings import content_hash
from latent_sweep.storage.files import cache_folder, committing, write_file

log = logging.getLogger(__name__)

HUB_SECONDS = 5.0
"""How long the hub may take to say what a branch or tag is."""
VALUES = "values.sha256"
"""The file with the digest of all values."""
_COMMIT = re.compile("[0-9a-f]{40}")


def pinned(source: SourceSpec) -> SourceSpec:
    """Put the commit in the place of a branch, a tag or nothing, as far as it can be known here.

    What was loaded once stays what it is: the newest commit of a branch is asked for only where this machine has none.
    """
    if source.hub is None:
        return source
    return source.model_copy(update={"revision": _commit(source.hub, source.revision)})


def hub_split(source: SourceSpec, name: str) -> Path:
    """The folder of a split, loaded from the hub where it is not on this machine.

    Raises:
        MissingData: it is not here, and the hub does not give it.
        StoreError: the cache cannot be written.
    """
    wanted = [source.hub, source.config, source.revision, name]
    target = _folder() / content_hash(wanted, length=32)
    if not _is_whole(target):
        if not _COMMIT.fullmatch(source.revision or ""):
            raise MissingData(
                f"source.hub: no commit of {source.hub} can be found: this machine has not loaded it before, and the "
                "hub did not say. Connect to the hub, or name a commit as `revision`."
            )
        with committing(target), locked(target):
            if not _is_whole(target):
                _load(source, name, target)
    return target


def values_digest(folder: Path) -> str:
    """The digest of all values of a split that was loaded."""
    return folder.with_suffix(f".{VALUES}").read_text(encoding="utf-8")


def _folder() -> Path:
    return cache_folder() / "hub_data"


def _is_whole(target: Path) -> bool:
    """Whether a split is here, looked at once as long as no file is written again."""
    if not target.with_suffix(f".{VALUES}").is_file() or not target.is_dir():
        return False
    return _looked_at(target, tuple(sorted((p.name, p.stat().st_mtime_ns) for p in target.iterdir())))


@lru_cache(maxsize=256)
def _looked_at(target: Path, state: tuple[tuple[str, int], ...]) -> bool:
    return is_intact(target, "hub data in")


def _load(source: SourceSpec, name: str, target: Path) -> None:
    from datasets import load_dataset

    work = target.with_suffix(".work")
    remove(work)
    try:
        with no_progress_bars():
            found = load_dataset(
                source.hub, source.config, revision=source.revision, split=name, cache_dir=str(work / "cache")
            )
        digest = hashlib.sha256()
        for batch in found.with_format("arrow").iter(1000):
            for record in batch.to_pylist():
                digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
        write_folder(found, target)
        write_file(target.with_suffix(f".{VALUES}"), digest.hexdigest().encode())
    except Exception as error:  # whatever the network, the hub or the data says
        config = f", config {source.config}" if source.config else ""
        raise MissingData(
            f"source.hub: split {name!r} of {source.hub}{config} at {source.revision} could not be loaded: "
            f"{type(error).__name__}: {error}\nCheck `hub`, `config` and `split`, log in with `hf auth login` if the "
            "data set is gated, or download it elsewhere and name its files as `train` and `test`. Code is never run: "
            "a data set that is a script has to be converted"
        ) from error
    finally:
        remove(work)


@lru_cache(maxsize=256)
def _commit(hub: str, revision: str | None) -> str | None:
    """Return the commit that a revision is: as noted when it was loaded, else as the hub says, else unchanged."""
    if _COMMIT.fullmatch(revision or ""):
        return revision
    note = _folder() / f"{content_hash([hub, revision], length=32)}.commit"
    if note.is_file() and _COMMIT.fullmatch(known := note.read_text(encoding="utf-8")):
        return known
    from huggingface_hub import HfApi

    try:
        found = HfApi().dataset_info(hub, revision=revision, timeout=HUB_SECONDS).sha
    except Exception as error:  # whatever the network says
        log.info("the hub does not say what %s is: %s", hub, error)
        return revision
    if found:
        write_file(note, found.encode())
    return found or revision
