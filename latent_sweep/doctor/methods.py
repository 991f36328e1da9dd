"""Every registered method, on a tiny backbone of each family: two tasks, learned and scored as a sweep does it.

On a GPU beside the same on the CPU: rounding aside, they must agree. On a CPU beside itself: bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from latent_sweep.doctor.findings import Check, Finding, fault, ok, warning
from latent_sweep.methods import METHODS, method_class
from latent_sweep.settings import as_written
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.memory import RESERVE, predict
from latent_sweep.sweep.plan import expand, pack
from latent_sweep.sweep.schema import RunSettings

if TYPE_CHECKING:
    from latent_sweep.sweep.plan import Pack, Trial
    from latent_sweep.training.engine import Engine

FAMILIES = ("tiny-llama", "tiny-t5")
TASKS = ("mood", "ticket")

SMALL: Mapping[str, Mapping[str, Any]] = {"lfpt5": {"prompt_length": 4, "sample_length": 16, "tries": 2}}
"""Settings that fit the tiny backbones, of methods without a rank."""
RANK = 4
"""Of all others."""

RELATIVE, ABSOLUTE = 2e-3, 1e-4
"""How far losses in float32 may be apart on two devices: Adam takes a whole step where a gradient is nearly zero."""
FEW_ANSWERS = 0.25
"""Share of answers that may differ by a near tie of two tokens, where all losses agree; the weights are random."""

TROUBLE = (
    "do not trust results of this machine: run it again; if it stays, try `--device cpu`, other versions of torch and "
    "of the driver, and another card"
)


@dataclass(frozen=True)
class Outcome:
    """What one method's run has left behind."""

    losses: Sequence[Mapping[str, float]]
    """Terms of every optimizer step, in order."""
    answers: Sequence[str]
    snapshots: Mapping[str, str]
    """Digest of the tensors by lineage."""
    peak: int = 0
    """Bytes of GPU memory, at most; 0 on a CPU."""
    forecast: int = 0


def method_checks(device: str, methods: Sequence[str] = tuple(METHODS)) -> list[tuple[str, Check]]:
    """Return a check for each method on each family: on the device and on the CPU, or twice on the CPU."""
    return [(f"{name} on {f}", partial(check_method, name, f, device)) for f in FAMILIES for name in methods]


def check_method(name: str, family: str, device: str) -> Iterator[Finding]:
    """Learn and score two tasks on the device, and again on the CPU, and compare."""
    what = f"{name} on {family}"
    there, here = (outcome(name, family, place) for place in (device, "cpu"))
    steps = f"{len(here.losses)} steps, {len(here.answers)} answers"
    if device == "cpu":
        if said := differs(there, here):
            yield fault(what, f"two runs on the CPU differ: {said}", "the same bits", TROUBLE)
        else:
            yield ok(what, f"{steps}: twice the same bits")
        return
    yield from _against_cpu(what, steps, there, here)
    if there.forecast and there.peak > there.forecast + RESERVE:
        said = f"took {there.peak / 2**20:,.0f} MiB of the GPU"
        yield warning(
            what,
            said,
            f"{there.forecast / 2**20:,.0f} MiB as forecast",
            "give larger backbones more room than `plan` says",
        )


def _against_cpu(what: str, steps: str, there: Outcome, here: Outcome) -> Iterator[Finding]:
    if said := apart(there.losses, here.losses):
        yield fault(what, f"the GPU computes other losses than the CPU: {said}", "the same to rounding", TROUBLE)
        return
    other = sum(a != b for a, b in zip(there.answers, here.answers, strict=True))
    said = f"losses as on the CPU to rounding, {other} of {len(here.answers)} answers differ"
    if other > FEW_ANSWERS * len(here.answers):
        yield fault(what, said, "the same answers", TROUBLE)
    elif other:
        yield warning(what, said, "the same answers", "random weights have near ties; more than a few would be a fault")
    else:
        yield ok(what, f"{steps}: as on the CPU")


# --- comparisons -----------------------------------------------------------------------------------------------------


def apart(found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> str:
    """Say where losses are further apart than rounding explains; nothing where they are not."""
    if len(found) != len(expected):
        return f"{len(found)} steps instead of {len(expected)}"
    for step, (mine, other) in enumerate(zip(found, expected, strict=True), start=1):
        if mine.keys() != other.keys():
            return f"step {step} has the terms {', '.join(mine)} instead of {', '.join(other)}"
        for term, value in other.items():
            if not math.isclose(mine[term], value, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                return f"step {step}, {term}: {mine[term]:.6g} instead of {value:.6g}"
    return ""


def differs(one: Outcome, other: Outcome) -> str:
    """Say where two runs are not the same to the bit; nothing where they are."""
    for step, (mine, its) in enumerate(zip(one.losses, other.losses, strict=False), start=1):
        if mine != its:
            return f"losses from step {step} on, {dict(mine)} and {dict(its)}"
    if len(one.losses) != len(other.losses):
        return f"{len(one.losses)} steps and {len(other.losses)}"
    if one.snapshots != other.snapshots:
        return "equal losses, but other bytes in a snapshot"
    if number := sum(a != b for a, b in zip(one.answers, other.answers, strict=True)):
        return f"{number} of {len(one.answers)} answers"
    return ""


# --- runs ------------------------------------------------------------------------------------------------------------


@cache
def loaded(family: str, device: str) -> Engine:
    """Return an engine that holds a tiny backbone and gives it to every run."""
    from latent_sweep.backbones.loading import Backbone, load_backbone
    from latent_sweep.backbones.registry import BackboneSettings
    from latent_sweep.training.engine import Engine

    class Loaded(Engine):
        def load(self, settings: BackboneSettings) -> Backbone:
            return self.backbone

    settings = BackboneSettings.model_validate({"name": family, "dtype": "float32", "device": device})
    return Loaded(backbone=load_backbone(settings))


def outcome(name: str, family: str, device: str) -> Outcome:
    """Learn and score two tasks with a method, from nothing, and return what came of it."""
    import torch

    from latent_sweep.training.pack import run_pack

    on_gpu = device == "cuda"
    with TemporaryDirectory(prefix="latent-sweep-doctor-") as folder, _quiet():
        one, trial = _tiny(name, family, device)
        sweep, events = SweepFolder(Storage(Path(folder)), "doctor"), list[Any]()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run_pack(one, sweep, events.append, engine=loaded(family, device))
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        steps = [event.losses for event in events if getattr(event, "doing", "") == "learning"]
        return Outcome(steps, _answers(sweep, trial), _snapshots(sweep), peak, _forecast(trial))


def _tiny(name: str, family: str, device: str) -> tuple[Pack, Trial]:
    has_rank = "rank" in as_written(method_class(name).settings_class).model_fields
    content = {
        "name": "doctor",
        "trial": {
            "method": {"name": name, **({"rank": RANK} if has_rank else {}), **SMALL.get(name, {})},
            "backbone": {"name": family, "dtype": "float32", "device": device},
            "benchmark": {"name": "builtin", "tasks": list(TASKS), "train_per_task": 8, "test_per_task": 4},
            "training": {"learning_rate": 0.01, "epochs": 2, "batch_size": 4},
            "router": {"components": 2},
        },
        "run": {"tracking": {"uri": "none"}},
    }
    (one,) = pack(expand(parse_sweep(content, "doctor")))
    return one, one.trials[0]


def _answers(sweep: SweepFolder, trial: Trial) -> list[str]:
    folder = sweep.path / "trials" / trial.trial_id / "predictions"
    lines = [line for task in TASKS for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [json.loads(line)["prediction"] for line in lines]


def _snapshots(sweep: SweepFolder) -> dict[str, str]:
    paths = sorted((sweep.storage.folder / "snapshots").glob("*.safetensors"))
    return {path.stem: sha256(path.read_bytes()).hexdigest() for path in paths}


def _forecast(trial: Trial) -> int:
    forecast = predict(trial, RunSettings())
    return forecast.peak if forecast is not None else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from standing among findings what a tiny trial logs, such as that nothing of it can be replayed."""
    ours = logging.getLogger("latent_sweep")
    before = ours.level
    ours.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        ours.setLevel(before)
