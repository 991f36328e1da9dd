"""The console script latent-sweep."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from latent_sweep import __version__
from latent_sweep.cli import completion, data, init, machine, models, results, storage, sweeps, tracking
from latent_sweep.run import Parser, print_any_text, run_command

GROUPS = {
    "run": ("init", "benchmark", "settings", "plan", "run"),
    "inspect": ("status", "report", "figures", "rescore"),
    "models": ("ask", "export"),
    "storage": ("list", "cp", "delete", "gc", "verify", "sync"),
    "machine": ("doctor", "completion"),
}
"""The commands as `--help` lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0: success; 1: a failed trial, a fault or a difference; 2: not carried out; 75: not finished, out of time;
    130: interrupted; 141: the reader of the output has gone; 143: ended by SIGTERM.
    """
    print_any_text()
    options = make_parser().parse_args(arguments)
    action: Callable[[argparse.Namespace], int] = options.action
    return run_command(action, options)


class _MainParser(Parser):
    """The top-level parser, whose help lists the commands by group."""

    def format_help(self) -> str:
        (commands,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        lines = [self.format_usage(), self.description or "", ""]
        for title, names in GROUPS.items():
            present = [(name, commands.choices[name].summary) for name in names if name in commands.choices]
            lines += [f"{title}:", *(f"  {name:<11} {summary}" for name, summary in present), ""]
        return "\n".join([*lines, "`latent-sweep COMMAND --help` explains a command and its options.", ""])


def make_parser() -> Parser:
    parser = _MainParser(
        prog="latent-sweep", description="Run sweeps of continual-learning trials on frozen language models."
    )
    parser.add_argument("--version", action="version", version=f"latent-sweep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for module in (init, data, sweeps, results, models, storage, machine, tracking):
        module.add(commands)
    completion.add(commands, parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
