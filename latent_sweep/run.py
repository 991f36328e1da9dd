"""The main job: python -m latent_sweep.run SWEEP.yaml

Read the sweep, run what is missing, mirror it into MLflow, print the comparison. The same command again resumes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from latent_sweep.config import RunSettings, Sweep, load_sweep
from latent_sweep.forecast import describe_plan
from latent_sweep.plan import Member, Pack, Trial, expand, pack
from latent_sweep.settings import content_hash
from latent_sweep.snapshots import write_atomically, write_json
from latent_sweep.tracking import SweepFolder, status


def run_sweep(path: str, overrides: Sequence[str] = (), local: bool = False) -> int:
    """Run a sweep file to its end; returns the number of trials that failed.

    Raises:
        LatentSweepError: the sweep cannot be started; the message says what to change.
    """
    from latent_sweep.backends.mlflow_mirror import MirrorThread, mirror_for
    from latent_sweep.progress import ProgressPrinter
    from latent_sweep.report import render, summarise

    sweep = load_sweep(path, overrides)
    trials = expand(sweep)
    packs = pack(trials, sweep.run.pack)
    storage = Path(sweep.run.storage).resolve()
    print(describe_plan(sweep, trials, packs, storage), flush=True)
    folder = write_sweep(sweep, trials, storage)
    todo = _incomplete(packs, folder.path)
    trainings, missing = (sum(len(p.members) for p in some) for some in (packs, todo))
    if missing < trainings:
        _tell(f"{trainings - missing} of {trainings} trainings are complete in {folder.path}")
    mirror = mirror_for(sweep.run.tracking.uri, folder)
    thread = MirrorThread(mirror, tell=_tell)
    thread.start()
    try:
        if todo:
            with ProgressPrinter(folder, _tell):
                if local:
                    _run_here(todo, storage, folder.path, sweep.run)
                else:
                    from latent_sweep.backends.ray_tune import run_on_ray

                    run_on_ray(todo, storage, folder.path, sweep.run)
    finally:
        thread.stop()
    print(f"\n{render(summarise(folder))}\n\nresults   {folder.path}")
    if link := mirror.link():
        print(f"compare   {mirror.ui_command()}\n          {link}", flush=True)
    return sum(status(trial.events()) not in ("finished", "stopped") for trial in folder)


def write_sweep(sweep: Sweep, trials: Sequence[Trial], storage: Path) -> SweepFolder:
    """Write what the sweep is: the file as resolved, and each trial's complete settings."""
    folder = storage / sweep.name
    resolved = {
        "name": sweep.name,
        "trial": dict(sweep.trial),
        "search": {axis: list(values) for axis, values in sweep.grid.items()}
        | {axis: draw.written() for axis, draw in sweep.draws.items()},
        "run": sweep.run.model_dump(mode="json"),
    }
    write_atomically(folder / "sweep.yaml", _yaml(resolved))
    entries = []
    for trial in trials:
        settings = trial.settings.model_dump(mode="json")
        write_atomically(folder / "trials" / trial.trial_id / "trial.yaml", _yaml(settings))
        entries.append(
            {
                "trial_id": trial.trial_id,
                "training_id": trial.training_id,
                "values": {axis: trial.values.get(axis) for axis in sweep.axes},
                "params": _flat(settings) | {"benchmark.tasks": " ".join(task.name for task in trial.tasks)},
                "n_tasks": len(trial.tasks),
            }
        )
    content = {
        "name": sweep.name,
        "sweep_id": content_hash(sorted(trial.trial_id for trial in trials)),
        "axes": list(sweep.axes),
        "seed_axis": "seed",
        "tracking_uri": sweep.run.tracking.uri,
        "trials": entries,
    }
    write_json(folder / "sweep.json", content)
    return SweepFolder(folder)


def _incomplete(packs: Sequence[Pack], folder: Path) -> list[Pack]:
    """The packs with those of their members that have something missing."""
    from latent_sweep.trial import TrialFiles

    def lacks(member: Member) -> bool:
        return not all(TrialFiles(trial, folder).complete for trial in member.trials)

    lacking = [Pack(tuple(filter(lacks, p.members))) for p in packs]
    return [p for p in lacking if p.members]


def _run_here(packs: Sequence[Pack], storage: Path, folder: Path, run: RunSettings) -> None:
    """Run packs one after another in this process: for debuggers, tests, and machines without Ray."""
    from latent_sweep.packing import best_size, measure, split
    from latent_sweep.progress import ProgressWriter
    from latent_sweep.trial import StageDone, Step, run_pack

    if run.pack == "auto":
        packs = [part for p in packs for part in split(p, best_size(measure(p, storage)), slots=1)]
    for p in packs:
        progress = ProgressWriter(folder, p)

        def emit(event: Step | StageDone, progress: ProgressWriter = progress) -> None:
            if isinstance(event, Step):
                progress.write(event)

        try:
            run_pack(p, storage, folder, emit)
        except Exception:
            logging.getLogger(__name__).exception("pack %s failed; the others go on", p.pack_id)


def _tell(line: str) -> None:
    print(line, flush=True)


def _yaml(content: Any) -> bytes:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict):
        return {prefix: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return flat


if __name__ == "__main__":
    from latent_sweep.cli import main

    sys.exit(main(["run", *sys.argv[1:]]))
