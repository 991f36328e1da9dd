"""What running a sweep would take, and what the store already has: the text of `latent-sweep plan`. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from latent_sweep.config import RunSettings, Sweep
from latent_sweep.errors import DataError
from latent_sweep.plan import Pack, Trial
from latent_sweep.report import label, short_names
from latent_sweep.settings import canonical_json
from latent_sweep.snapshots import SnapshotStore


@dataclass(frozen=True)
class Estimate:
    """What running a sweep would take, and what the store already has."""

    trials: int
    trainings: int
    stages: int
    """Tasks to learn if every trial learned its own."""
    distinct: int | None
    """Snapshots that differ; None where the data is not at hand."""
    stored: int | None
    """Of those, already in the store."""
    missing_data: str | None
    """Why lineages are unknown."""


def estimate(trials: Sequence[Trial], storage: Path) -> Estimate:
    """Count trials, trainings and stages, with what the store already holds."""
    store = SnapshotStore(storage / "snapshots")
    missing = None
    lineages: set[str] | None = set()
    try:
        lineages = {lineage for trial in trials for lineage in trial.lineages()}
    except DataError as error:
        lineages, missing = None, str(error)
    return Estimate(
        trials=len(trials),
        trainings=len({trial.training_id for trial in trials}),
        stages=sum(len(trial.tasks) for trial in trials),
        distinct=None if lineages is None else len(lineages),
        stored=None if lineages is None else sum(lineage in store for lineage in lineages),
        missing_data=missing,
    )


def describe_plan(sweep: Sweep, trials: Sequence[Trial], packs: Sequence[Pack], storage: Path) -> str:
    """What `latent-sweep plan` prints."""
    found = estimate(trials, storage)
    backbones = {f"{t.settings.backbone.name} ({t.settings.backbone.dtype})": None for t in trials}
    sequences = {f"{t.spec.name}, order {t.settings.benchmark.order}": t.tasks for t in trials}
    lines = [f"sweep {sweep.name}  ({sweep.source})", f"  backbone   {', '.join(backbones)}"]
    for name, tasks in sequences.items():
        lines.append(f"  benchmark  {name}, {len(tasks)} tasks: {' '.join(task.name for task in tasks)}")
    lines += [
        f"  varies     {_axes_text(sweep)}",
        "",
        f"  {found.trials} trials, {found.trainings} distinct trainings in {len(packs)} packs",
        f"  {found.stages} tasks to learn if every trial trained for itself",
    ]
    if found.distinct is None or found.stored is None:
        lines.append(f"  reuse unknown, the data is not at hand: {found.missing_data}")
    else:
        missing = found.distinct - found.stored
        lines.append(f"  {found.distinct} distinct stages, {found.stored} in the store, {missing} to learn")
    lines += [f"  each pack asks for {_resources_text(sweep.run)}", "", "  training          trials"]
    return "\n".join(lines + [f"  {pack.training_id}  {_pack_text(pack)}" for pack in packs])


def _pack_text(pack: Pack) -> str:
    """What the trials of a pack have in common, and what tells them apart."""
    names = short_names(path for trial in pack.trials for path in trial.values)
    common = {
        path: value
        for path, value in pack.trials[0].values.items()
        if all(trial.values.get(path) == value for trial in pack.trials)
    }
    text = f"{len(pack.trials)}: {label({names[path]: value for path, value in common.items()})}"
    variants = [label({names[p]: v for p, v in trial.values.items() if p not in common}) for trial in pack.trials]
    if len(variants) == 1:
        return text
    shown = variants if len(variants) <= 4 else [*variants[:3], f"{len(variants) - 3} more"]
    return f"{text} | {', '.join(shown)}"


def _axes_text(sweep: Sweep) -> str:
    axes = [f"{axis} {canonical_json(values)}" for axis, values in sweep.grid.items()]
    axes += [f"{axis} {draw.kind}{list(draw.values)}" for axis, draw in sweep.draws.items()]
    return "; ".join(axes) or "nothing"


def _resources_text(run: RunSettings) -> str:
    r = run.resources
    accelerator = f" of type {r.accelerator}" if r.accelerator else ""
    return f"{r.cpus:g} CPU, {r.gpus:g} GPU{accelerator}"
