"""Every method, two families: what the device learns and answers is what the CPU learns and answers, in float32."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

FAMILIES = ("tiny-t5", "tiny-llama")
TASKS = ("mood", "ticket", "past")


def compared(device: str, tiny: bool) -> Iterator[tuple[str, float | str, str, str]]:
    """Yield for each method and family the largest relative difference of a step's loss, and how many scores differ."""
    from helpers.methods import OPTIONS

    from latent_sweep.methods import METHODS

    names = ["latent_lora", "replay"] if tiny else sorted(METHODS)
    cases = [(name, {"name": name, **OPTIONS.get(name, {})}, family, device) for name in names for family in FAMILIES]
    processes = min(8, max(1, (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for (name, _, family, _), found in zip(cases, pool.map(_case, cases), strict=True):
            if isinstance(found, str):
                yield f"{name} {family}: failed", found, "", ""
            else:
                off, differing, scores = found
                yield f"{name} {family}: losses off the CPU's", off, "", "below 1e-3"
                if differing:
                    yield f"{name} {family}: scores that differ", f"{differing} of {scores}", "", "none, or near ties"


def _case(case: tuple[str, dict[str, Any], str, str]) -> tuple[float, int, int] | str:
    _, method, family, device = case
    try:
        (losses, scores), (cpu_losses, cpu_scores) = (_run(method, family, place) for place in (device, "cpu"))
    except Exception:
        return traceback.format_exc(limit=-4)
    if len(losses) != len(cpu_losses):
        return f"{len(losses)} losses, on the CPU {len(cpu_losses)}"
    off = max((abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, cpu_losses, strict=True)), default=0.0)
    return off, sum(a != b for a, b in zip(scores, cpu_scores, strict=True)), len(scores)


def _run(method: dict[str, Any], family: str, device: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the losses of all steps and all scores of two seeds, in a pack where the method allows it."""
    import torch

    from latent_sweep.storage.folders import SweepFolder
    from latent_sweep.storage.storage import Storage
    from latent_sweep.sweep.config import parse_sweep
    from latent_sweep.sweep.packs import pack
    from latent_sweep.sweep.plan import expand
    from latent_sweep.training.events import StageDone, Step
    from latent_sweep.training.pack import run_pack

    torch.set_num_threads(1)
    trial = {
        "method": method,
        "backbone": {"name": family, "device": device, "dtype": "float32"},
        "benchmark": {"name": "builtin", "tasks": list(TASKS), "train_per_task": 8, "test_per_task": 4},
        "training": {"learning_rate": 1e-3, "epochs": 2, "batch_size": 4},
        "router": {"components": 2},
    }
    run = {"tracking": {"uri": "none"}, "pack": ["seed"], "resources": {"gpus": int(device == "cuda")}}
    sweep = parse_sweep({"name": "alike", "trial": trial, "search": {"seed": [0, 1]}, "run": run}, "alike")
    losses: list[float] = []
    scores: list[float] = []

    def emit(event: object) -> None:
        if isinstance(event, Step) and event.doing == "learning":
            losses.extend(event.losses.values())
        if isinstance(event, StageDone):
            for matrix in event.matrices:
                scores.extend(value for row in matrix.rows for value in row)

    with tempfile.TemporaryDirectory() as folder:
        for each in pack(expand(sweep), sweep.run.pack):
            run_pack(each, SweepFolder(Storage(Path(folder)), "alike"), emit)
    return losses, scores
