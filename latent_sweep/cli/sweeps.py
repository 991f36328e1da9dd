"""run, plan, settings and status: a sweep file, and the sweep that it becomes."""

from __future__ import annotations

import argparse

from latent_sweep.cli.command import Commands, add_command, add_json, add_sweep_folder, print_json
from latent_sweep.run import RUN_EXIT_CODES, add_arguments, add_sweep_arguments
from latent_sweep.run import run as run_a_sweep
from latent_sweep.security import printable


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    add_arguments(
        add_command(
            commands,
            "run",
            run_a_sweep,
            "run a sweep file; the same command again resumes it",
            "run sweeps/quickstart.yaml --set search.seed='[0, 1, 2]'",
            f"Run a sweep file; the same command again resumes it. {RUN_EXIT_CODES}",
        )
    )
    plan = add_command(
        commands,
        "plan",
        _plan,
        "print what a sweep file would run; checks it completely, runs nothing",
        "plan sweeps/lambda.yaml --explain",
        "Check a sweep file completely, and print what it would run: trials, trainings, packs, memory, what is in the "
        "store already. Runs nothing. Exit codes: 0 `run` would start it, 2 it would refuse it, and the last lines say "
        "why.",
    )
    add_sweep_arguments(plan)
    how = plan.add_mutually_exclusive_group()
    how.add_argument("--explain", action="store_true", help="say which setting makes or breaks the reuse of a stage")
    add_json(how)

    settings = add_command(
        commands,
        "settings",
        _settings,
        "print every setting of a sweep file: default and meaning",
        "settings | less",
    )
    add_json(settings)

    status = add_command(
        commands,
        "status",
        _status,
        "say where a sweep stands while it runs, from any terminal or machine, or how it has ended",
        "status runs/lambda --watch",
        "Say who runs a sweep, what its workers do, what is done, learned and reused, the best AP so far, failures "
        "with their reasons, and how long it still takes. Of a sweep whose choices are being made it tells of its "
        "candidates. Changes nothing. Exit codes: 0 no trial has failed, 1 one has, 2 it could not be looked at.",
    )
    add_sweep_folder(status)
    showing = status.add_mutually_exclusive_group()
    showing.add_argument("--watch", action="store_true", help="go on until nobody runs it any more")
    add_json(showing)


def _plan(options: argparse.Namespace) -> int:
    from latent_sweep.execution.driver import check_devices, check_engine, choices_until_now, taken_name
    from latent_sweep.storage.folders import SweepFolder
    from latent_sweep.storage.snapshots import SnapshotStore
    from latent_sweep.storage.storage import open_storage
    from latent_sweep.sweep.config import load_sweep
    from latent_sweep.sweep.data_checks import check_sweep
    from latent_sweep.sweep.explain import explain_plan
    from latent_sweep.sweep.forecast import describe_plan, describe_tuning, plan_record
    from latent_sweep.sweep.plan import expand, pack
    from latent_sweep.sweep.tuning import (
        placeholders,
        selected_values,
        tuning_lines,
        tuning_sweep,
        tuning_trials,
    )

    sweep = load_sweep(options.sweep, options.overrides)
    check_engine(sweep.run.engine)
    storage = open_storage(sweep.run.storage)
    due = find_selections(sweep)
    tuning, candidates = tuning_sweep(sweep), tuning_trials(due)
    for name in (sweep.name, *([tuning.name] if due else [])):
        storage.pull(SweepFolder(storage, name).path)
    chosen = choices_until_now(due, SweepFolder(storage, tuning.name)) if due else []
    trials = expand(sweep, selected_values(sweep, chosen or placeholders(due)))
    check_devices(sweep, trials)
    warnings, packs = check_sweep(sweep, trials), pack(trials, sweep.run.pack)
    remarks = check_sweep(tuning, candidates) if candidates else []
    refusals = [taken_name(sweep, trials, SweepFolder(storage, sweep.name))]
    if candidates and chosen is None:  # then a run begins with them
        refusals.append(taken_name(tuning, candidates, SweepFolder(storage, tuning.name)))
    refused = [refusal for refusal in refusals if refusal]
    warnings += [f"`latent_sweep.run` will refuse this. {refusal}" for refusal in refused]
    candidate_packs = pack(candidates, sweep.run.pack)
    told = tuning_lines(chosen) if chosen else []
    if options.json:
        record = plan_record(sweep, trials, packs, storage, warnings)
        if candidates:
            tried = plan_record(tuning, candidates, candidate_packs, storage, remarks)
            record["tuning"] = {"chosen": told or None, "candidates": tried}
        print_json(record)
        return 2 if refused else 0
    if candidates:
        text = describe_plan(tuning, candidates, candidate_packs, storage, remarks)
        told = told or ["nothing yet: below, the first candidates stand for it"]
        lines = [*describe_tuning(sweep, due, trials), text, "", "chosen", *(f"  {line}" for line in told), ""]
        print(printable("\n".join(lines)))
    print(printable(describe_plan(sweep, trials, packs, storage, warnings)))
    if options.explain:
        print("", printable(explain_plan(sweep, trials, SnapshotStore(storage))), sep="\n")
    return 2 if refused else 0


def _settings(options: argparse.Namespace) -> int:
    from latent_sweep.sweep.schema import describe_settings, every_setting

    if options.json:
        found = every_setting()
        print_json({title.replace("`", ""): [facts._asdict() for facts in group] for title, group in found.items()})
    else:
        print(describe_settings())
    return 0


def _status(options: argparse.Namespace) -> int:
    from latent_sweep.monitor.log_lines import status_lines
    from latent_sweep.monitor.screen import watch
    from latent_sweep.monitor.state import SweepWatch, current
    from latent_sweep.storage.folders import open_sweep

    sweep = open_sweep(options.folder)
    if options.watch:
        watch(sweep)
    state = SweepWatch(current(sweep)).look()
    if options.json:
        print_json(state.record())
    else:
        print(printable("\n".join(status_lines(state))))
    return 1 if state.failed else 0
