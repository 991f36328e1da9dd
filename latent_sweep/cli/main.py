"""The console script latent-sweep: run, plan, report, figures, rescore and so on; the commands are in `commands/`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from latent_sweep import __version__
from latent_sweep.cli import completion, machine, models, results, storage, sweeps, tracking
from latent_sweep.cli import data as benchmarks
from latent_sweep.cli import init as starting
from latent_sweep.run import Parser, carry_out, print_any_text

CHAPTERS = (starting, benchmarks, sweeps, results, models, storage, machine, tracking)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script.

    Returns:
        0 if all went well, 1 if a trial failed, `doctor` or `benchmark check` found a fault, `rescore` a score that is
        not that of its answers or cannot be computed again, or `verify` a difference (with `--repair`: one that is
        left, for the next run to mend), 2 if the command could not be carried out, 130 if it was interrupted, 143 if
        SIGTERM has ended it, 141 if the reader of its output has gone.
    """
    print_any_text()
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.carry_out
    return carry_out(command, options)


def _parser() -> Parser:
    parser = Parser(prog="latent-sweep", description="Sweeps of continual-learning trials on frozen language models.")
    parser.add_argument("--version", action="version", version=f"latent-sweep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for chapter in CHAPTERS:
        chapter.add(commands)
    completion.add(commands, parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
