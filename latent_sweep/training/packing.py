"""The number of runs per pack, measured on the machine that will run them."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from latent_sweep.settings import content_hash
from latent_sweep.storage.checksummed import read_checksummed_json, write_checksummed_json
from latent_sweep.storage.failures import free_frames
from latent_sweep.storage.snapshots import TaskCheckpoint
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.plan import Pack
from latent_sweep.training.context import Context, hardware
from latent_sweep.training.engine import forget_backbone
from latent_sweep.training.loop import train_pack
from latent_sweep.training.run import ActiveRun
from latent_sweep.training.trainer import Progress, Trainer

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8)
STEPS = 3
"""Optimizer steps timed for each size, after one that is not."""
WORTHWHILE = 1.05
"""A larger pack must be faster than the best smaller one by this factor, in steps of runs per second."""


@dataclass(frozen=True)
class PackTiming:
    """The speed of packs of one size on this machine."""

    size: int
    run_steps_per_second: float
    peak_gib: float | None
    """Peak GPU memory while training; None on a CPU."""


def measure(pack: Pack, storage: Storage, threads: int | None = None) -> list[PackTiming]:
    """Time a few steps of the pack's first task in packs of 1, 2, 4 and 8, until a larger one is slower.

    The timings are stored by hardware, method, backbone and batch; nothing else is.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    path = storage.folder / "profiles" / f"pack-{_key(pack)}.json"
    if (stored := read_checksummed_json(path)) is not None:
        return [PackTiming(**timing) for timing in stored]
    context = Context(pack.trials[0], storage)
    timings: list[PackTiming] = []
    for size in SIZES:
        try:
            timings.append(_time(pack, context, size))
        except Exception as error:  # out of memory, or a run fails, which will be reported when it runs
            log.warning("packs of %s could not be measured: %s", size, error)
            free_frames(error)
            forget_backbone()
            break
        if len(timings) > 1 and timings[-1].run_steps_per_second < timings[-2].run_steps_per_second:
            break
    context.close()
    if timings:
        write_checksummed_json(path, [vars(timing) for timing in timings], indent=1)
    return timings


def best_size(timings: Sequence[PackTiming]) -> int:
    """Return the smallest size that no larger one beats by `WORTHWHILE`; 1 if none could be measured."""
    if not timings:
        return 1
    best = timings[0]
    for timing in timings[1:]:
        if timing.run_steps_per_second > WORTHWHILE * best.run_steps_per_second:
            best = timing
    return best.size


def split(pack: Pack, size: int, slots: int) -> list[Pack]:
    """Split the pack into parts of at most `size` runs, small enough to keep every slot of the cluster busy."""
    size = max(1, min(size, math.ceil(len(pack.runs) / max(1, slots))))
    return [Pack(pack.runs[i : i + size]) for i in range(0, len(pack.runs), size)]


def _time(pack: Pack, context: Context, size: int) -> PackTiming:
    moments: list[float] = []
    cuda = context.backbone.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def on_step(step: int, steps: int, losses: Mapping[str, float]) -> None:
        moments.append(time.monotonic())

    runs = [ActiveRun(pack.runs[i % len(pack.runs)], [], context) for i in range(size)]
    outcomes = train_pack([_first_steps(run, on_step) for run in runs], context.engine, context.bank)
    if failures := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        raise failures[0]
    laps = moments[size - 1 :: size]  # the end of each step
    seconds = statistics.median(end - begin for begin, end in itertools.pairwise(laps))
    return PackTiming(size, size / seconds, torch.cuda.max_memory_allocated() / 2**30 if cuda else None)


def _first_steps(run: ActiveRun, on_step: Progress) -> Trainer:
    settings = run.settings.training.model_copy(
        update={"max_steps": 1 + STEPS, "epochs": 1 + STEPS, "checkpoint_every": 2 + STEPS}
    )
    nowhere = TaskCheckpoint(run.context.storage, run.context.storage.folder / "profiles" / "none.safetensors")
    return replace(run.trainer(0, on_step), settings=settings, checkpoint=nowhere, validation=(), tasks=1)


_SIZES = ("batch_size", "micro_batch_size", "gradient_checkpointing", "optimizer")
"""Training settings that determine memory and speed."""


def _key(pack: Pack) -> str:
    s = pack.trials[0].settings
    key = {
        "method": s.method.training_identity(),
        "backbone": s.backbone.identity(),
        **{name: getattr(s.training, name) for name in _SIZES},
        "benchmark": s.benchmark.training_identity(),
        "hardware": hardware(),
        "share": torch.cuda.get_per_process_memory_fraction() if torch.cuda.is_available() else 1.0,
    }
    return content_hash(key)
