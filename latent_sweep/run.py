"""The main job: python -m latent_sweep.run SWEEP.yaml

Reads the sweep, runs what is missing, mirrors it into MLflow, prints the comparison. The same command again resumes.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from latent_sweep.errors import LatentSweepError, Terminated
from latent_sweep.security import discard_output, log_without_secrets, printable


class Parser(argparse.ArgumentParser):
    """A parser of a command line that says what a misspelled command, option or choice may have been."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and what was meant if it is close to it; ends with 2."""
        super().error(message + self._hint(message))

    def _hint(self, message: str) -> str:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        wrong, known = ([choice[1]], re.findall(r"[\w.-]+", choice[2])) if choice else ([], [])
        if message.startswith("unrecognized arguments: "):
            wrong = [word.partition("=")[0] for word in message.split() if word.startswith("-")]
            known = self._options()
        near = [difflib.get_close_matches(word, known, n=1) for word in wrong]
        found = [f"{word}: did you mean {close[0]}?" for word, close in zip(wrong, near, strict=True) if close]
        return f"\n{chr(10).join(found)}" if found else ""

    def _options(self) -> list[str]:
        """Options of this parser and of its commands."""
        options = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                options += [name for command in action.choices.values() for name in command._options()]
        return list(dict.fromkeys(options))


RUN_EXIT_CODES = (
    "Exit codes: 0 every trial ended well, 1 a trial failed, 2 it could not be started, or something outside the "
    "trials went wrong, 130 it was interrupted, 143 SIGTERM ended it."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the job; the same as `latent-sweep run`, see `cli.main` for what it returns."""
    print_any_text()
    parser = Parser(
        prog="python -m latent_sweep.run", description=f"{(__doc__ or '').partition(chr(10) * 2)[2]} {RUN_EXIT_CODES}"
    )
    add_arguments(parser)
    return carry_out(run, parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that running a sweep takes."""
    add_sweep_arguments(parser)
    parser.add_argument("--local", action="store_true", help="run in this process, one pack after another, without Ray")
    failing = parser.add_mutually_exclusive_group()
    failing.add_argument("--fail-fast", action="store_true", help="end the sweep when a trial has failed")
    failing.add_argument(
        "--keep-going",
        dest="fail_fast",
        action="store_false",
        help="go on with the other trials when one has failed (default)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="run it although another sweep of this name has scored trials that this one lacks, which leave its "
        "table, or has results of other data, backbone or code, which are computed again",
    )
    parser.add_argument("--failed", action="store_true", help="run the trials that have failed before, and no others")


def add_sweep_arguments(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """Add the arguments for a sweep file, which may be optional, and changes of it."""
    nargs = "?" if optional else None
    parser.add_argument("sweep", nargs=nargs, help="a sweep file, e.g. sweeps/quickstart.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help="change a setting of the file, e.g. --set trial.training.epochs=1; repeatable",
    )


def run(options: argparse.Namespace) -> int:
    """Run a sweep to its end; 1 where a trial did not come to its own."""
    from latent_sweep.execution.driver import run_sweep

    unfinished = run_sweep(
        options.sweep, options.overrides, options.local, options.fail_fast, options.failed, options.replace
    )
    return 1 if unfinished else 0


def print_any_text() -> None:
    """Have standard output replace the characters that its encoding does not have, e.g. by `?`.

    A stream that the caller has closed takes everything and keeps nothing.
    """
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def carry_out(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return its exit code; what goes wrong is said on standard error, without secrets."""
    log_without_secrets()
    with _ending_on_sigterm() as received:
        try:
            code = command(options)
            sys.stdout.flush()
            return code
        except LatentSweepError as error:
            print(printable(f"error: {error}"), file=sys.stderr)
            return 2
        except BrokenPipeError:  # the reader has seen enough, e.g. `| head`
            discard_output()
            return 141  # what a shell reports for it
        except KeyboardInterrupt as error:
            ended = received or isinstance(error, Terminated)  # Ray's own code raises a KeyboardInterrupt anew
            word, code = ("terminated", 143) if ended else ("interrupted", 130)
            print(f"{word}{'; run the same command again to go on from here' * (command is run)}", file=sys.stderr)
            return code
        except Exception:  # a fault of ours; its traceback may quote an address or a token
            print(printable(traceback.format_exc()), end="", file=sys.stderr)
            return 2


@contextmanager
def _ending_on_sigterm() -> Iterator[list[int]]:
    """Have SIGTERM end the block as Ctrl-C does, and a second one end the process at once.

    The list that it gives holds the signal's number once it was received.
    """
    received: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield received  # whoever has set a handler, or ignores the signal, decides
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
