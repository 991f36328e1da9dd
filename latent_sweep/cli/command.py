"""Shared parts of the commands: registration, common options, JSON output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeAlias

from latent_sweep.run import Parser as Parser

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

SWEEP_HELP = (
    "the sweep's folder or URI, e.g. runs/lambda; a bare name is searched in LATENT_SWEEP_STORAGE, else in runs"
)

Action = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit code."""


def add_command(
    commands: Commands, name: str, action: Action, summary: str, example: str, description: str | None = None
) -> Parser:
    """Add a command; `example` has arguments of `latent-sweep`, and `description` is `summary` by default."""
    text = description or f"{summary[:1].upper()}{summary[1:]}."
    if "exit code" not in text.lower():
        text += " Exit codes: 0 done, 2 it could not be carried out, 130 it was interrupted."
    parser: Parser = commands.add_parser(
        name, help=summary, description=text, epilog=f"Example: latent-sweep {example}"
    )
    parser.summary = summary
    parser.set_defaults(action=action)
    return parser


def add_sweep_folder(parser: Parser) -> None:
    parser.add_argument("folder", help=SWEEP_HELP)


def add_tracker(parser: Parser) -> None:
    parser.add_argument("--uri", help="MLflow tracking URI to use instead of the sweep file's")
    parser.add_argument(
        "--allow-insecure", action="store_true", help="allow a server on another machine without TLS or credentials"
    )


def add_json(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1))
