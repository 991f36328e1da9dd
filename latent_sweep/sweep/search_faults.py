"""The faults of a search as a whole: its size, its searcher, and its packs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from latent_sweep.sweep.axes import MOST_TRIALS, Draw, leaf_paths
from latent_sweep.sweep.overrides import put
from latent_sweep.sweep.schema import RunSettings


def size_faults(grid: Mapping[str, Sequence[Any]], samples: int) -> list[str]:
    points = samples * math.prod(map(len, grid.values()))
    if points <= MOST_TRIALS:
        return []
    drawn = "draw fewer" if samples > 1 else "draw some of them at random"
    return [
        f"search: {points:,} points; expected at most {MOST_TRIALS:,}. Leave values out, split them into several sweep "
        f"files, or {drawn} (run.search.num_samples)"
    ]


def sample_faults(search: Mapping[str, Any], samples: int) -> list[str]:
    if samples == 1 or any(isinstance(values, dict) for values in search.values()):
        return []
    return [
        f"run.search.num_samples: found {samples}, but it has no effect without a random axis in search. Leave it "
        "out, draw an axis, e.g. training.learning_rate: {loguniform: [1.0e-4, 1.0e-2]}, or add name: optuna"
    ]


def score_on(rows: str, template: dict[str, Any]) -> list[str]:
    benchmark = template.get("benchmark")
    written = benchmark.get("score_on") if isinstance(benchmark, dict) else None
    if written not in (None, rows):
        return [f"trial.benchmark.score_on: found {written}, but run.search.on is {rows}; set the one in run.search"]
    put(template, ["benchmark", "score_on"], rows)
    return []


def searcher_faults(
    run: RunSettings, axes: Mapping[str, Sequence[Any]], draws: Mapping[str, Draw], tuned: bool
) -> list[str]:
    packed = run.pack if isinstance(run.pack, tuple) else ()
    faults = ["tune: a searcher chooses settings, too; leave out tune, or run.search.name"] if tuned else []
    if run.pack == "auto" or (isinstance(run.pack, int) and run.pack > 1):
        faults.append(f"run.pack: found {run.pack}; with a searcher expected 1, or the axes of a point, e.g. [seed]")
    if not set(axes) - set(packed):
        faults.append(f"search: {run.search.name} has no axis to choose from; add one that is not in run.pack")
    faults += [
        f"run.pack: found {axis}, a random axis; with a searcher expected lists" for axis in packed if axis in draws
    ]
    if run.search.num_samples == 1 or run.search.num_samples > MOST_TRIALS:
        faults.append(f"run.search.num_samples: found {run.search.num_samples:,}; expected 2 to {MOST_TRIALS:,} points")
    setters = {path: axis for axis, path in leaf_paths(axes)}
    if "seed" in setters and setters["seed"] not in packed:
        faults.append(
            "search.seed: a searcher would choose the luckiest seed; set trial.seed, or add run.pack: [seed], so that "
            "the mean over the seeds counts"
        )
    if "benchmark.score_on" in setters:
        faults.append(f"search.{setters['benchmark.score_on']}: sets benchmark.score_on; set run.search.on")
    return faults


def pack_faults(axis: str, searched: Sequence[str]) -> list[str]:
    if axis not in searched:
        return [f"run.pack: found {axis!r}, which search does not vary; its axes are {', '.join(searched) or 'none'}"]
    shared = axis in ("method.name", "training.gradient_checkpointing")
    if axis == "seed" or (axis.startswith(("method.", "training.")) and not shared):
        return []
    return [
        f"run.pack: found {axis!r}; trainings of one pack may differ only in seed, method.* (not its name) and "
        "training.*"
    ]
