"""What tells one backbone from another before anything is loaded: commits, digests of folders, configurations."""

from __future__ import annotations

import hashlib
import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from latent_sweep.backbones.files import embedded_version
from latent_sweep.backbones.registry import EMBEDDED, EMBEDDED_PACKAGE, RANDOM, BackboneSettings, registered_backbone
from latent_sweep.storage import versions

log = logging.getLogger(__name__)

SAMPLE_BYTES = 1 << 16
"""Bytes of each sample that tells two checkpoint files apart."""


def backbone_identity(settings: BackboneSettings) -> dict[str, Any]:
    """Return what distinguishes this backbone from another, and what is adapted of it, without loading it.

    The projections that are adapted stand in it only where they are not the default's, query and value.
    """
    adapted = {} if settings.targets is None else {"targets": settings.identity()["targets"]}
    return {
        "weights": _source_identity(settings.name, settings.revision),
        "tokenizer": settings.tokenizer and _source_identity(settings.tokenizer, settings.tokenizer_revision),
        "dtype": settings.dtype,
        **adapted,
    }


_COMMIT = re.compile("[0-9a-f]{40}")
HUB_SECONDS = 5.0
"""How long the hub may take to say what a branch or tag is."""


def pinned(settings: BackboneSettings) -> BackboneSettings:
    """Put the commit in the place of a branch, a tag or nothing, as far as it can be known here."""
    update = {"revision": _commit(_source(settings.name), settings.revision)}
    if settings.tokenizer is not None:
        update |= {"tokenizer_revision": _commit(_source(settings.tokenizer), settings.tokenizer_revision)}
    return settings.model_copy(update=update)


def unpinned(settings: BackboneSettings) -> list[str]:
    """Describe each part of a backbone that comes from a hub in a version that nothing says."""
    sources = [("backbone.name", _source(settings.name), settings.revision)]
    if settings.tokenizer is not None:
        sources += [("backbone.tokenizer", _source(settings.tokenizer), settings.tokenizer_revision)]
    return [
        f"{path}: no commit of {source} can be found: it is not in this machine's cache, and the hub did not answer. "
        f"Expected one, because the default branch may change under a sweep. Download it (`hf download {source}`), or "
        "name a commit as revision"
        for path, source, revision in sources
        if source is not None and not _COMMIT.fullmatch(revision or "")
    ]


def _source(name: str) -> str | None:
    """Return the hub's name of a backbone or tokenizer; None where it comes from somewhere else."""
    known = registered_backbone(name)
    if name == EMBEDDED or (known is not None and known.source == "config") or Path(name).is_dir():
        return None
    return known.source if known else name


@lru_cache(maxsize=256)
def _commit(source: str | None, revision: str | None) -> str | None:
    """Return the commit that a revision of a hub model is: as in the cache, else as the hub says, else unchanged."""
    if source is None or _COMMIT.fullmatch(revision or ""):
        return revision
    from huggingface_hub import HfApi, try_to_load_from_cache

    for name in ("config.json", "tokenizer_config.json"):
        try:
            found = try_to_load_from_cache(source, name, revision=revision)
        except ValueError:  # no name that a hub could have
            return revision
        if isinstance(found, str):
            return Path(found).parent.name
    try:
        return HfApi().model_info(source, revision=revision, timeout=HUB_SECONDS).sha or revision
    except Exception as error:  # whatever the network says
        log.info("the hub does not say what %s is: %s", source, error)
        return revision


def _source_identity(name: str, revision: str | None) -> Any:
    known = registered_backbone(name)
    if known is not None and known.source == "config":
        drawn = {"drawn": versions.DRAWN} if name.startswith(RANDOM) else {}
        return {"random": dict(known.config), "family": known.family, **drawn}
    if name == EMBEDDED:
        return {"package": EMBEDDED_PACKAGE, "version": embedded_version()}
    if Path(name).is_dir():
        return {"folder": _folder_digest(Path(name))}
    return {"hub": known.source if known else name, "revision": revision}


def _folder_digest(folder: Path) -> str:
    """Names, sizes and samples of every file but hidden ones; read once as long as no file is written again.

    Tools keep books in these: the hub's, of when something was downloaded, in `.cache`.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder)))
    stats = [path.stat() for path in paths]
    files = tuple((str(p), s.st_size, s.st_mtime_ns) for p, s in zip(paths, stats, strict=True))
    return _files_digest(str(folder), files)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@lru_cache(maxsize=64)
def _files_digest(folder: str, files: tuple[tuple[str, int, int], ...]) -> str:
    """Hash the content of files up to 256 MiB and 4096 evenly spread samples of larger ones: seconds for 26 GB."""
    digest = hashlib.sha256()
    for name, size, _ in files:
        digest.update(f"{Path(name).relative_to(folder)}:{size}:".encode())
        with open(name, "rb") as file:
            for start in range(0, size, max(SAMPLE_BYTES, size // 4096)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
