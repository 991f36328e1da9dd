"""The commands run, plan, settings and status."""

from __future__ import annotations

import argparse

from latent_sweep.cli.command import Commands, add_command, add_json, add_sweep_folder, print_json
from latent_sweep.run import RUN_EXIT_CODES, add_arguments, add_sweep_arguments
from latent_sweep.run import run as run_a_sweep
from latent_sweep.security import printable


def add(commands: Commands) -> None:
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
        "check a sweep file completely and print what it would run",
        "plan sweeps/lambda.yaml --explain",
        "Check a sweep file completely, and print what it would run: trials, trainings, packs, memory, and what the "
        "storage holds already. Runs nothing. Exit codes: 0 `run` would start it, 2 `run` would refuse it; the last "
        "lines give the reason.",
    )
    add_sweep_arguments(plan)
    plan.add_argument("-v", "--verbose", action="store_true", help="print every number, and every training")
    how = plan.add_mutually_exclusive_group()
    how.add_argument("--explain", action="store_true", help="show which settings allow or prevent the reuse of a stage")
    add_json(how)

    settings = add_command(
        commands,
        "settings",
        _settings,
        "print every setting of a sweep file with default and meaning",
        "settings | less",
    )
    add_json(settings)

    status = add_command(
        commands,
        "status",
        _status,
        "show the progress of a running sweep, from any machine, or how it ended",
        "status runs/lambda --watch",
        "Show the driver and the workers of a sweep, finished, learned and reused stages, the best AP so far, failures "
        "with their reasons, and the time left. While a sweep is being tuned, the tuning trials are shown. Changes "
        "nothing. Exit codes: 0 no trial has failed, 1 a trial has failed, 2 the status could not be read.",
    )
    add_sweep_folder(status)
    showing = status.add_mutually_exclusive_group()
    showing.add_argument("--watch", action="store_true", help="keep updating until the sweep ends")
    add_json(showing)


def _plan(options: argparse.Namespace) -> int:
    from latent_sweep.api import Plan
    from latent_sweep.sweep.config import load_sweep

    plan = Plan(load_sweep(options.sweep, options.overrides))
    if options.json:
        print_json(plan.record())
    else:
        print(printable(plan.text(options.verbose)))
    if options.explain:
        print("", printable(plan.explain()), sep="\n")
    return 2 if plan.conflicts else 0


def _settings(options: argparse.Namespace) -> int:
    from latent_sweep.sweep.schema import describe_settings, every_setting

    if options.json:
        sections = {title.replace("`", ""): group for title, group in every_setting().items()}
        print_json({title: [facts._asdict() for facts in group] for title, group in sections.items()})
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
