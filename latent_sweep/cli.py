"""latent-sweep: run, plan, report, bench, sync. Each command imports what it needs when it runs: --help is instant."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from latent_sweep import __version__
from latent_sweep.errors import LatentSweepError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script.

    Returns:
        0 if all went well, 1 if a trial failed, 2 if the command could not be carried out, 130 if it was interrupted.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    command: Callable[[argparse.Namespace], int] = options.carry_out
    try:
        return command(options)
    except LatentSweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports for it
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="latent-sweep", description="Sweeps of continual-learning trials on frozen language models."
    )
    parser.add_argument("--version", action="version", version=f"latent-sweep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a sweep file; the same command again resumes it")
    _add_sweep_arguments(run)
    run.add_argument("--local", action="store_true", help="run in this process, one pack after another, without Ray")
    run.set_defaults(carry_out=_run)

    plan = commands.add_parser("plan", help="print what a sweep file would run; checks it completely, runs nothing")
    _add_sweep_arguments(plan)
    plan.add_argument("--explain", action="store_true", help="say which setting makes or breaks the reuse of a stage")
    plan.set_defaults(carry_out=_plan)

    settings = commands.add_parser("settings", help="print every setting of a sweep file: default and meaning")
    settings.set_defaults(carry_out=_settings)

    report = commands.add_parser("report", help="print the table of a sweep that has run, or is running")
    report.add_argument("folder", help="the sweep's folder, e.g. runs/lambda")
    report.add_argument("--format", choices=["text", "markdown", "csv", "latex"], default="text")
    report.set_defaults(carry_out=_report)

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
        help="measure only these: step packs history generate evaluate start threads memory sweep; or methods, which "
        "takes about ten minutes and runs only when named",
    )
    bench.add_argument("--quick", action="store_true", help="little of everything: shows that it runs, no more")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument("--storage", default="runs", help="folder for the profile that `plan` reads; default: runs")
    bench.set_defaults(carry_out=_bench)

    sync = commands.add_parser("sync", help="bring everything on disk that MLflow lacks into it; safe to repeat")
    sync.add_argument("folder", help="the sweep's folder, e.g. runs/lambda")
    sync.add_argument("--uri", help="another MLflow tracking URI than the sweep file's")
    sync.set_defaults(carry_out=_sync)
    return parser


def _add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", help="a sweep file, e.g. sweeps/quickstart.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="change a setting of the file, e.g. --set trial.training.epochs=1; repeatable",
    )


def _run(options: argparse.Namespace) -> int:
    from latent_sweep.run import run_sweep

    return 1 if run_sweep(options.sweep, options.overrides, options.local) else 0


def _plan(options: argparse.Namespace) -> int:
    from latent_sweep.config import load_sweep
    from latent_sweep.explain import explain_plan
    from latent_sweep.forecast import describe_plan
    from latent_sweep.plan import expand, pack

    sweep = load_sweep(options.sweep, options.overrides)
    trials = expand(sweep)
    storage = Path(sweep.run.storage)
    print(describe_plan(sweep, trials, pack(trials, sweep.run.pack), storage))
    if options.explain:
        print("", explain_plan(sweep, trials, storage), sep="\n")
    return 0


def _settings(options: argparse.Namespace) -> int:
    from latent_sweep.config import describe_settings

    print(describe_settings())
    return 0


def _report(options: argparse.Namespace) -> int:
    from latent_sweep.report import render, summarise
    from latent_sweep.tracking import SweepFolder

    print(render(summarise(SweepFolder(Path(options.folder))), options.format))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from latent_sweep.bench.run import run_bench

    report = run_bench(
        options.backbone,
        options.device,
        options.dtype,
        options.only,
        options.quick,
        Path(options.storage),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report.json() if options.json else report.text())
    return 0


def _sync(options: argparse.Namespace) -> int:
    from latent_sweep.backends.mlflow_mirror import mirror_for
    from latent_sweep.tracking import SweepFolder

    folder = SweepFolder(Path(options.folder).resolve())
    mirror = mirror_for(options.uri or folder.tracking_uri, folder)
    mirror.open()
    changed = mirror.sync()
    mirror.close()
    print(f"{changed} runs brought up to date\ncompare   {mirror.ui_command()}\n          {mirror.link()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
