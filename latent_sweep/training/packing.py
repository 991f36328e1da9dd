"""The number of runs per pack, and the speed of a backbone, measured on the machine that will run them."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import numpy as np
import torch
from torch import Tensor

from latent_sweep.methods import method_class
from latent_sweep.methods.protocol import Method, TaskData
from latent_sweep.settings import as_written, content_hash
from latent_sweep.storage.checksummed import read_checksummed_json, write_checksummed_json
from latent_sweep.storage.failures import free_frames
from latent_sweep.storage.snapshots import Snapshot, TaskCheckpoint
from latent_sweep.storage.storage import Storage
from latent_sweep.storage.versions import installed
from latent_sweep.sweep.packs import Pack
from latent_sweep.sweep.profile import Profile
from latent_sweep.sweep.schema import TrainingSettings
from latent_sweep.sweep.trial import Trial
from latent_sweep.training.context import Context, hardware
from latent_sweep.training.engine import forget_backbone
from latent_sweep.training.loop import train_pack
from latent_sweep.training.run import ActiveRun
from latent_sweep.training.trainer import Progress, Trainer, generators

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
    """Time steps of packs of 1, 2, 4 and 8 until a larger one is slower; only the timings are stored."""
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
    settings, checkpoint = of_steps(run.settings.training, 1 + STEPS), _no_checkpoint(run.context.storage)
    return replace(run.trainer(0, on_step), settings=settings, checkpoint=checkpoint, validation=(), tasks=1)


def of_steps(settings: TrainingSettings, steps: int) -> TrainingSettings:
    return settings.model_copy(update={"max_steps": steps, "epochs": steps, "checkpoint_every": steps + 1})


def _no_checkpoint(storage: Storage) -> TaskCheckpoint:
    return TaskCheckpoint(storage, storage.folder / "profiles" / "none.safetensors")


_SIZES = ("batch_size", "micro_batch_size", "gradient_checkpointing", "optimizer")


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


# --- a backbone ------------------------------------------------------------------------------------------------------

RANK, BATCH_SIZE, LEARNING_RATE = 32, 8, 1e-2
"""Of the adapter that is trained. A few steps at this rate teach it to end its answers."""


def measure_backbone(trial: Trial, storage: Storage, name: str) -> Profile:
    """Train an adapter of the named method for some steps of the trial's first task and answer test rows with it."""
    context, b = Context(trial, storage), trial.settings.backbone
    device = context.backbone.device.type
    steps, test_rows, turns = (25, 48, 3) if device == "cuda" else (9, 16, 2)
    try:
        shapes = [(target.out_features, target.in_features) for target in context.backbone.targets.values()]
        rank, kind = min(RANK, *(min(shape) for shape in shapes)), method_class(name)
        settings = kind.resolve(as_written(kind.settings_class)(name=name, rank=rank), b.name, trial.spec.name)
        method = context.method(settings, rank)
        tensors, tokens_per_second = _train(trial, context, method, steps)
        prompts = context.tokens(trial, 0, "test")["prompt_ids"][:test_rows]
        evaluator, seconds = context.evaluator(trial, method, cache=None), []
        for _ in range(turns):
            began = time.perf_counter()
            evaluator.answers([Snapshot("speed", tensors, {})], np.ones((len(prompts), 1)), prompts)
            seconds.append(time.perf_counter() - began)
    finally:
        context.close()
    rows_per_second = len(prompts) / statistics.median(seconds)
    measured_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Profile(b.name, device, b.dtype, tokens_per_second, rows_per_second, measured_at, installed())


def _train(trial: Trial, context: Context, method: Method, steps: int) -> tuple[dict[str, Tensor], float]:
    """Return the adapter's tensors and the tokens trained per second; the first step is not timed."""
    rows = list(context.tokens(trial, 0, "train"))[: 4 * BATCH_SIZE]
    moments: list[float] = []
    learner = method.begin_task(TaskData(trial.tasks[0].name, 0, 1, rows, generators()), [])
    given = {"learning_rate": LEARNING_RATE, "batch_size": BATCH_SIZE, "epochs": 1, "gradient_checkpointing": False}
    settings, checkpoint = of_steps(TrainingSettings.model_validate(given), steps), _no_checkpoint(context.storage)
    trainer = Trainer(
        learner, rows, settings, ("speed",), checkpoint, on_step=lambda *step: moments.append(time.perf_counter())
    )
    (outcome,) = train_pack([trainer], context.engine, context.bank)
    if isinstance(outcome, Exception):
        raise outcome
    tokens = [
        sum(len(rows[i]["prompt_ids"]) + len(rows[i]["target_ids"]) for i in trainer.batch(step))
        for step in range(1, steps)
    ]
    rates = [count / (end - began) for count, (began, end) in zip(tokens, itertools.pairwise(moments), strict=True)]
    return learner.finish(), statistics.median(rates)
