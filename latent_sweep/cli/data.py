"""benchmark init and benchmark check: from data that lies somewhere to rows that can be trusted."""

from __future__ import annotations

import argparse

from latent_sweep.cli.command import Commands, add_command, add_json, print_json
from latent_sweep.security import printable


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    told = "write the file of a benchmark of one's own (init), and look at its rows (check)"
    parser = commands.add_parser("benchmark", help=told, description=f"{told[:1].upper()}{told[1:]}.")
    inner = parser.add_subparsers(required=True, metavar="WHAT")
    init = add_command(
        inner,
        "init",
        _init,
        "write a commented benchmark.yaml from the data in a folder",
        "benchmark init my_data",
        "Write a benchmark's file from what a folder holds: TRACE, SAPT's and CL_Benchmark's layout, task files of "
        "Super-NaturalInstructions, or files of JSON, JSON lines, CSV, Parquet and Arrow whose names say train and "
        "test. Columns, metrics, labels and lengths are guessed, and say so. No file is replaced.",
    )
    init.add_argument("folder", help="the folder with the data")
    init.add_argument("--output", metavar="FILE", help="default: benchmark.yaml in that folder")
    check = add_command(
        inner,
        "check",
        _check,
        "look at every row of a benchmark, as a sweep does before it starts, and more",
        "benchmark check my_data --backbone t5-large",
        "Say of every task how many rows it has and how they are spread, what stands there twice or nearly so, how "
        "long prompts and targets are in tokens, and what would spoil scores without a word. Exit codes: 0 no fault, "
        "1 a fault, 2 it could not be looked at.",
    )
    check.add_argument("benchmark", metavar="NAME", help="superni, long_sequence, builtin, or a folder or file")
    check.add_argument("--backbone", default="smollm2-135m", help="whose tokenizer counts; default: %(default)s")
    add_json(check)


def _init(options: argparse.Namespace) -> int:
    from latent_sweep.data.draft import draft_benchmark
    from latent_sweep.data.schema import BENCHMARK_FILE
    from latent_sweep.errors import ConfigError
    from latent_sweep.settings import local_path
    from latent_sweep.storage.files import write_file

    folder = local_path(options.folder)
    output = local_path(options.output) if options.output else folder / BENCHMARK_FILE
    if output.exists():
        raise ConfigError(f"{output}: is there already; remove it, or name another file by --output")
    text = draft_benchmark(folder, output)
    write_file(output, text.encode())
    print(printable(f"wrote {output}\nnext: latent-sweep benchmark check {output}"))
    return 0


def _check(options: argparse.Namespace) -> int:
    from latent_sweep.sweep.data_report import examine_benchmark

    report = examine_benchmark(options.benchmark, options.backbone)
    if options.json:
        print_json(report.record())
    else:
        print(printable("\n".join(report.lines())))
    return 1 if report.faults else 0
