"""Shows a sweep that runs: on one screen of a terminal, which changes in place, or as plain lines.

A terminal has the screen; a pipe and a job's log have lines without cursor tricks. rich is loaded for the screen alone.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from latent_sweep.errors import StoreError
from latent_sweep.monitor.log_lines import duration, news, summary
from latent_sweep.monitor.state import SweepState, SweepWatch, current
from latent_sweep.monitor.terminal import draw
from latent_sweep.security import printable, redact, say
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.watch import FOLLOWING_SECONDS, Follower

if TYPE_CHECKING:
    from rich.console import Console

LOOK_SECONDS = 1.0
"""Between two looks at a sweep."""
LINE_SECONDS = 15.0
"""Between two plain lines about what runs."""
HANDOVER_SECONDS = 60.0
"""How long a driver that has made its choices may take until it runs the trials."""
LOG = "output.log"
"""In the sweep's folder: what libraries and workers print while a terminal has the screen."""


class Screen(Protocol):
    """Where a running sweep is shown."""

    def __enter__(self) -> Screen:
        """Begin to show it."""

    def __exit__(self, *exception: object) -> None:
        """Leave what was told, and nothing that changes."""

    def tell(self, text: str) -> None:
        """Print lines that stay."""

    def show(self, state: SweepState) -> None:
        """Show where the sweep stands now."""


def screen_for(sweep: SweepFolder, log: bool) -> Screen:
    """Return the screen where standard output is a terminal that can move its cursor, and plain lines elsewhere.

    Args:
        log: whether what others print meanwhile goes to a file in the sweep's folder: where this process runs it, also
            after the reader of its lines has gone.
    """
    lines = Lines(say if log else None)
    if not sys.stdout.isatty():
        return lines
    from rich.console import Console

    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    if console.is_dumb_terminal:
        return lines
    return Live(console, sweep.path / LOG if log else None)


# --- looking ---------------------------------------------------------------------------------------------------------


class Following:
    """Shows a sweep that this process drives, from a thread, within a block."""

    def __init__(self, sweep: SweepFolder, screen: Screen):
        self._reel = Reel(SweepWatch(sweep, drives=True), screen)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="progress", daemon=True)

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _loop(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        with suppress(StoreError):  # whoever reads a damaged journal for more than display says so
            self._reel.look()


class Reel:
    """Shows one look at a sweep after another: what is new since the last one, and where it stands."""

    def __init__(self, watch: SweepWatch, screen: Screen):
        self._watch, self._screen, self._began = watch, screen, time.monotonic()
        self._last = watch.look()
        screen.show(self._last)

    def look(self) -> SweepState:
        """Look once more, and return where the sweep stands."""
        state = self._watch.look()
        for line in news(self._last, state):
            self._screen.tell(f"[{duration(time.monotonic() - self._began)}] {line}")
        self._last = state
        self._screen.show(state)
        return state


def watch(sweep: SweepFolder) -> None:
    """Show a sweep that another process drives, and before it the one with its candidates, until nobody does."""
    seen: SweepFolder | None = None
    with screen_for(sweep, log=False) as screen:
        while True:
            here = current(sweep)
            if seen is None or here.name != seen.name:
                sweep.storage.pull(here.path)
                follower = Follower(sweep.storage, here.path)
                seen, reel, until = here, Reel(SweepWatch(here), screen), time.monotonic()
            state = reel.look()
            if state.driver is not None:
                until = time.monotonic() + (HANDOVER_SECONDS if here.name != sweep.name else 0.0)
            elif time.monotonic() >= until:
                return
            time.sleep(FOLLOWING_SECONDS if sweep.storage.is_remote else LOOK_SECONDS)
            follower.follow()


# --- plain lines -----------------------------------------------------------------------------------------------------


class Lines:
    """Prints plain lines: the same text is readable in a terminal and in a job's log.

    Args:
        write: prints a line.
        interval_seconds: between lines about what runs.
    """

    def __init__(self, write: Callable[[str], None] | None = None, interval_seconds: float = LINE_SECONDS):
        self._write, self._interval = write or _print, interval_seconds
        self._began = self._last_line = time.monotonic()
        self._doing: str | None = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def tell(self, text: str) -> None:
        """Print lines."""
        self._last_line = time.monotonic()
        self._write(text)

    def show(self, state: SweepState) -> None:
        """Print a line about where the sweep stands: every so often, and when its driver goes on to something else."""
        doing = state.driving or ("running" if state.running else self._doing)
        new, self._doing = doing != self._doing, doing
        if new or time.monotonic() - self._last_line >= self._interval:
            self.tell(f"[{duration(time.monotonic() - self._began)}] {summary(state)}")


def _print(text: str) -> None:
    print(printable(text), flush=True)


# --- the screen ------------------------------------------------------------------------------------------------------


class Live:
    """Shows the state in place, at the end of a terminal, with what is told above it.

    Meanwhile whatever else this process prints, its workers' output among it, goes to a file: nothing breaks the
    screen. Warnings of this process are told as well; errors are not: failures of trials are told from their journals.

    Args:
        log: that file; None leaves other output where it is.
    """

    def __init__(self, console: Console, log: Path | None):
        self._console, self._log = console, log
        self._live: Any = None
        self._file: _Log | None = None

    def __enter__(self) -> Live:
        if self._log is not None:
            self._before = sys.stdout, sys.stderr, logging.getLogger().handlers[:]
            self._file = _Log(self._log, sys.stderr)
            sys.stdout = sys.stderr = self._file
            logging.getLogger().handlers[:] = self._handlers(self._file)
            self.tell(f"output    of workers and libraries goes to {self._log}")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._file is not None:
            sys.stdout, sys.stderr, logging.getLogger().handlers[:] = self._before
            self._file.close()

    def tell(self, text: str) -> None:
        """Print lines above what changes."""
        from rich.text import Text

        self._console.print(Text(printable(text)))

    def show(self, state: SweepState) -> None:
        """Draw where the sweep stands in the place of what was drawn before."""
        drawing = draw(state, self._console.width, self._console.height)
        if self._live is None:
            from rich.live import Live as RichLive

            self._live = RichLive(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(drawing, refresh=True)

    def _handlers(self, file: _Log) -> list[logging.Handler]:
        """All that is logged goes to the file; warnings, which may ask for something, are also told."""
        whole, above = logging.StreamHandler(file), _Above(self.tell)
        whole.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        return [whole, above]


class _Above(logging.Handler):
    """Tells warnings above the screen."""

    def __init__(self, tell: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a warning; of an error the journals tell."""
        if record.levelno < logging.ERROR:
            with suppress(Exception):  # as any handler: what cannot be shown ends nothing
                self._tell(f"WARNING {record.getMessage()}")


class _Log(io.TextIOBase):
    """A file that takes the place of standard output and standard error, without secrets.

    Who has kept it for longer writes to `after`.
    """

    def __init__(self, path: Path, after: IO[str]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._after = path.open("a", encoding="utf-8", errors="backslashreplace"), after

    def write(self, text: str) -> int:
        """Write text."""
        with suppress(OSError):  # a full disk stops what must be kept, and that says so
            if self._file.closed:
                self._after.write(text)
            else:
                self._file.write(redact(text))
                self._file.flush()
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is written is in the file."""

    def writable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Close the file; this object goes on."""
        self._file.close()
