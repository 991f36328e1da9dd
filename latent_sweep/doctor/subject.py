"""The sweep itself: what `run` would refuse, its backbone on this device, and one real step of its first trial."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from latent_sweep.doctor.findings import Finding, fault, ok, warning
from latent_sweep.doctor.machine import free_ram
from latent_sweep.errors import MissingData
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import Sweep
from latent_sweep.sweep.memory import GIB, RESERVE, decided, predict
from latent_sweep.sweep.plan import Run, Trial, pack
from latent_sweep.tracking.addresses import ray_address

if TYPE_CHECKING:
    from latent_sweep.training.context import Context
    from latent_sweep.training.trainer import Trainer


@dataclass(frozen=True)
class Subject:
    """A sweep that this machine is to be trusted with."""

    sweep: Sweep
    trials: Sequence[Trial]
    storage: Storage


def check_plan(subject: Subject) -> Iterator[Finding]:
    """Do what `run` does before it starts anything: engine, pinned backbones, data, tokens, steps.

    That rows are not here is a fault; with a cluster, whose nodes may have them, a warning.
    """
    from latent_sweep.execution.driver import check_engine
    from latent_sweep.sweep.data_checks import check_sweep, missing_rows
    from latent_sweep.sweep.planning import check_devices, check_pinned

    sweep, trials = subject.sweep, subject.trials
    check_engine(sweep.run.engine)
    check_devices(sweep, trials)
    check_pinned(sweep, trials)
    for remark in check_sweep(sweep, trials):
        kind, _, said = remark.partition(": ")
        yield warning("sweep", said) if kind == "warning" else ok("sweep", said)
    if missing := missing_rows(trials):
        said = f"{len(missing)} tasks have rows that are not here: {', '.join(missing)}. {next(iter(missing.values()))}"
        if ray_address() is not None:
            yield warning("data", said, advice="see that every node of the cluster has them")
        else:
            yield fault("data", said)
    looked_at = "engine and backbones" if missing else "engine, data and backbones"
    yield ok("sweep", f"{sweep.source}: {len(trials)} trials, {looked_at} as `run` wants them")


def check_first_step(subject: Subject, device: str) -> Iterator[Finding]:
    """Load the backbone of the first trial, and take one optimizer step on the longest rows of its first task."""
    resources, engine = subject.sweep.run.resources, subject.sweep.run.engine
    trial = subject.trials[0]
    name = trial.settings.backbone.name
    if engine.name != "torch" or resources.workers > 1:
        said = f"{name} is to be run by {resources.workers} workers with {engine.name}, which one process cannot try"
        yield warning("first step", said, advice="run a trial of it: --set trial.training.max_steps=1, one task")
        return
    if device == "cpu" and resources.gpus:
        said = f"the sweep asks for {resources.gpus:g} GPU, and this was looked at on the CPU"
        yield warning(
            "first step", said, advice="run the same on a machine with such a GPU; here only the CPU was tried"
        )
    forecast, free = predict(trial, subject.sweep.run), free_ram()
    if device == "cpu" and forecast is not None and free is not None and forecast.learning + forecast.besides > free:
        needed = _gib(forecast.learning + forecast.besides)
        said = f"not taken: {name} is forecast to need {needed}, and {_gib(free)} of RAM are free"
        yield warning("first step", said, advice="run the same on a machine that has the memory")
        return
    try:
        yield from _step(on_device(trial, device), subject, device)
    except MissingData as error:  # the check of the sweep has said whether it is one
        yield warning("first step", f"not taken: {error}")


def on_device(trial: Trial, device: str) -> Trial:
    """Return the trial with its backbone on this device."""
    backbone = trial.settings.backbone.model_copy(update={"device": device})
    return replace(trial, settings=trial.settings.model_copy(update={"backbone": backbone}))


def _step(trial: Trial, subject: Subject, device: str) -> Iterator[Finding]:
    import torch

    from latent_sweep.backbones.architectures import free_memory, slow_bfloat16
    from latent_sweep.sweep.data_checks import Reader, check_pack
    from latent_sweep.training.context import Context
    from latent_sweep.training.loop import train_pack

    (alone,) = pack([trial])
    decided_pack = decided(alone, subject.sweep.run, free_memory)
    trial = decided_pack.trials[0]
    name, on_gpu, began = trial.settings.backbone.name, device == "cuda", time.monotonic()
    context, told = Context(trial, subject.storage), list[Mapping[str, float]]()
    _ = context.backbone
    loaded = f"{name} ({trial.settings.backbone.dtype}) loaded on {device} in {_since(began)}"
    slow = slow_bfloat16(trial.settings.backbone)
    yield warning("backbone", loaded, advice=slow) if slow else ok("backbone", loaded)
    began = time.monotonic()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # what lies there is counted
    reader = Reader(context.backbone.traits.protocol, context.backbone.tokenizer.backend_tokenizer, context.chat)
    try:
        check_pack(decided_pack, reader, subject.storage.folder)
        training = one_step(trial, context, told)
        if training is None:
            yield ok("first step", f"{trial.settings.method.name} learns nothing at its first task")
            return
        (outcome,) = train_pack([training], context.engine, context.bank)
    finally:
        context.bank.remove()
    if isinstance(outcome, Exception):
        raise outcome
    losses = ", ".join(f"{term} {value:.4g}" for term, value in told[0].items())
    rows = f"{len(training.examples)} rows of {trial.tasks[0].name}"
    yield ok("first step", f"{rows} on {device} in {_since(began)}, preparation included; loss {losses}")
    if on_gpu:
        yield _memory(trial, subject, torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1])


def one_step(trial: Trial, context: Context, told: list[Mapping[str, float]]) -> Trainer | None:
    """Make the training of one step on the longest rows of the first task; None where nothing is learned there.

    Nothing is resumed and nothing is saved.
    """
    from latent_sweep.storage.snapshots import TaskCheckpoint
    from latent_sweep.training.run import ActiveRun

    largest = max(trial.method().rank(), 1)
    training = ActiveRun(Run((trial,), largest), (), context).trainer(
        0, lambda step, steps, losses: told.append(losses)
    )
    if not training.examples:
        return None
    settings = training.settings.model_copy(
        update={"max_steps": 1, "epochs": 1, "checkpoint_every": 2, "warmup_steps": 0}
    )
    rows = sorted(training.examples, key=lambda row: -len(row["prompt_ids"]) - len(row["target_ids"]))
    nowhere = TaskCheckpoint(context.storage, context.storage.folder / "profiles" / "none.safetensors")
    return replace(training, examples=rows[: settings.batch_size], settings=settings, checkpoint=nowhere, validation=())


def _memory(trial: Trial, subject: Subject, peak: int, total: int) -> Finding:
    forecast = predict(trial, subject.sweep.run)
    said = f"{_gib(peak)} of {_gib(total)} of the GPU at most in this step"
    if forecast is None:
        return ok("memory", f"{said}; the shapes are not known without the hub or the model, so nothing was forecast")
    expected = f"up to {_gib(forecast.learning)} as forecast, {_gib(forecast.answering)} to answer"
    if peak > forecast.learning + RESERVE:
        advice = "the forecast is too low here: have `training.micro_batch_size` smaller than it says would do"
        return warning("memory", said, expected, advice)
    if forecast.peak + RESERVE > total:
        advice = "training.micro_batch_size, training.gradient_checkpointing, evaluation.batch_size, or run.engine"
        return fault("memory", said, expected, f"the longest rows will not fit into this GPU: see {advice}")
    return ok("memory", said, expected)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"
