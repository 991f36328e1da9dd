"""How a command is told of, by name, help and example, and what several of them take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeAlias

from latent_sweep.run import Parser as Parser

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of the console script, as argparse holds them."""

SWEEP_HELP = "its folder or URI, e.g. runs/lambda; a name alone is looked for in LATENT_SWEEP_STORAGE, else in runs"

CarryOut = Callable[[argparse.Namespace], int]
"""Carries a command out, and returns its exit code."""


def add_command(
    commands: Commands, name: str, carry_out: CarryOut, told: str, example: str, description: str | None = None
) -> Parser:
    """Add a command.

    Args:
        told: what it does, a line of the list of commands.
        example: a command line that does it, without `latent-sweep`.
        description: what its own help says; None is `told`.
    """
    said = description or f"{told[:1].upper()}{told[1:]}."
    if "exit code" not in said.lower():
        said += " Exit codes: 0 done, 2 it could not be carried out, 130 it was interrupted."
    parser: Parser = commands.add_parser(name, help=told, description=said, epilog=f"Example: latent-sweep {example}")
    parser.set_defaults(carry_out=carry_out)
    return parser


def add_sweep_folder(parser: Parser) -> None:
    """Add the argument that names a sweep that has run, or is running."""
    parser.add_argument("folder", help=SWEEP_HELP)


def add_tracker(parser: Parser) -> None:
    """Add the options that say which tracker a sweep is brought to."""
    parser.add_argument("--uri", help="another MLflow tracking URI than the sweep file's")
    parser.add_argument(
        "--allow-insecure", action="store_true", help="also a server on another machine without TLS or credentials"
    )


def add_json(parser: Any) -> None:
    """Add the option to print what a program may read."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(content: Any) -> None:
    """Print what `--json` asks for."""
    print(json.dumps(content, indent=1))
