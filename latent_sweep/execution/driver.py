"""The driver: runs what is missing of a sweep, on Ray or in this process, and tracks it in MLflow."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from latent_sweep.errors import ConfigError, MissingData
from latent_sweep.execution.ray_nodes import check_cluster_answers
from latent_sweep.memo import memo_scope
from latent_sweep.monitor.screen import COMMAND, Display, Following
from latent_sweep.monitor.state import TrialEvent
from latent_sweep.settings import Settings, canonical_json, content_hash, yaml_text
from latent_sweep.storage.checksummed import checksummed_json
from latent_sweep.storage.files import read_file
from latent_sweep.storage.folders import SWEEP_FILE, SweepFolder, driving
from latent_sweep.storage.journal import status
from latent_sweep.storage.objects import requests
from latent_sweep.storage.reserve import free_reserve, write_reserve
from latent_sweep.storage.storage import Storage, open_storage
from latent_sweep.storage.watch import remove_stale_heartbeats, reported_requests, watching
from latent_sweep.sweep.config import Sweep, fault_report
from latent_sweep.sweep.plan import Pack, Run, Trial
from latent_sweep.sweep.plan_text import describe_plan, describe_tuning
from latent_sweep.sweep.planning import OUTDATED, Plan, name_conflict, outdated, plan_sweep
from latent_sweep.sweep.schema import GROUPS, EngineSettings
from latent_sweep.sweep.tuning import TUNING, select, tuning_content, tuning_lines
from latent_sweep.tracking.addresses import check_ray_address
from latent_sweep.training.memory_housekeeping import loading_modules

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a sweep; none of this changes a result."""

    local: bool = False
    """Run in this process, without Ray."""
    fail_fast: bool = False
    """End the sweep when a trial has failed."""
    only_failed: bool = False
    """Run only trials that have failed before."""
    replace: bool = False
    """Accept that scored trials of an earlier sweep of this name leave its results, and compute results again whose
    data, backbone or code have changed."""
    display: Display = COMMAND
    on_event: Callable[[TrialEvent], None] | None = None
    """Receives each new event of a trial, from another thread."""
    embedded: bool = False
    """Another program called: its garbage is not exempted from collection."""


_ONE_AT_A_TIME = threading.Lock()
"""Random generators, modules that are being imported and the connection to Ray belong to the process."""


def drive(sweep: Sweep, options: RunOptions) -> int:
    """Run what is missing of a sweep; return the number of trials that neither finished nor were stopped early.

    If another thread runs a sweep, wait for its end.

    Raises:
        LatentSweepError: the sweep cannot be started; the message says what to change.
    """
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        options.display.write(f"{sweep.name}: another thread of this process runs a sweep; waiting for its end")
        _ONE_AT_A_TIME.acquire()
    try:
        return _drive_with_tuning(sweep, options)
    finally:
        _ONE_AT_A_TIME.release()


def _drive_with_tuning(sweep: Sweep, options: RunOptions) -> int:
    say, local = options.display.write, options.local
    say(f"checking {sweep.source}, its data and its backbone")
    check_installed(sweep, local)
    if not local:
        check_ray_address(sweep.run.allow_insecure)
        check_cluster_answers()
    check_engine(sweep.run.engine)
    storage = open_storage(sweep.run.storage)
    plan = plan_sweep(sweep, storage=storage, to_run=True, local=local)
    if plan.tuning is not None and plan.results is None:
        say("\n".join(describe_tuning(plan)))
        _run_plan(plan.tuning, storage, options)
        results = select(plan.selections, SweepFolder(storage, plan.tuning.sweep.name))
        plan = plan_sweep(sweep, storage=storage, to_run=True, local=local, results=results)
    if lines := tuning_lines(plan.results or ()):
        say("\n".join(["", "selected", *(f"  {line}" for line in lines), ""]))
    return _run_plan(plan, storage, options)


def _run_plan(plan: Plan, storage: Storage, options: RunOptions) -> int:
    """Run the trials of one sweep once no other process runs it; return how many did not end well."""
    sweep, trials, say = plan.sweep, plan.trials, options.display.write
    began, sent_before = time.time(), Counter(requests())
    folder = SweepFolder(storage, sweep.name)
    storage.pull(folder.path)
    say(describe_plan(plan, storage))
    with driving(folder, lambda driver: say(f"{sweep.name} is being run by {driver}; waiting for its end")):
        storage.pull(folder.path)
        remove_stale_heartbeats(storage, folder.path)
        if not options.replace:
            if conflict := name_conflict(sweep, trials, folder):
                raise ConfigError(conflict)
        else:  # before anything runs, so that no table mixes old and new results if this run is interrupted
            for trial in outdated(trials, folder):
                folder.journal(trial.trial_id).append("lost", kind="outdated", message=f"its {OUTDATED}")
        if plan.results:
            storage.write(folder.path / TUNING, tuning_content(sweep, plan.results))
        elif (folder.path / TUNING).exists():  # from an earlier sweep of this name
            storage.remove(folder.path / TUNING)
        unfinished = _drive(plan, folder, options)
        if storage.is_remote:
            sent = Counter(requests()) - sent_before + reported_requests(folder.path, began)
            counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(sent.items()))
            say(f"requests  {counts} (this run with its workers)")
        return unfinished


def _drive(plan: Plan, folder: SweepFolder, options: RunOptions) -> int:
    """Run what is missing of a sweep, whose lock this process holds; return how many trials did not end well."""
    from latent_sweep.monitor.progress import say_driving
    from latent_sweep.report.plain_text import terminal_width
    from latent_sweep.report.report import render
    from latent_sweep.report.tables import PAGE_FILE
    from latent_sweep.results.summaries import summarize
    from latent_sweep.tracking.mlflow import tracker_for
    from latent_sweep.tracking.sync_thread import SyncThread

    sweep, packs, storage, say = plan.sweep, plan.packs, folder.storage, options.display.write
    failed = _failed(packs, folder) if options.only_failed else None
    if failed == []:
        raise ConfigError(
            f"--failed: no trial of {sweep.name} has failed; without --failed the same command runs what has not ended"
        )
    folder = write_sweep(sweep, plan.trials, storage)
    todo = _incomplete(packs, folder) if failed is None else failed
    trainings, missing = (sum(len(p.runs) for p in part) for part in (packs, todo))
    if options.only_failed:
        say(f"{missing} of {trainings} trainings have failed before and are run again")
    elif missing < trainings:
        say(f"{trainings - missing} of {trainings} trainings are complete in {folder.path}")
    write_reserve(folder.path)
    tracker = tracker_for(sweep.run.tracking.uri, folder, sweep.run.allow_insecure)
    with options.display.screen(folder) as screen:
        thread = SyncThread(tracker, log_line=screen.write)
        thread.start()
        try:
            if todo:
                others = watching(storage, folder.path) if not options.local else nullcontext()
                with Following(folder, screen, options.on_event), others:
                    if options.local:
                        say_driving(folder, "loading PyTorch")
                        with nullcontext() if options.embedded else loading_modules():
                            from latent_sweep.execution.local import run_local

                        run_local(todo, folder, sweep.run, options.fail_fast, screen.write)
                    else:
                        from latent_sweep.execution.ray_tune import run_on_ray

                        run_on_ray(todo, folder, sweep.run, options.fail_fast)
            if sweep.run.page and (todo or not (folder.path / PAGE_FILE).exists()):
                _write_page(folder, screen.write)
            if sweep.run.log_model == "best" and sweep.tuning_of is None:
                _write_model(folder, screen.write)
        finally:
            free_reserve(folder.path)
            thread.stop()
    summary = replace(summarize(folder), driven=False)
    say(f"\n{render(summary, width=terminal_width())}\n\nresults   {folder.path}")
    if (folder.path / PAGE_FILE).exists():
        say(f"report    {folder.path / PAGE_FILE}")
    if storage.is_remote:
        say(f"          (copied from {storage.location})")
    if link := tracker.link():
        say(f"compare   {tracker.ui_command()}\n          {link}")
    return sum(count for state, count in summary.counts.items() if state not in ("finished", "stopped"))


def _write_page(folder: SweepFolder, log_line: Callable[[str], None]) -> None:
    """Write the HTML report; an error is logged and does not end the sweep."""
    from latent_sweep.report.page import render_page  # imports matplotlib
    from latent_sweep.report.tables import PAGE_FILE

    try:
        folder.storage.write(folder.path / PAGE_FILE, render_page([folder]).encode())
    except Exception as error:
        log.debug("no page", exc_info=True)
        log_line(f"no page was written: {error}; `latent-sweep report --format html {folder.path}` tries again")


def _write_model(folder: SweepFolder, log_line: Callable[[str], None]) -> None:
    """Write the best trial's model for the tracker to upload; an error is logged and does not end the sweep."""
    from latent_sweep.tracking.mlflow_model import log_best  # imports torch

    try:
        log_best(folder)
    except Exception as error:
        log.debug("no model", exc_info=True)
        log_line(f"no model was logged: {error}; `latent-sweep export {folder.path} --to mlflow` tries again")


def check_installed(sweep: Sweep, local: bool) -> None:
    """Check that the packages for this run are installed.

    Raises:
        ConfigError: Ray, MLflow or DeepSpeed is needed and missing.
    """
    needs = {
        "ray": (not local, "or run in this process with --local"),
        "mlflow": (sweep.run.tracking.uri != "none", "or disable tracking, --set run.tracking.uri=none"),
        "deepspeed": (sweep.run.engine.name == "deepspeed", "or use plain torch, run.engine.name: torch"),
    }
    faults = [
        f"{name} is not installed, but this run needs it; `pip install {name}`, {alternative}"
        for name, (needed, alternative) in needs.items()
        if needed and find_spec(name) is None
    ]
    if faults:
        raise fault_report(sweep.source, faults)


def check_engine(settings: EngineSettings) -> None:
    """Check `run.engine.config` before anything starts.

    Raises:
        ConfigError: DeepSpeed does not accept a key of `config`, or another setting decides it.
    """
    if settings.config:  # importing DeepSpeed takes seconds
        from latent_sweep.execution.deepspeed import deepspeed_config

        deepspeed_config(settings)


@memo_scope()
def write_sweep(sweep: Sweep, trials: Sequence[Trial], storage: Storage) -> SweepFolder:
    """Write the resolved sweep file, and one file with the complete settings of every trial.

    Each distinct group of settings is written once, and trials refer to groups by index: a file per trial would be
    thousands of requests to an object store.
    """
    folder = SweepFolder(storage, sweep.name)
    axes = list(dict.fromkeys([*sweep.axes, *(path for trial in trials for path in trial.values)]))
    resolved: dict[str, Any] = {
        "name": sweep.name,
        "trial": dict(sweep.trial),
        "search": {axis: list(values) for axis, values in sweep.grid.items()}
        | {axis: draw.written() for axis, draw in sweep.draws.items()},
        "tune": sweep.tune.model_dump(mode="json") if sweep.tune else None,
        "run": sweep.run.model_dump(mode="json"),
    }
    if sweep.tuning_of is not None:  # not a file that can be run: its trials follow from the tuned sweep
        resolved = {"tuning_of": sweep.tuning_of} | resolved
    groups = {name: _DistinctGroups() for name in ("method", *GROUPS)}
    entries = [
        {
            "trial_id": trial.trial_id,
            "training_id": trial.training_id,
            "values": {axis: trial.values.get(axis) for axis in axes},
            "groups": {name: distinct.index(getattr(trial.settings, name)) for name, distinct in groups.items()},
            "seed": trial.settings.seed,
            "tasks": " ".join(task.name for task in trial.tasks),
            "n_tasks": len(trial.tasks),
            "lineages": _lineages(trial),
        }
        for trial in trials
    ]
    content = {
        "name": sweep.name,
        "sweep_id": content_hash(sorted(trial.trial_id for trial in trials)),
        "axes": axes,
        "seed_axis": "seed",
        "tuning_of": sweep.tuning_of,
        "tracking_uri": sweep.run.tracking.uri,
        "run": sweep.run.model_dump(mode="json", include={"resources", "prices"}),
        "groups": {name: distinct.contents for name, distinct in groups.items()},
        "trials": entries,
    }
    text = yaml_text(resolved).encode()
    if read_file(folder.path / "sweep.yaml") != text:
        storage.write(folder.path / "sweep.yaml", text)
    storage.write(folder.path / SWEEP_FILE, checksummed_json(content, indent=1))
    return folder


class _DistinctGroups:
    def __init__(self) -> None:
        self.contents: list[dict[str, Any]] = []
        """The groups as plain values."""
        self._by_content: dict[str, int] = {}
        self._by_id: dict[int, tuple[Settings, int]] = {}
        """The object is kept with its index, so that its id is not reused."""

    def index(self, group: Settings) -> int:
        """Return the index of a group, adding it if it is new."""
        if id(group) not in self._by_id:
            content = group.model_dump(mode="json")
            index = self._by_content.setdefault(canonical_json(content), len(self.contents))
            self.contents += [content] if index == len(self.contents) else []
            self._by_id[id(group)] = group, index
        return self._by_id[id(group)][1]


def _lineages(trial: Trial) -> str | None:
    """Return the lineages of a trial's snapshots in one line; None if its data is on other nodes only."""
    try:
        return " ".join(trial.lineages())
    except MissingData:
        return None


@memo_scope()
def _incomplete(packs: Sequence[Pack], folder: SweepFolder) -> list[Pack]:
    def is_incomplete(run: Run) -> bool:
        return not all(trial.files(folder).complete for trial in run.trials)

    parts = [Pack(tuple(filter(is_incomplete, p.runs))) for p in packs]
    return [p for p in parts if p.runs]


def _failed(packs: Sequence[Pack], folder: SweepFolder) -> list[Pack]:
    def has_failed(trial: Trial) -> bool:
        return status(folder.journal(trial.trial_id).read()) == "failed"

    def only_failed(run: Run) -> Run:
        return replace(run, trials=tuple(filter(has_failed, run.trials)))

    parts = [Pack(tuple(run for run in map(only_failed, p.runs) if run.trials)) for p in packs]
    return [p for p in parts if p.runs]
