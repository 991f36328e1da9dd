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

SWEEP = Path(__file__).parents[2] / "sweeps/general_ability.yaml"
TASKS = ("task363", "task1510", "task591", "task1687", "task875")
"""Those of the sweep, whose rows are archived."""
ON_A_CPU = {
    "latent_lora": "60.3 ± 4.7",
    "gain_lora": "60.7 ± 1.5",
    "o_lora": "50.6 ± 1.1",
    "inc_lora": "45.9 ± 3.2",
    "seq_lora": "44.3 ± 3.5",
    "ewc": "37.1 ± 2.4",
    "lwf": "49.5 ± 1.7",
    "inf_lora": "48.5 ± 5.6",
    "tasl": "34.0 ± 1.7",
    "kif_lora": "44.0 ± 3.0",
    "joint_lora": "63.5 ± 0.6",
    "zero_shot": "3.7 ± 0.0",
}
"""AP in % by method, of docs/experiments/all_methods.md."""


def comparison(folder: Path, device: str, tiny: bool, seconds: float) -> Iterator[tuple[str, float | str, str, str]]:
    """Yield the AP of each method, mean and standard deviation over seeds, as far as the time suffices."""
    changes = [f"run.storage={folder / 'runs'}", "run.tracking.uri=none", f"run.resources.gpus={int(device == 'cuda')}"]
    changes += ["run.graphs=auto", f"trial.backbone.device={device}"]
    if tiny:
        changes += ["run.probes={}"]
        changes += ["trial.benchmark.tasks=[task363,task1510]", "trial.benchmark.train_per_task=6"]
        changes += ["trial.benchmark.test_per_task=2", "trial.training.epochs=1", "search.seed=[0,1]"]
        changes += ["search.trial=[{method: {name: latent_lora}}, {method: {name: seq_lora}}]"]
    shards = 2 if tiny else max(1, (os.cpu_count() or 1) - 2)
    began = time.monotonic()
    ended = _in_parallel(changes, shards, folder, f"{seconds:.0f}s")
    yield f"{shards} processes", time.monotonic() - began, "s", f"exit codes {' '.join(map(str, ended))}"
    import latent_sweep

    by_settings = defaultdict(list)
    trials = latent_sweep.open_sweep(str(folder / "runs" / "general_ability")).trials()
    for trial in trials[trials["status"] == "finished"].to_dict("records"):
        settings = trial["name"].replace(f" seed={trial['seed']}", "").removeprefix("method=")
        by_settings[settings, trial["method"]].append(100 * trial["AP"])
    for (settings, method), scores in by_settings.items():
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        plain = " " not in settings.replace(" learning_rate", "_learning_rate")
        expected = f"CPU {ON_A_CPU[method]}" if plain and method in ON_A_CPU else ""
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
