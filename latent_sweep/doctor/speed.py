"""Measures this machine's speed with the sweep's backbones, for the hours that `plan` estimates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from typing import TYPE_CHECKING

from latent_sweep.doctor.findings import Finding, ok, warning
from latent_sweep.doctor.subject import Subject, on_device
from latent_sweep.settings import as_written
from latent_sweep.storage.storage import Storage
from latent_sweep.storage.versions import installed
from latent_sweep.sweep.plan import Trial
from latent_sweep.sweep.profile import Profile, profile_path, write_profile
from latent_sweep.sweep.schema import TrainingSettings

if TYPE_CHECKING:
    from torch import Tensor

    from latent_sweep.methods.protocol import Method
    from latent_sweep.training.context import Context

RANK, BATCH_SIZE, LEARNING_RATE = 32, 8, 1e-2
"""Of the Latent-LoRA adapter that is trained. A few steps at this rate teach it to end its answers."""


def measure_speed(subject: Subject, device: str) -> Iterator[Finding]:
    """Measure each backbone of the sweep and write its profile to the storage."""
    run = subject.sweep.run
    if run.engine.name != "torch" or run.resources.workers > 1:
        yield warning(
            "speed", f"not measured: one process cannot run {run.resources.workers} {run.engine.name} workers"
        )
        return
    backbones = {(t.settings.backbone.name, t.settings.backbone.dtype): t for t in reversed(subject.trials)}
    for (name, dtype), trial in reversed(backbones.items()):
        profile = measure(on_device(trial, device), subject.storage)
        path = profile_path(subject.storage.folder, name, dtype, device)
        write_profile(path, profile)
        rates = f"{profile.tokens_per_second_train:.2g} tokens/s, answers {profile.rows_per_second_generate:.2g} rows/s"
        yield ok("speed", f"{name} ({dtype}) on {device} trains {rates}; written to {path}")


def measure(trial: Trial, storage: Storage) -> Profile:
    """Train a Latent-LoRA adapter for some steps of the trial's first task and answer test rows with it."""
    import numpy as np

    from latent_sweep.storage.snapshots import Snapshot
    from latent_sweep.training.context import Context
    from latent_sweep.training.evaluation import Evaluator

    s, context = trial.settings, Context(trial, storage)
    backbone, on_gpu = context.backbone, s.backbone.device == "cuda"
    steps, test_rows, turns = (25, 48, 3) if on_gpu else (9, 16, 2)
    try:
        method = _method(trial, context)
        tensors, tokens_per_second = _train(trial, context, method, steps)
        prompts = context.tokens(trial, 0, "test")["prompt_ids"][:test_rows]
        evaluator = Evaluator(
            context.engine,
            context.bank,
            method,
            s.evaluation.batch_size,
            s.benchmark.max_target_length,
            trial.spec.stop,
            s.benchmark.references,
            cache=None,
        )
        seconds = []
        for _ in range(turns):
            began = time.perf_counter()
            evaluator.answers([Snapshot("speed", tensors, {})], np.ones((len(prompts), 1)), prompts)
            seconds.append(time.perf_counter() - began)
    finally:
        context.close()
    rows_per_second = len(prompts) / statistics.median(seconds)
    measured_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    device = backbone.device.type
    return Profile(
        s.backbone.name, device, s.backbone.dtype, tokens_per_second, rows_per_second, measured_at, installed()
    )


def _method(trial: Trial, context: Context) -> Method:
    from latent_sweep.methods import method_class

    kind, name = method_class("latent_lora"), trial.settings.backbone.name
    shapes = [(target.out_features, target.in_features) for target in context.backbone.targets.values()]
    rank = min(RANK, *(min(shape) for shape in shapes))
    settings = kind.resolve(as_written(kind.settings_class)(name="latent_lora", rank=rank), name, trial.spec.name)
    return context.method(settings, rank)


def _train(trial: Trial, context: Context, method: Method, steps: int) -> tuple[dict[str, Tensor], float]:
    """Return the adapter's tensors and the tokens trained per second; the first step is not timed."""
    import torch

    from latent_sweep.methods.protocol import TaskData
    from latent_sweep.storage.snapshots import TaskCheckpoint
    from latent_sweep.training.loop import train_pack
    from latent_sweep.training.trainer import Trainer, derived_seed

    rows = list(context.tokens(trial, 0, "train"))[: 4 * BATCH_SIZE]
    moments: list[float] = []

    def generator(purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(purpose))

    learner = method.begin_task(TaskData(trial.tasks[0].name, 0, 1, rows, generator), [])
    settings = TrainingSettings(
        learning_rate=LEARNING_RATE,
        batch_size=BATCH_SIZE,
        epochs=steps,
        max_steps=steps,
        checkpoint_every=steps + 1,
        gradient_checkpointing=False,
    )
    nowhere = TaskCheckpoint(context.storage, context.storage.folder / "profiles" / "none.safetensors")
    trainer = Trainer(
        learner, rows, settings, ("speed",), nowhere, on_step=lambda *step: moments.append(time.perf_counter())
    )
    (outcome,) = train_pack([trainer], context.engine, context.bank)
    if isinstance(outcome, Exception):
        raise outcome
    tokens = [
        sum(len(rows[i]["prompt_ids"]) + len(rows[i]["target_ids"]) for i in trainer.batch(step))
        for step in range(1, steps)
    ]
    rates = [count / (end - began) for count, (began, end) in zip(tokens, pairwise(moments), strict=True)]
    return learner.finish(), statistics.median(rates)
