"""The command completion."""

from __future__ import annotations

import argparse
from functools import partial

from latent_sweep.cli.command import Commands, Parser, add_command

SHELLS = ("bash", "zsh", "tcsh")

FILES = ("sweep", "output")
FOLDERS = ("folder", "folders", "storage", "target")
"""Arguments that take paths."""


def add(commands: Commands, parser: Parser) -> None:
    completion = add_command(
        commands,
        "completion",
        partial(_completion, parser),
        "print a shell script that completes commands, options and paths",
        "completion bash > ~/.local/share/bash-completion/completions/latent-sweep",
        "Print a completion script. bash: save it as in the example; zsh: save it as _latent-sweep in a folder of "
        "$fpath; tcsh: save it to a file that ~/.tcshrc sources.",
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
    actions = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions += [inner for command in action.choices.values() for inner in _actions(command)]
    return actions
