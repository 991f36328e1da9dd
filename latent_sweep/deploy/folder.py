"""A model in a folder: written once, sealed with digests, read strictly. Safetensors and JSON only.

model.json      settings, benchmark, tasks with their distances, where it comes from, and the digest of every file
README.md       the same for people
snapshots/      what learning each task has left behind
router/         what routing keeps of each task
factors/        of a method whose adapters lie in factors of the backbone's weights
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from latent_sweep.adapters.factors import kept_factors
from latent_sweep.data.caches import file_digest
from latent_sweep.data.schema import BenchmarkSpec, TaskSpec
from latent_sweep.deploy.card import model_card
from latent_sweep.deploy.content import LearnedTask, ModelContent, Origin, Records
from latent_sweep.errors import ConfigError, StorageError, clause
from latent_sweep.methods.protocol import Method
from latent_sweep.routing.gaussian import TaskGmm, TaskScatter
from latent_sweep.routing.ngram import TaskNgrams
from latent_sweep.settings import local_path
from latent_sweep.storage import versions
from latent_sweep.storage.checksummed import has_valid_checksum, write_checksummed_json
from latent_sweep.storage.files import cache_folder, committing, write_file
from latent_sweep.storage.snapshots import SnapshotStorage
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.plan import Trial
from latent_sweep.sweep.schema import resolved_settings
from latent_sweep.training.context import Context

MODEL_FILE = "model.json"
FORMAT = 1
"""Of the folder; raised where one that was written before can no longer be read."""
RECORDS: Mapping[str, Callable[[Path], Any]] = {
    "mixture": TaskGmm.load,
    "scatter": TaskScatter.load,
    "ngrams": TaskNgrams.load,
}
"""How to read what routing keeps of a task, by the end of its file's name."""


def new_folder(folder: str | Path) -> Path:
    """Make a folder to write a model into.

    Raises:
        ConfigError: something is there already.
        StorageError: it cannot be made.
    """
    path = local_path(folder)
    with committing(path):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path}: found something there; expected a new or an empty folder. Name another one")
        path.mkdir(parents=True, exist_ok=True)
    return path


def save(content: ModelContent, context: Context, method: Method, folder: str | Path) -> Path:
    """Write a model; see `ContinualModel.save`."""
    path = new_folder(folder)
    store = SnapshotStorage(Storage(path))
    for task in content.learned:
        store.append(task.snapshot)
        for kind in RECORDS:
            if (record := getattr(task.records, kind)) is not None:
                record.save(_record_path(path, task.spec.name, kind))
    if method.factored:
        digest = context.backbone.weights_digest
        method.combine([content.learned[0].snapshot.tensors], torch.ones(1, 1))  # makes them where nobody has asked yet
        for factors in kept_factors(digest, method.rank(), context.storage.folder / "factors"):
            write_file(path / "factors" / factors.name, factors.read_bytes())
    write_file(path / "README.md", model_card(content, context).encode())
    files = {name: file_digest(path / name) for name in _files(path)}
    write_checksummed_json(path / MODEL_FILE, _described(content) | {"files": files}, indent=1)
    return path


def opened(folder: str | Path) -> tuple[ModelContent, Storage]:
    """Read a model, and give it a place of its own in this machine's cache for what it computes.

    Raises:
        StorageError: it is no folder of a model, or something of it is missing or damaged.
    """
    path = local_path(folder).resolve()
    found = _checked(path)
    try:
        content = _content(path, found)
    except (ValidationError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(
            f"{path / MODEL_FILE}: holds no model that this version can read: {clause(error)}. It was written by "
            "latent_sweep of another version, or is damaged: install the version that its card names, or export "
            "it again"
        ) from error
    storage = Storage(cache_folder() / "models" / file_digest(path / MODEL_FILE)[:16])
    for factors in path.glob("factors/*.safetensors"):
        if not has_valid_checksum(storage.folder / "factors" / factors.name):
            storage.write(storage.folder / "factors" / factors.name, factors.read_bytes())
    return content, storage


def is_model(folder: str | Path) -> bool:
    """Whether a folder holds a model, as opposed to a sweep."""
    return (local_path(folder) / MODEL_FILE).is_file()


def _described(content: ModelContent) -> dict[str, Any]:
    """Write a model as JSON, without any place of this machine but the backbone's."""
    trial, origin = content.trial, content.origin
    settings = trial.settings.model_dump(mode="json")
    settings["benchmark"] |= {"data_dir": None, "name": trial.spec.name}
    tasks = [_without_place(task) for task in trial.spec.tasks]
    return {
        "format": FORMAT,
        "settings": settings,
        "benchmark": trial.spec.model_dump(mode="json") | {"folder": ".", "tasks": tasks},
        "backbone": dict(trial.backbone),
        "method_source": trial.method_source,
        "metric_sources": dict(trial.metric_sources),
        "training_id": trial.training_id,
        "values": dict(trial.values),
        "largest_rank": content.largest_rank,
        "tasks": [
            {
                "task": _without_place(task.spec),
                "snapshot": task.snapshot.lineage,
                "farthest": task.farthest,
                "sources": {split: digest for (name, split), digest in trial.sources.items() if name == task.spec.name},
            }
            for task in content.learned
        ],
        "origin": {
            "sweep": origin.sweep,
            "trial_id": origin.trial_id,
            "name": origin.name,
            "scores": dict(origin.scores),
            "measures": dict(origin.measures),
        },
        "versions": versions.installed(),
    }


def _without_place(task: TaskSpec) -> dict[str, Any]:
    """Write a task as JSON, without where its rows lie: they are not read again."""
    return task.model_dump(mode="json") | {"source": None}


def _content(path: Path, found: Mapping[str, Any]) -> ModelContent:
    tasks = [TaskSpec.model_validate(entry["task"]) for entry in found["tasks"]]
    store = SnapshotStorage(Storage(path))
    trial = Trial(
        trial_id=found["origin"]["trial_id"],
        training_id=found["training_id"],
        settings=resolved_settings(found["settings"]),
        values=found["values"],
        tasks=tuple(tasks),
        spec=BenchmarkSpec.model_validate(found["benchmark"]),
        backbone=found["backbone"],
        method_source=found["method_source"],
        metric_sources=found["metric_sources"],
        sources={
            (task.name, split): digest
            for task, entry in zip(tasks, found["tasks"], strict=True)
            for split, digest in entry["sources"].items()
        },
    )
    learned = []
    for task, entry in zip(tasks, found["tasks"], strict=True):
        snapshot = store.get(entry["snapshot"])
        if snapshot is None:
            raise LookupError(f"there is no snapshot {entry['snapshot']}")
        records = {kind: load(_record_path(path, task.name, kind)) for kind, load in RECORDS.items()}
        learned.append(LearnedTask(task, snapshot, Records(**records), entry["farthest"]))
    return ModelContent(trial, tuple(learned), found["largest_rank"], Origin(**found["origin"]))


def _record_path(path: Path, task: str, kind: str) -> Path:
    return path / "router" / f"{task}.{kind}.safetensors"


def _files(path: Path) -> Iterator[str]:
    """Yield every file below a folder."""
    yield from sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def _checked(path: Path) -> dict[str, Any]:
    """Read `model.json` and hold every file against it.

    Raises:
        StorageError: it is not there, or a file is missing or another one.
    """
    file = path / MODEL_FILE
    if not file.is_file():
        raise StorageError(
            f"{path}: found no {MODEL_FILE}; expected the folder of a model, as `latent-sweep export --to model` "
            "writes it. Check the path"
        )
    found = _sealed_content(file)
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise StorageError(f"{file}: does not check against its digest: it is damaged. Copy or export the model again")
    if found.get("format") != FORMAT:
        raise StorageError(
            f"{file}: is of format {found.get('format')!r:.20}; this version reads {FORMAT}. Export the model again"
        )
    for name, digest in found["files"].items():
        place = path / name
        if not place.resolve().is_relative_to(path):
            raise StorageError(f"{file}: names {name!r:.80}, which lies outside of the folder; expected files within")
        if not place.is_file():
            raise StorageError(f"{place}: is missing. Copy or export the model again")
        if name != "README.md" and file_digest(place) != digest:  # people write into that
            raise StorageError(f"{place}: does not check against its digest. Copy or export the model again")
    return found


def _sealed_content(file: Path) -> Any:
    """Read a sealed file; None where it is damaged, or holds no JSON of ours."""
    try:
        return json.loads(file.read_bytes())["content"] if has_valid_checksum(file) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
