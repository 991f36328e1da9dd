"""completion: what a shell needs to complete the commands, their options and the paths they take."""

from __future__ import annotations

import argparse
from functools import partial

from latent_sweep.cli.command import Commands, Parser, add_command

SHELLS = ("bash", "zsh", "tcsh")

FILES = ("sweep", "output")
FOLDERS = ("folder", "folders", "storage", "target")
"""Names of arguments that are paths."""


def add(commands: Commands, parser: Parser) -> None:
    """Add the command, which completes all of `parser`."""
    completion = add_command(
        commands,
        "completion",
        partial(_completion, parser),
        "print what a shell needs to complete these commands, their options and paths",
        "completion bash > ~/.local/share/bash-completion/completions/latent-sweep",
        "Print a completion script. bash: write it where the example says; zsh: into a file _latent-sweep in a folder "
        "of $fpath; tcsh: into a file that ~/.tcshrc sources.",
    )
    completion.add_argument("shell", choices=SHELLS)


def _completion(parser: Parser, options: argparse.Namespace) -> int:
    import shtab

    for action in _actions(parser):
        if action.dest in FILES + FOLDERS:
            action.complete = shtab.FILE if action.dest in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: Parser) -> list[argparse.Action]:
    """All arguments of a parser, those of its commands included."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for command in action.choices.values() for inner in _actions(command)]
    return found
