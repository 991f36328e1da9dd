"""Parts of the kit: what tensors hold after each of several tasks, and a training that does not fit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import latent_sweep
from latent_sweep.storage.failures import free_memory
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.packs import pack
from latent_sweep.sweep.plan import expand
from latent_sweep.training.engine import forget_backbone
from latent_sweep.training.events import Event, StageDone
from latent_sweep.training.pack import run_pack

if TYPE_CHECKING:
    from gpu.kit import Setup

TASKS = ("mood", "topic", "ticket", "crew", "date", "past")


def leaks(setup: Setup) -> Iterator[tuple[str, float | str, str, str]]:
    """Yield by how much what tensors hold has grown between the second task and the last, for three methods."""
    storage = Storage(Path(tempfile.mkdtemp(dir=setup.folder)))
    for method in ("latent_lora", "ewc", "gain_lora"):
        content = _content(setup, f"leak_{method}", method, TASKS[:3] if setup.tiny else TASKS, 8)
        (one,) = pack(expand(parse_sweep(content, "leak")))
        held: list[float] = []

        def emit(event: Event, held: list[float] = held) -> None:
            if isinstance(event, StageDone):
                setup.sync()
                held.append(setup.held())

        run_pack(one, SweepFolder(storage, content["name"]), emit)
        yield f"{method}: {len(held)} tasks, growth after the second", held[-1] - held[1], "MiB", "0, a few for EWC"


def too_little(setup: Setup) -> Iterator[tuple[str, float | str, str, str]]:
    """Yield how a trial ends that has three quarters of the memory that its training takes; on a CPU it has all."""
    folder = Path(tempfile.mkdtemp(dir=setup.folder))
    content = _content(setup, "too_little", "latent_lora", TASKS[:1], 4 if setup.tiny else 32)
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    latent_sweep.run_sweep(content, local=True, storage=str(folder / "enough"), progress=False)
    if setup.device == "cuda":
        forget_backbone()
        free_memory()
        held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        limit = held + 0.75 * (peak - held)
        yield "limited to", limit / 2**30, "GiB", f"of the peak of {peak / 2**30:.2f}"
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    sweep = latent_sweep.run_sweep(content, local=True, storage=str(folder / "short"), progress=False)
    (trial,) = sweep.trials().to_dict("records")
    yield "too little memory: the trial", trial["status"], f"{trial['attempts']} attempts", "finished, in 2 on a GPU"
    if setup.device == "cuda":
        forget_backbone()
        free_memory()
        yield "held after it", (torch.cuda.memory_allocated() - held) / 2**20, "MiB", "0"
        torch.cuda.set_per_process_memory_fraction(1.0)


def _content(setup: Setup, name: str, method: str, tasks: Sequence[str], batch_size: int) -> Mapping[str, Any]:
    backbone = "tiny-llama" if setup.tiny else "smollm2-135m"
    rows = {"train_per_task": 2 * batch_size, "test_per_task": 4, "max_target_length": 12}
    trial = {
        "method": {"name": method, **({"rank": 8} if method == "latent_lora" else {})},
        "backbone": {"name": f"random:{backbone}", "dtype": "bfloat16", "device": setup.device},
        "benchmark": {"name": "builtin", "tasks": list(tasks), **rows},
        "training": {"learning_rate": 1e-4, "epochs": 1, "batch_size": batch_size, "gradient_checkpointing": False},
        "router": {"components": 2},
    }
    resources = {"gpus": int(setup.device == "cuda")}
    return {"name": name, "trial": trial, "run": {"tracking": {"uri": "none"}, "resources": resources}}
