"""Drives a sweep to its end: what is missing is handed to Ray or run here, and mirrored into MLflow."""

from __future__ import annotations

import logging
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
from latent_sweep.security import say
from latent_sweep.settings import Settings, canonical_json, content_hash, yaml_text
from latent_sweep.storage.checksummed import sealed_json
from latent_sweep.storage.files import read_file
from latent_sweep.storage.folders import SWEEP_FILE, SweepFolder, driving
from latent_sweep.storage.journal import status
from latent_sweep.storage.objects import requests
from latent_sweep.storage.reserve import free_reserve, keep_reserve
from latent_sweep.storage.storage import Storage, open_storage
from latent_sweep.storage.watch import following, forget_the_old, requests_told
from latent_sweep.sweep.config import Sweep, fault_report, load_sweep
from latent_sweep.sweep.forecast import describe_plan, describe_tuning
from latent_sweep.sweep.plan import Pack, Run, Trial
from latent_sweep.sweep.planning import OUTDATED, Plan, name_conflict, outdated, plan_sweep
from latent_sweep.sweep.schema import GROUPS, EngineSettings
from latent_sweep.sweep.tuning import TUNING, select, tuning_content, tuning_lines
from latent_sweep.tracking.addresses import check_ray_address
from latent_sweep.training.memory_housekeeping import loading_modules

log = logging.getLogger(__name__)


def run_sweep(
    path: str,
    overrides: Sequence[str] = (),
    local: bool = False,
    fail_fast: bool = False,
    only_failed: bool = False,
    replace: bool = False,
) -> int:
    """Run a sweep file to its end; returns the number of trials that did not come to theirs.

    Args:
        path: the sweep file.
        overrides: `path=value`, as after `--set`.
        local: in this process, without Ray.
        fail_fast: end the sweep when a trial has failed, instead of going on with the others.
        only_failed: run the trials that have failed before, and no others.
        replace: let trials that an earlier sweep of this name has scored, and this one lacks, drop out of its results,
            and compute again those whose data, backbone or code have changed.

    Raises:
        LatentSweepError: the sweep cannot be started; the message says what to change.
    """
    sweep = load_sweep(path, overrides)
    say(f"checking {sweep.source}, its data and its backbone")
    check_installed(sweep, local)
    if not local:
        check_ray_address(sweep.run.allow_insecure)
        check_cluster_answers()
    check_engine(sweep.run.engine)
    storage = open_storage(sweep.run.storage)
    plan = plan_sweep(sweep, storage=storage, to_run=True, local=local)
    how = _How(local, fail_fast, only_failed, replace)
    if plan.tuning is not None and plan.results is None:
        say("\n".join(describe_tuning(plan)))
        _run_trials(plan.tuning, storage, how)
        results = select(plan.selections, SweepFolder(storage, plan.tuning.sweep.name))
        plan = plan_sweep(sweep, storage=storage, to_run=True, local=local, results=results)
    if lines := tuning_lines(plan.results or ()):
        say("\n".join(["", "chosen", *(f"  {line}" for line in lines), ""]))
    return _run_trials(plan, storage, how)


@dataclass(frozen=True)
class _How:
    """How a sweep is run; see `run_sweep`."""

    local: bool
    fail_fast: bool
    only_failed: bool
    replace: bool


def _run_trials(plan: Plan, storage: Storage, how: _How) -> int:
    """Run the trials of one sweep, once no other process runs it; return how many did not finish."""
    sweep, trials, packs = plan.sweep, plan.trials, plan.packs
    began, sent_before = time.time(), Counter(requests())
    folder = SweepFolder(storage, sweep.name)
    storage.pull(folder.path)
    say(describe_plan(plan, storage))
    with driving(folder, lambda driver: say(f"{sweep.name} is being run by {driver}; waiting for its end")):
        storage.pull(folder.path)
        forget_the_old(storage, folder.path)
        if not how.replace:
            if refusal := name_conflict(sweep, trials, folder):
                raise ConfigError(refusal)
        else:  # said first, so that no table has an old result beside new ones, wherever this run ends
            for trial in outdated(trials, folder):
                folder.journal(trial.trial_id).append("lost", kind="outdated", message=f"its {OUTDATED}")
        if plan.results:
            storage.write(folder.path / TUNING, tuning_content(sweep, plan.results))
        elif (folder.path / TUNING).exists():  # of an earlier sweep of this name
            storage.remove(folder.path / TUNING)
        left = _drive(sweep, trials, packs, storage, how)
        if storage.is_remote:
            sent = Counter(requests()) - sent_before + requests_told(folder.path, began)
            counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(sent.items()))
            say(f"requests  {counts}: of this run, its workers' included")
        return left


def _drive(sweep: Sweep, trials: Sequence[Trial], packs: Sequence[Pack], storage: Storage, how: _How) -> int:
    """Run what is missing of a sweep that nobody else drives."""
    from latent_sweep.monitor.progress import say_driving
    from latent_sweep.monitor.screen import Following, screen_for
    from latent_sweep.report.plain_text import terminal_width
    from latent_sweep.report.report import render
    from latent_sweep.report.tables import PAGE_FILE
    from latent_sweep.results.summaries import summarize
    from latent_sweep.tracking.mlflow import tracker_for
    from latent_sweep.tracking.sync_thread import SyncThread

    failed = _failed(packs, SweepFolder(storage, sweep.name)) if how.only_failed else None
    if failed == []:
        raise ConfigError(
            f"--failed: no trial of {sweep.name} has failed; without --failed the same command runs what has not ended"
        )
    folder = write_sweep(sweep, trials, storage)
    todo = _incomplete(packs, folder) if failed is None else failed
    trainings, missing = (sum(len(p.runs) for p in some) for some in (packs, todo))
    if how.only_failed:
        say(f"{missing} of {trainings} trainings have failed before and are run again")
    elif missing < trainings:
        say(f"{trainings - missing} of {trainings} trainings are complete in {folder.path}")
    keep_reserve(folder.path)
    tracker = tracker_for(sweep.run.tracking.uri, folder, sweep.run.allow_insecure)
    with screen_for(folder, log=True) as screen:
        thread = SyncThread(tracker, log_line=screen.tell)
        thread.start()
        try:
            if todo:
                others = following(storage, folder.path) if not how.local else nullcontext()
                with Following(folder, screen), others:
                    if how.local:
                        say_driving(folder, "loading PyTorch")
                        with loading_modules():
                            from latent_sweep.execution.local import run_local

                        run_local(todo, folder, sweep.run, how.fail_fast, screen.tell)
                    else:
                        from latent_sweep.execution.ray_tune import run_on_ray

                        run_on_ray(todo, folder, sweep.run, how.fail_fast)
            if sweep.run.page and (todo or not (folder.path / PAGE_FILE).exists()):
                _write_page(folder, screen.tell)
            if sweep.run.log_model == "best" and sweep.tuning_of is None:
                _write_model(folder, screen.tell)
        finally:
            free_reserve(folder.path)
            thread.stop()
    summary = replace(summarize(folder), driven=False)
    say(f"\n{render(summary, width=terminal_width())}\n\nresults   {folder.path}")
    if (folder.path / PAGE_FILE).exists():
        say(f"report    {folder.path / PAGE_FILE}")
    if storage.is_remote:
        say(f"          a copy of what is below {storage.place}")
    if link := tracker.link():
        say(f"compare   {tracker.ui_command()}\n          {link}")
    return sum(count for found, count in summary.counts.items() if found not in ("finished", "stopped"))


def _write_page(folder: SweepFolder, tell: Callable[[str], None]) -> None:
    """Write the report as a page. What it cannot tell ends no sweep: trials and tables are there without it."""
    from latent_sweep.report.page import render_page  # with matplotlib
    from latent_sweep.report.tables import PAGE_FILE

    try:
        folder.storage.write(folder.path / PAGE_FILE, render_page([folder]).encode())
    except Exception as error:
        log.debug("no page", exc_info=True)
        tell(f"no page was written: {error}; `latent-sweep report --format html {folder.path}` tries again")


def _write_model(folder: SweepFolder, tell: Callable[[str], None]) -> None:
    """Write the best trial's model for the tracker to bring. Trials and tables are there without it, too."""
    from latent_sweep.tracking.mlflow_model import log_best  # with torch

    try:
        log_best(folder)
    except Exception as error:
        log.debug("no model", exc_info=True)
        tell(f"no model was logged: {error}; `latent-sweep export {folder.path} --to mlflow` tries again")


def check_installed(sweep: Sweep, local: bool) -> None:
    """Refuse a run that needs a package that is not installed here.

    Raises:
        ConfigError: Ray, MLflow or DeepSpeed is missing, and the sweep or the command asks for it.
    """
    needs = {
        "ray": (not local, "or run it in this process, --local"),
        "mlflow": (sweep.run.tracking.uri != "none", "or do without a tracker, --set run.tracking.uri=none"),
        "deepspeed": (sweep.run.engine.name == "deepspeed", "or compute with plain torch, run.engine.name: torch"),
    }
    faults = [
        f"{name} is not installed, which this run needs; `pip install {name}`, {instead}"
        for name, (needed, instead) in needs.items()
        if needed and find_spec(name) is None
    ]
    if faults:
        raise fault_report(sweep.source, faults)


def check_engine(settings: EngineSettings) -> None:
    """Find what DeepSpeed would not accept before anything starts; importing it takes seconds, so only if needed.

    Raises:
        ConfigError: `config` has a key that DeepSpeed does not know, or one that is not its to set.
    """
    if settings.config:
        from latent_sweep.execution.deepspeed import deepspeed_config

        deepspeed_config(settings)


@memo_scope()
def write_sweep(sweep: Sweep, trials: Sequence[Trial], storage: Storage) -> SweepFolder:
    """Write what the sweep is: the file as resolved, and every trial with its complete settings.

    Of thousands of trials a few settings differ: each different group of settings is written once, and a trial names
    its groups by their places. A file for each trial would be thousands of requests to an object store.
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
    if sweep.tuning_of is not None:  # no file that could be run: its trials follow from the other's
        resolved = {"tuning_of": sweep.tuning_of} | resolved
    groups = {name: _Distinct() for name in ("method", *GROUPS)}
    entries = [
        {
            "trial_id": trial.trial_id,
            "training_id": trial.training_id,
            "values": {axis: trial.values.get(axis) for axis in axes},
            "groups": {name: found.place(getattr(trial.settings, name)) for name, found in groups.items()},
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
        "groups": {name: found.contents for name, found in groups.items()},
        "trials": entries,
    }
    text = yaml_text(resolved).encode()
    if read_file(folder.path / "sweep.yaml") != text:
        storage.write(folder.path / "sweep.yaml", text)
    storage.write(folder.path / SWEEP_FILE, sealed_json(content, indent=1))
    return folder


class _Distinct:
    """Groups of settings that differ, in the order in which they were first met."""

    def __init__(self) -> None:
        self.contents: list[dict[str, Any]] = []
        """Each as plain values."""
        self._places: dict[str, int] = {}
        self._met: dict[int, tuple[Settings, int]] = {}
        """By the object, with which its place in memory is nobody else's."""

    def place(self, group: Settings) -> int:
        """Return where a group stands among them."""
        if id(group) not in self._met:
            content = group.model_dump(mode="json")
            place = self._places.setdefault(canonical_json(content), len(self.contents))
            self.contents += [content] if place == len(self.contents) else []
            self._met[id(group)] = group, place
        return self._met[id(group)][1]


def _lineages(trial: Trial) -> str | None:
    """The snapshots that a trial leaves behind, in a line; None where its data is on other nodes alone."""
    try:
        return " ".join(trial.lineages())
    except MissingData:
        return None


@memo_scope()
def _incomplete(packs: Sequence[Pack], folder: SweepFolder) -> list[Pack]:
    """Return the packs with those of their members that have something missing."""

    def lacks(member: Run) -> bool:
        return not all(trial.files(folder).complete for trial in member.trials)

    lacking = [Pack(tuple(filter(lacks, p.runs))) for p in packs]
    return [p for p in lacking if p.runs]


def _failed(packs: Sequence[Pack], folder: SweepFolder) -> list[Pack]:
    """Return the packs with those of their trials that have failed."""

    def failed(trial: Trial) -> bool:
        return status(folder.journal(trial.trial_id).read()) == "failed"

    def kept(member: Run) -> Run:
        return replace(member, trials=tuple(filter(failed, member.trials)))

    left = [Pack(tuple(m for m in map(kept, p.runs) if m.trials)) for p in packs]
    return [p for p in left if p.runs]
