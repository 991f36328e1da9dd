"""The whole benchmark: which parts there are, and the report they make together."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import datetime, timezone
from importlib.metadata import version
from tempfile import TemporaryDirectory

import torch

from latent_sweep.backbones.registry import BackboneSettings, describe
from latent_sweep.bench.answers import GENERATION_RATE, evaluate, generate
from latent_sweep.bench.methods import methods
from latent_sweep.bench.processes import memory, start, sweep, threads
from latent_sweep.bench.rows import Reading, Report, Table, line_of
from latent_sweep.bench.shards import shards
from latent_sweep.bench.steps import TRAINING_RATE, history, packs, step, tasks
from latent_sweep.bench.store import store
from latent_sweep.bench.workbench import Subject, Workbench
from latent_sweep.data.loaders import data_digest
from latent_sweep.data.schema import BenchmarkSettings, load_benchmark, task_sequence
from latent_sweep.errors import ConfigError, MissingData, StoreError, Terminated
from latent_sweep.security import printable, traceback_text
from latent_sweep.settings import as_written
from latent_sweep.storage.failures import let_go
from latent_sweep.storage.storage import Storage, question
from latent_sweep.storage.versions import installed
from latent_sweep.sweep.profile import Profile, profile_path, write_profile
from latent_sweep.training.context import hardware

PARTS: Mapping[str, Callable[[Workbench], list[Reading]]] = {
    "step": step,
    "packs": packs,
    "history": history,
    "generate": generate,
    "evaluate": evaluate,
    "start": start,
    "threads": threads,
    "memory": memory,
    "sweep": sweep,
    "store": store,
}

ON_REQUEST: Mapping[str, Callable[[Workbench], list[Reading]]] = {"tasks": tasks, "methods": methods, "shards": shards}
"""Parts that run only where they are named, because they take long."""

WITH_PEFT = ("step", "generate", "sweep", "tasks")
"""Parts that compare with the usual way."""

PROFILED = ("step", "generate")
"""Parts that measure what a profile says, in their order."""


def run_bench(
    backbone: str,
    device: str | None,
    dtypes: Sequence[str],
    only: Sequence[str],
    quick: bool,
    storage: Storage,
    tell: Callable[[str], None],
) -> Report:
    """Measure, and write the profile that `latent-sweep plan` reads as soon as its rates are known.

    Args:
        device: `cpu`, `cuda`, or None for the GPU where there is one.
        dtypes: every part runs with the first, `step` with each; none is the device's usual type.
        only: names of parts; none is all of `PARTS`.
        quick: little of everything: shows that it runs, measures nothing well, and writes no profile.
        storage: where the profile lies; `store` measures it.
        tell: told what is being measured.

    Returns:
        What was measured, also where the user has interrupted it.

    Raises:
        ConfigError: an unknown part, a missing package, or a device that is not there.
        StoreError: the storage cannot be written, and a part or the profile needs it.
    """
    names = _chosen(only)
    if set(names) & set(WITH_PEFT) and importlib.util.find_spec("peft") is None:
        without = " ".join(name for name in PARTS if name not in WITH_PEFT)
        raise ConfigError(
            f"the parts {', '.join(WITH_PEFT)} compare with peft, which is not installed; "
            f"run `pip install 'latent-sweep[bench]'`, or measure the others with `--only {without}`"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtypes = dtypes or ["bfloat16" if device == "cuda" else "float32"]
    benchmark, note = benchmark_for(backbone)
    measured_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    keeps = not quick and set(PROFILED) <= set(names)
    if keeps or "store" in names:
        storage.make()
        with question(storage):  # before minutes are spent: what cannot be written says so
            pass
    tables: list[Table] = []

    def report(interrupted: bool = False, terminated: bool = False) -> Report:
        facts = (backbone, device, benchmark, note, measured_at, _versions(), hardware())
        return Report(*facts, list(tables), quick, interrupted, terminated)

    try:
        for dtype in dtypes:
            with TemporaryDirectory(prefix="latent-sweep-bench-") as folder:
                bench = Workbench(Subject(backbone, dtype, device, benchmark, folder, quick, storage.place))
                for name in names if dtype == dtypes[0] else [name for name in names if name == "step"]:
                    tables.append(_table(bench, name, dtype, tell))
                    if keeps and dtype == dtypes[0] and name == PROFILED[-1]:
                        _keep_profile(report(), dtype, storage, tell)
                bench.free()  # for the next type
    except KeyboardInterrupt as ended:
        return report(interrupted=True, terminated=isinstance(ended, Terminated))
    return report()


def _table(bench: Workbench, name: str, dtype: str, tell: Callable[[str], None]) -> Table:
    """Measure one part; what goes wrong in it is told, and the others have taken, or will take, their minutes."""
    measure = {**PARTS, **ON_REQUEST}[name]
    what = (measure.__doc__ or "").strip()
    tell(f"{name} ({dtype}): {what}")
    rows: list[Reading] = []
    failure = ""
    try:
        with redirect_stdout(sys.stderr):  # the Trainer prints what it measured
            rows = measure(bench)
    except ConfigError:  # of what was asked for, which the other parts have in common
        raise
    except Exception as error:
        tell(traceback_text(error))
        failure = printable(f"{type(error).__name__}: {error}")
        let_go(error)
        bench.free()
    # at once: a machine may be taken away before the last part ends
    tell("\n".join([*map(line_of, rows), *([f"  FAILED: {failure}"] if failure else [])]))
    return Table(name, dtype, what, rows, failure)


def _versions() -> dict[str, str]:
    compared = ("peft", "accelerate", "ray")
    return installed() | {name: version(name) for name in compared if importlib.util.find_spec(name)}


def _chosen(only: Sequence[str]) -> list[str]:
    known = [*PARTS, *ON_REQUEST]
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"--only: found {name!r}; {hint}")
    return [name for name in known if name in only] or list(PARTS)


def benchmark_for(backbone: str) -> tuple[str, str]:
    """Choose SuperNI where its data is at hand and tokens are words, else the built-in benchmark; return it and why."""
    known = describe(BackboneSettings(name=backbone))
    if known is not None and known.source == "config":
        return "builtin", (
            f"{backbone} has random weights and a token for every byte, and SuperNI's prompts would be too long: the "
            "built-in benchmark's short ones have as many tokens as SuperNI's have elsewhere."
        )
    settings = as_written(BenchmarkSettings)(name="superni", order=1)
    spec = load_benchmark("superni")
    try:
        for task in task_sequence(settings, spec):
            data_digest(spec, task, "train", settings)
            data_digest(spec, task, "test", settings)
    except MissingData as error:
        return "builtin", f"SuperNI is not at hand, so the built-in benchmark stands in. {error}"
    return "superni", ""


def _keep_profile(report: Report, dtype: str, storage: Storage, tell: Callable[[str], None]) -> None:
    """Write the profile where there is one; that it cannot be written costs nothing of the report."""
    profile = _profile(report, dtype)
    if profile is None:
        return
    path = profile_path(storage.folder, report.backbone, dtype, report.device)
    try:
        write_profile(path, profile)
    except StoreError as error:
        tell(f"no profile for `latent-sweep plan`: {error}")
    else:
        tell(f"profile for `latent-sweep plan`: {path}")


def _profile(report: Report, dtype: str) -> Profile | None:
    """The profile, where both of its rates were measured."""
    rates = {row.name: row.value for table in report.tables if table.dtype == dtype for row in table.rows}
    if not {TRAINING_RATE, GENERATION_RATE} <= set(rates):
        return None
    measured = (rates[TRAINING_RATE], rates[GENERATION_RATE], report.measured_at, report.versions)
    return Profile(report.backbone, report.device, dtype, *measured)
