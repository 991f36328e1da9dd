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

from latent_sweep.backbones.identity import unpinned
from latent_sweep.errors import ConfigError, MissingData, StoreError
from latent_sweep.execution.ray_nodes import check_cluster_answers
from latent_sweep.memo import memo_scope
from latent_sweep.security import say
from latent_sweep.settings import Settings, canonical_json, content_hash, flatten, yaml_text
from latent_sweep.storage.checksummed import sealed_json
from latent_sweep.storage.files import read_file
from latent_sweep.storage.folders import SWEEP_FILE, SweepFolder, TrialFolder, driving
from latent_sweep.storage.journal import stages, status
from latent_sweep.storage.objects import requests
from latent_sweep.storage.reserve import free_reserve, keep_reserve
from latent_sweep.storage.storage import Storage, open_storage
from latent_sweep.storage.trial_files import end_of, told_rows
from latent_sweep.storage.watch import following, forget_the_old, requests_told
from latent_sweep.sweep.config import Sweep, fault_report, load_sweep
from latent_sweep.sweep.data_checks import check_sweep
from latent_sweep.sweep.forecast import describe_plan, describe_tuning
from latent_sweep.sweep.plan import Pack, Run, Trial, expand, pack
from latent_sweep.sweep.schema import GROUPS, EngineSettings
from latent_sweep.sweep.tuning import (
    TUNING,
    Selection,
    SelectionResult,
    find_selections,
    placeholders,
    previous_results,
    select,
    selected_values,
    tuning_content,
    tuning_lines,
    tuning_sweep,
    tuning_trials,
)
from latent_sweep.tracking.addresses import check_ray_address
from latent_sweep.training.memory_housekeeping import loading_modules

log = logging.getLogger(__name__)

SHOWN = 6
"""Trials that a message lists at most."""


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
    due = find_selections(sweep)
    trials = expand(sweep, selected_values(sweep, placeholders(due)))  # checked before anything is chosen
    if not local:  # this process sees its machine's GPUs
        check_devices(sweep, trials)
    check_pinned(sweep, [*trials, *tuning_trials(due)])
    storage = open_storage(sweep.run.storage)
    storage.make()
    warnings = check_sweep(sweep, trials, storage.folder)
    how = _How(local, fail_fast, only_failed, replace)
    chosen: list[SelectionResult] = []
    if due:
        chosen = _tuned(sweep, due, trials, storage, how)
        trials = expand(sweep, selected_values(sweep, chosen))
        warnings = check_sweep(sweep, trials, storage.folder)  # steps and targets may be others now
    return _run_trials(sweep, trials, storage, warnings, how, chosen)


@dataclass(frozen=True)
class _How:
    """How a sweep is run; see `run_sweep`."""

    local: bool
    fail_fast: bool
    only_failed: bool
    replace: bool


def _tuned(
    sweep: Sweep, due: Sequence[Selection], trials: Sequence[Trial], storage: Storage, how: _How
) -> list[SelectionResult]:
    """Run the candidates, and choose among them.

    Args:
        trials: of the sweep, with what stands for the choices.

    Raises:
        NoSelection: candidates have not come to an end.
    """
    tuning, candidates = tuning_sweep(sweep), tuning_trials(due)
    folder = SweepFolder(storage, tuning.name)
    storage.pull(folder.path)
    chosen = choices_until_now(due, folder)
    if chosen is None:
        warnings = check_sweep(tuning, candidates, storage.folder)
        say("\n".join(describe_tuning(sweep, due, trials)))
        _run_trials(tuning, candidates, storage, warnings, how)
        chosen = select(due, SweepFolder(storage, tuning.name))
    say("\n".join(["", "chosen", *(f"  {line}" for line in tuning_lines(chosen)), ""]))
    return chosen


def choices_until_now(due: Sequence[Selection], folder: SweepFolder) -> list[SelectionResult] | None:
    """Return what was chosen before, or None where it has to be chosen (again): candidates are missing or outdated."""
    return None if outdated(tuning_trials(due), folder) else previous_results(due, folder)


def _run_trials(
    sweep: Sweep,
    trials: Sequence[Trial],
    storage: Storage,
    warnings: Sequence[str],
    how: _How,
    chosen: Sequence[SelectionResult] = (),
) -> int:
    """Run trials as a sweep of their own, once nobody else drives it."""
    began, sent_before = time.time(), Counter(requests())
    packs = pack(trials, sweep.run.pack)
    folder = SweepFolder(storage, sweep.name)
    storage.pull(folder.path)
    say(describe_plan(sweep, trials, packs, storage, warnings))
    with driving(folder, lambda driver: say(f"{sweep.name} is being run by {driver}; waiting for its end")):
        storage.pull(folder.path)
        forget_the_old(storage, folder.path)
        if not how.replace:
            if refusal := taken_name(sweep, trials, folder):
                raise ConfigError(refusal)
        else:  # said first, so that no table has an old result beside new ones, wherever this run ends
            for trial in outdated(trials, folder):
                folder.journal(trial.trial_id).append("lost", kind="outdated", message=f"its {OUTDATED}")
        if chosen:
            storage.write(folder.path / TUNING, tuning_content(sweep, chosen))
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
    from latent_sweep.tracking.mlflow import SyncThread, tracker_for

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
    mirror = tracker_for(sweep.run.tracking.uri, folder, sweep.run.allow_insecure)
    with screen_for(folder, log=True) as screen:
        thread = SyncThread(mirror, tell=screen.tell)
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
    if link := mirror.link():
        say(f"compare   {mirror.ui_command()}\n          {link}")
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
    """Write the best trial's model for the mirror to bring. Trials and tables are there without it, too."""
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


def check_devices(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Refuse trials that want a GPU of which their workers are to have none: on Ray such a worker sees none.

    Raises:
        ConfigError: `backbone.device: cuda` without GPUs.
    """
    if not sweep.run.resources.gpus and any(trial.settings.backbone.device == "cuda" for trial in trials):
        raise ConfigError(
            f"{sweep.source}: backbone.device: found cuda, but with run.resources.gpus: 0 a worker sees no GPU. Ask "
            "for one, --set run.resources.gpus=1, or take backbone.device: auto"
        )


def check_pinned(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Refuse backbones whose content a hub may change while the sweep runs, or before it is run again.

    Raises:
        ConfigError: a branch or tag of a hub's model could not be turned into a commit.
    """
    settings = {trial.settings.backbone.model_dump_json(): trial.settings.backbone for trial in trials}
    if faults := [fault for backbone in settings.values() for fault in unpinned(backbone)]:
        raise fault_report(sweep.source, faults)


def taken_name(sweep: Sweep, trials: Sequence[Trial], there: SweepFolder) -> str | None:
    """Return why a name is refused, or None: other trials have been scored under it, and would leave its results.

    So would results of its own trials that were computed from something else than now: where it ended in between, a
    table would have some of either.
    """
    kept = {trial.trial_id for trial in trials}
    try:
        before = list(there) if there.exists else []
    except StoreError as error:  # it is written anew
        log.warning("what ran under the name %s is not known: %s", sweep.name, error)
        return None
    lost = [trial for trial in before if trial.trial_id not in kept and _has_scores(trial)]
    if lost:
        from latent_sweep.results.definition import trial_name  # with all results, which a plan does not read

        settings = {canonical_json(_params(trial)) for trial in trials}
        same = sum(canonical_json(trial.params) in settings for trial in lost)
        changed = (
            f" {same} of them have every setting of trials that it has: what lies outside of the file has changed "
            "since, as the code of a method or of latent_sweep, a benchmark's file, or a backbone."
        ) * bool(same)
        shown = [trial_name(there, trial) for trial in lost[:SHOWN]] + (["..."] if len(lost) > SHOWN else [])
        return (
            f"name: {there.path} holds a sweep {sweep.name!r} with {len(lost)} scored trials that {sweep.source} does "
            f"not have: {'; '.join(shown)}.{changed} They would drop out of its table. Choose "
            "another name (what both have in common is not learned again), or add --replace; their folders stay in "
            "either case."
        )
    if stale := outdated(trials, there):
        shown = [trial.name for trial in stale[:SHOWN]] + (["..."] if len(stale) > SHOWN else [])
        return (
            f"name: {there.path} holds results of {len(stale)} trials of {sweep.source} whose {OUTDATED}: "
            f"{'; '.join(shown)}. Choose another name (what both have in common is not learned again), or "
            "add --replace, which computes them again in their place."
        )
    return None


def _has_scores(trial: TrialFolder) -> bool:
    """Whether a trial has scored a task, or may have: its journal cannot be read."""
    try:
        return bool(stages(trial.events()))
    except StoreError:
        return True


OUTDATED = "data, backbone or code has changed since"


@memo_scope()
def outdated(trials: Sequence[Trial], there: SweepFolder) -> list[Trial]:
    """Return the trials that have come to an end with rows of something else than they would be computed from now."""

    def is_outdated(trial: Trial) -> bool:
        try:
            events = there.journal(trial.trial_id).read()
            # also where it is being mended since: what was decided at that end is of the old rows
            return end_of(events) is not None and len(told_rows(events, trial.row_keys())) < len(stages(events))
        except MissingData:  # other nodes have the rows, and nothing is known of them here
            return False
        except StoreError:  # who reads what is missing says what to do about it
            return False

    return [trial for trial in trials if is_outdated(trial)]


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


def _params(trial: Trial) -> dict[str, Any]:
    """Every resolved setting, by dotted path."""
    settings = flatten("trial", trial.settings.model_dump(mode="json"))
    return settings | {"benchmark.tasks": " ".join(task.name for task in trial.tasks)}


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
