"""latent-sweep: run, plan, report, figures, rescore and so on. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from latent_sweep import __version__
from latent_sweep.run import add_arguments, add_sweep_arguments, carry_out
from latent_sweep.run import run as run_a_sweep
from latent_sweep.security import printable

if TYPE_CHECKING:
    from latent_sweep.backends.mlflow_mirror import MlflowMirror, NullMirror
    from latent_sweep.store.folders import SweepFolder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script.

    Returns:
        0 if all went well, 1 if a trial failed, `doctor` found a fault, `rescore` a score that is not that of its
        answers or cannot be computed again, or `verify` a difference (with `--repair`: one that is left, for the next
        run to mend), 2 if the command could not be carried out, 130 if it was interrupted.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.carry_out
    return carry_out(command, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="latent-sweep", description="Sweeps of continual-learning trials on frozen language models."
    )
    parser.add_argument("--version", action="version", version=f"latent-sweep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a sweep file; the same command again resumes it")
    add_arguments(run)
    run.set_defaults(carry_out=run_a_sweep)

    plan = commands.add_parser("plan", help="print what a sweep file would run; checks it completely, runs nothing")
    add_sweep_arguments(plan)
    plan.add_argument("--explain", action="store_true", help="say which setting makes or breaks the reuse of a stage")
    plan.set_defaults(carry_out=_plan)

    settings = commands.add_parser("settings", help="print every setting of a sweep file: default and meaning")
    settings.set_defaults(carry_out=_settings)

    status = commands.add_parser(
        "status",
        help="say where a sweep stands while it runs, from any terminal or machine, or how it has ended",
        description="Say who runs a sweep, what its workers do, what is done, learned and reused, the best AP so far, "
        "failures with their reasons, and how long it still takes. Of a sweep whose choices are being made it tells of "
        "its candidates. Changes nothing. Exit codes: 0 no trial has failed, 1 one has, 2 it could not be looked at.",
    )
    status.add_argument("folder", help="the sweep's folder or its URI, e.g. runs/lambda")
    showing = status.add_mutually_exclusive_group()
    showing.add_argument("--watch", action="store_true", help="go on until nobody runs it any more")
    showing.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(carry_out=_status)

    report = commands.add_parser(
        "report",
        help="print the tables of a sweep that has run, or is running; as HTML, also its pictures",
        description="Print the tables of a sweep; several sweeps are compared first. --format html writes one file "
        "with tables and pictures that needs nothing beside it, e.g. latent-sweep report runs/lambda --format html.",
    )
    report.add_argument("folders", nargs="+", metavar="folder", help="a sweep's folder, e.g. runs/lambda")
    report.add_argument("--format", choices=["text", "markdown", "csv", "latex", "html"], default="text")
    report.add_argument(
        "--output",
        metavar="FILE",
        help="write into this file instead of printing; default for html: report.html in the sweep's folder, or of "
        "several sweeps in the working directory",
    )
    report.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="AXIS",
        help="also this axis repeats a configuration, as the seed does: benchmark.order; may be given again",
    )
    report.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="compare all others with this configuration: method=seq_lora; given again where it takes several settings",
    )
    report.set_defaults(carry_out=_report)

    figures = commands.add_parser(
        "figures",
        help="write every picture of a sweep as PDF and PNG, at the width of a paper's page or column",
        description="Write every picture of a sweep's report as PDF, with embedded fonts, and as PNG, e.g. "
        "latent-sweep figures runs/lambda. A README.md beside them holds their captions.",
    )
    figures.add_argument("folder", help="the sweep's folder, e.g. runs/lambda")
    figures.add_argument("--output", metavar="FOLDER", help="default: figures in the sweep's folder")
    figures.add_argument("--over", action="append", default=[], metavar="AXIS", help="as for report")
    figures.set_defaults(carry_out=_figures)

    rescore = commands.add_parser(
        "rescore",
        help="compute all scores, AP and FM again from the answers that trials have kept",
        description="Score the kept answers of every trial again, stage by stage and task by task, against the "
        "references kept beside them, which must be those of the benchmark's data where that is at hand; say which "
        "scores, AP or FM are stored otherwise, and what could not be scored again and why. Generates and changes "
        "nothing. Exit codes: 0 every stored score is that of its answers, 1 one is not, or could not be computed "
        "again, 2 it could not be looked at.",
    )
    rescore.add_argument("folder", help="the sweep's folder, e.g. runs/lambda")
    rescore.add_argument("--json", action="store_true", help="print JSON")
    rescore.set_defaults(carry_out=_rescore)

    doctor = commands.add_parser(
        "doctor",
        help="find out whether this machine or cluster can be trusted with a sweep; under two minutes without one",
        description="Check packages, device, storage, tracker and every method, on a Ray cluster each node too; with a "
        "sweep file also its data and its backbone, which takes one real step. Leaves nothing behind but caches that a "
        "run needs anyway. Exit codes: 0 no fault, 1 a fault, 2 it could not be checked.",
    )
    add_sweep_arguments(doctor, optional=True)
    doctor.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: the GPU where there is one"
    )
    doctor.add_argument(
        "--address", metavar="HOST:PORT", help="a Ray cluster whose nodes are checked; default: that of RAY_ADDRESS"
    )
    doctor.set_defaults(carry_out=_doctor)

    bench = commands.add_parser("bench", help="measure this machine: against the bare backbone, and the usual way")
    bench.add_argument("--backbone", default="smollm2-135m", help="as in a sweep file; default: %(default)s")
    bench.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU where there is one")
    bench.add_argument(
        "--dtype", choices=["float32", "bfloat16"], nargs="+", default=[], help="one step is measured with each"
    )
    bench.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART",
        help="measure only these: step packs history generate evaluate start threads memory sweep; or tasks, methods "
        "and shards, which take several minutes to an hour and run only when named",
    )
    bench.add_argument("--quick", action="store_true", help="little of everything: shows that it runs, no more")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument("--storage", default="runs", help="folder for the profile that `plan` reads; default: runs")
    bench.set_defaults(carry_out=_bench)

    sync = commands.add_parser("sync", help="bring everything on disk that MLflow lacks into it; safe to repeat")
    _add_tracker_arguments(sync)
    sync.set_defaults(carry_out=_sync)

    verify = commands.add_parser(
        "verify",
        help="check that the disk is whole and that MLflow holds what the journals say",
        description="Check the disk: every line of every journal checks against its digest, every file of results and "
        "every snapshot against what the journals say. If it is whole, check MLflow: runs, params, tags, status, every "
        "point of every metric, artifacts (pictures by name, snapshots by size, the rest byte for byte). Prints what "
        "differs; changes nothing without --repair. Exit codes: 0 equal, 1 something differs (with --repair: something "
        "is left for the next run), 2 it could not be checked.",
    )
    verify.add_argument(
        "--repair",
        action="store_true",
        help="set aside what is damaged on disk, so that the same run command makes it again, and say what that takes; "
        "if the disk is whole, bring MLflow what it lacks, with new runs in the place of those that cannot be mended",
    )
    _add_tracker_arguments(verify)
    verify.set_defaults(carry_out=_verify)
    return parser


def _add_tracker_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="the sweep's folder, e.g. runs/lambda")
    parser.add_argument("--uri", help="another MLflow tracking URI than the sweep file's")
    parser.add_argument(
        "--allow-insecure", action="store_true", help="also a server on another machine without TLS or credentials"
    )


def _plan(options: argparse.Namespace) -> int:
    from latent_sweep.backends.driver import check_engine
    from latent_sweep.store.folders import SweepFolder
    from latent_sweep.store.snapshots import SnapshotStore
    from latent_sweep.store.storage import open_storage
    from latent_sweep.sweep.checks import check_sweep
    from latent_sweep.sweep.config import load_sweep
    from latent_sweep.sweep.explain import explain_plan
    from latent_sweep.sweep.forecast import describe_plan, describe_tuning
    from latent_sweep.sweep.plan import expand, pack
    from latent_sweep.sweep.tuning import (
        candidate_trials,
        choices,
        chosen_for,
        known_choices,
        stand_ins,
        tuning_lines,
        tuning_sweep,
    )

    sweep = load_sweep(options.sweep, options.overrides)
    check_engine(sweep.run.engine)
    storage = open_storage(sweep.run.storage)
    due = choices(sweep)
    tuning, candidates = tuning_sweep(sweep), candidate_trials(due)
    chosen = known_choices(due, SweepFolder(storage, tuning.name))
    trials = expand(sweep, chosen_for(sweep, chosen or stand_ins(due)))
    warnings = check_sweep(sweep, trials)
    if candidates:
        remarks = check_sweep(tuning, candidates)
        text = describe_plan(tuning, candidates, pack(candidates, sweep.run.pack), storage, remarks)
        told = tuning_lines(chosen) if chosen else ["nothing yet: below, the first candidates stand for it"]
        lines = [*describe_tuning(sweep, due, trials), text, "", "chosen", *(f"  {line}" for line in told), ""]
        print(printable("\n".join(lines)))
    print(printable(describe_plan(sweep, trials, pack(trials, sweep.run.pack), storage, warnings)))
    if options.explain:
        print("", printable(explain_plan(sweep, trials, SnapshotStore(storage))), sep="\n")
    return 0


def _settings(options: argparse.Namespace) -> int:
    from latent_sweep.sweep.groups import describe_settings

    print(describe_settings())
    return 0


def _status(options: argparse.Namespace) -> int:
    from latent_sweep.results.lines import status_lines
    from latent_sweep.results.screen import watch
    from latent_sweep.results.state import SweepWatch, current
    from latent_sweep.store.folders import open_sweep

    sweep = open_sweep(options.folder)
    if options.watch:
        watch(sweep)
    state = SweepWatch(current(sweep)).look()
    print(json.dumps(state.record(), indent=1) if options.json else printable("\n".join(status_lines(state))))
    return 1 if state.failed else 0


def _report(options: argparse.Namespace) -> int:
    from latent_sweep.results.report import render_all
    from latent_sweep.results.summaries import summarise
    from latent_sweep.store.files import write_file
    from latent_sweep.store.folders import open_sweep

    sweeps = [open_sweep(folder) for folder in options.folders]
    output = Path(options.output) if options.output else None
    if options.format == "html":
        from latent_sweep.results.page import render_page
        from latent_sweep.results.sections import PAGE_FILE

        output = output or (sweeps[0].path / PAGE_FILE if len(sweeps) == 1 else Path(PAGE_FILE))
        text = render_page(sweeps, options.over, options.baseline)
    else:
        text = render_all([summarise(sweep, options.over, options.baseline) for sweep in sweeps], options.format)
    if output is None:
        print(text)
    else:
        write_file(output, text.encode())
        print(printable(str(output)))
    return 0


def _figures(options: argparse.Namespace) -> int:
    from latent_sweep.results.export import export_pictures
    from latent_sweep.store.folders import open_sweep

    sweep = open_sweep(options.folder)
    folder = Path(options.output) if options.output else sweep.path / "figures"
    names = export_pictures(sweep, folder, options.over)
    print(printable(f"{len(names)} pictures as PDF and PNG in {folder}"))
    return 0


def _rescore(options: argparse.Namespace) -> int:
    from latent_sweep.results.rescore import rescore
    from latent_sweep.store.folders import open_sweep

    trials = rescore(open_sweep(options.folder))
    if options.json:
        print(json.dumps([trial.record() for trial in trials], indent=1))
    else:
        print(printable("\n".join(line for trial in trials for line in trial.lines())))
    return 0 if all(trial.equal for trial in trials) else 1


def _doctor(options: argparse.Namespace) -> int:
    from latent_sweep.doctor.examination import examine

    healthy = examine(
        options.sweep, options.overrides, options.device, options.address, lambda text: print(text, flush=True)
    )
    return 0 if healthy else 1


def _bench(options: argparse.Namespace) -> int:
    from latent_sweep.bench.run import run_bench
    from latent_sweep.store.storage import open_storage

    report = run_bench(
        options.backbone,
        options.device,
        options.dtype,
        options.only,
        options.quick,
        open_storage(options.storage),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report.json() if options.json else report.text())
    return 0


def _sync(options: argparse.Namespace) -> int:
    _, mirror = _tracked_sweep(options)
    changed = mirror.close()
    lines = [f"{changed} runs brought up to date", f"compare   {mirror.ui_command()}", f"          {mirror.link()}"]
    print(printable("\n".join(lines)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from latent_sweep.backends.mlflow_mirror import MlflowMirror
    from latent_sweep.backends.verify import repair_disk, repair_tracker, verify_disk, verify_tracker

    folder, mirror = _tracked_sweep(options)
    disk = verify_disk(folder)
    print(printable(f"disk\n{disk.text()}"), flush=True)
    if disk.faults and options.repair:
        if remedies := repair_disk(folder):
            print("set aside; the same run command makes it again:", *map(printable, remedies), sep="\n")
            return 1
        print("fetched again from the object store")
    elif disk.faults:
        return _differs()
    if not isinstance(mirror, MlflowMirror):
        return 0
    tracker = verify_tracker(folder, mirror)
    print(printable(f"MLflow at {mirror.uri}\n{tracker.text()}"), flush=True)
    if tracker.faults and options.repair:
        repair_tracker(folder, mirror)
        tracker = verify_tracker(folder, mirror)
        print(printable(f"repaired\n{tracker.text()}"))
    elif tracker.faults:
        return _differs()
    return 1 if tracker.faults else 0


def _differs() -> int:
    print("nothing was changed; the same command with --repair mends it, or makes it ready for the next run to mend")
    return 1


def _tracked_sweep(options: argparse.Namespace) -> tuple[SweepFolder, MlflowMirror | NullMirror]:
    from latent_sweep.backends.mlflow_mirror import mirror_for
    from latent_sweep.store.folders import open_sweep

    folder = open_sweep(options.folder)
    return folder, mirror_for(options.uri or folder.tracking_uri, folder, options.allow_insecure)


if __name__ == "__main__":
    sys.exit(main())
