"""Tiny sweeps that the tests of the sweep file, the plan and the runs share."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from latent_sweep.tracking import SweepFolder

TINY: dict[str, Any] = {
    "name": "tiny",
    "trial": {
        "method": {"name": "latent_lora", "rank": 16, "alpha": 64.0, "ortho_lambda": 0.001},
        "backbone": {"name": "tiny-llama", "dtype": "float32"},
        "benchmark": {"name": "builtin", "tasks": ["mood", "ticket"], "train_per_task": 32, "test_per_task": 12},
        "training": {"learning_rate": 0.05, "epochs": 6, "batch_size": 8},
    },
    "search": {"seed": [0, 1], "router.components": [1, 2]},
    "run": {"tracking": {"uri": "none"}},
}
"""A sweep that runs in seconds and whose scores are not all zero: two trainings of two tasks, four trials."""


def tiny(**changes: Any) -> dict[str, Any]:
    """`TINY` with some settings changed; a double underscore stands for a dot, None removes: `search__seed=[3]`."""
    content = copy.deepcopy(TINY)
    for path, value in changes.items():
        *groups, last = path.split("__")
        group = content
        for name in groups:
            group = group.setdefault(name, {})
        if value is None:
            group.pop(last, None)
        else:
            group[last] = value
    return content


def write(folder: Path, content: dict[str, Any]) -> str:
    """`content` as a sweep file in `folder`, below which it stores what it computes; returns the file's path."""
    content = copy.deepcopy(content)
    content.setdefault("run", {}).setdefault("storage", str(folder / "runs"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(path)


def sweep_folder(folder: Path, name: str = "tiny") -> SweepFolder:
    """What a sweep file of `write` has left behind."""
    return SweepFolder(folder / "runs" / name)


def results(sweep: SweepFolder) -> dict[str, bytes]:
    """Every file that says what came out, byte for byte: score matrices, predictions and snapshots."""
    files = [path for trial in sweep for path in (trial.path / "scores.json", *trial.path.glob("predictions/*"))]
    files += sorted((sweep.storage / "snapshots").glob("*.safetensors"))
    files += sorted((sweep.storage / "snapshots").glob("*.json"))
    return {str(path.relative_to(sweep.storage)): path.read_bytes() for path in files}


def events(sweep: SweepFolder, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in all journals of a sweep."""
    return [event for trial in sweep for event in trial.events() if event["event"] == kind]


def write_benchmark(folder: Path, tasks: tuple[str, ...] = ("left", "right"), rows: int = 24) -> Path:
    """A user's own benchmark folder with two-word answers; returns the folder."""
    for number, task in enumerate(tasks):
        (folder / task).mkdir(parents=True)
        for split, count in (("train", rows), ("test", 6)):
            content = [
                {
                    "id": f"{task}-{split}-{i}",
                    "input": f"{split} row {i} of {task}",
                    "output": f"{'ab'[(i + number) % 2]}x",
                }
                for i in range(count)
            ]
            (folder / task / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")
    benchmark = {"name": "own", "max_target_length": 4, "tasks": [{"name": t, "metric": "accuracy"} for t in tasks]}
    (folder / "benchmark.yaml").write_text(yaml.safe_dump(benchmark), encoding="utf-8")
    return folder
