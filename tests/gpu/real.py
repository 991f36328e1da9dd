"""A comparison of methods with a real backbone on real tasks, by several processes that share the device.

The scores must be those of a CPU within the spread of the seeds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

SWEEP = Path(__file__).parents[2] / "sweeps/common_rate_superni.yaml"
TASKS = ("task363", "task1510", "task591", "task1687", "task875")
"""Those of the sweep, whose rows are archived."""
ON_A_CPU = {
    "latent_lora": "56.9 ± 1.1",
    "inf_lora": "57.2 ± 4.1",
    "ewc ewc_lambda=100.0": "43.4 ± 4.6",
    "tasl": "47.9 ± 1.5",
    "kif_lora": "47.4 ± 3.9",
    "latent_lora train_active=sum combine=sum": "46.2 ± 2.4",
    "inf_lora design=random_project": "47.0 ± 1.2",
    "gain_lora energy=sigma2": "56.6 ± 1.2",
    "gain_lora design=random_project": "50.3 ± 1.1",
}
"""AP in % by what varies, of docs/experiments/one_rate.md."""


def comparison(folder: Path, device: str, tiny: bool, seconds: float) -> Iterator[tuple[str, float | str, str, str]]:
    """Yield the AP of each method, mean and standard deviation over seeds, as far as the time suffices."""
    changes = [f"run.storage={folder / 'runs'}", "run.tracking.uri=none", f"run.resources.gpus={int(device == 'cuda')}"]
    changes += ["run.graphs=auto", "run.pack=[seed]", f"trial.backbone.device={device}"]
    if tiny:
        changes += ["trial.benchmark.tasks=[task363,task1510]", "trial.benchmark.train_per_task=6"]
        changes += ["trial.benchmark.test_per_task=2", "trial.training.epochs=1", "search.seed=[0,1]"]
        changes += ["search.trial=[{method: {name: latent_lora}}, {method: {name: seq_lora}}]"]
    shards = 2 if tiny else max(1, (os.cpu_count() or 1) - 2)
    began = time.monotonic()
    ended = _in_parallel(changes, shards, folder, f"{seconds:.0f}s")
    yield f"{shards} processes", time.monotonic() - began, "s", f"exit codes {' '.join(map(str, ended))}"
    import latent_sweep

    by_settings = defaultdict(list)
    trials = latent_sweep.open_sweep(str(folder / "runs" / "common_rate_superni")).trials()
    for trial in trials[trials["status"] == "finished"].to_dict("records"):
        settings = trial["name"].replace(f" seed={trial['seed']}", "").removeprefix("method=")
        by_settings[settings].append(100 * trial["AP"])
    for settings, scores in by_settings.items():
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        expected = f"CPU {ON_A_CPU[settings]}" if settings in ON_A_CPU else ""
        yield f"AP: {settings}", f"{statistics.fmean(scores):.1f} ± {spread:.1f}", "%", expected


def _in_parallel(changes: Sequence[str], shards: int, folder: Path, seconds: str) -> Sequence[int]:
    """Run all shards of the sweep, and return their exit codes."""
    options = [option for change in changes for option in ("--set", change)]
    processes = []
    for shard in range(1, shards + 1):
        own = ["--local", "--shard", f"{shard}/{shards}", "--for", seconds]
        command = [sys.executable, "-m", "latent_sweep.run", str(SWEEP), *own, *options]
        with open(folder / f"shard-{shard}.txt", "w", encoding="utf-8") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return [process.wait() for process in processes]
