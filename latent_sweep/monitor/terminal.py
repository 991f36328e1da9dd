"""Draws a sweep's state for a terminal, with rich, which is loaded when something is drawn.

Every line is cut at the terminal's width: one that wraps would break the screen when it is drawn again. Names are
shown as they are written, brackets included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from latent_sweep.monitor.log_lines import (
    best_text,
    doing_text,
    duration,
    failure_text,
    pack_text,
    place_text,
    stages_text,
    time_left_text,
)
from latent_sweep.monitor.state import Running, SweepState
from latent_sweep.results.trial_states import TrialState, counts_text
from latent_sweep.security import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

NARROW = 80
"""Columns below which bars are short and hosts are left out."""


def draw(state: SweepState, width: int, height: int) -> RenderableType:
    """Draw what is done, what has failed, and what every worker does; as many workers as there is room for.

    Args:
        width: columns of the terminal.
        height: its lines.
    """
    from rich.console import Group

    head = _head(state)
    room = max(4, height - len(head) - 3)  # for failures and workers; one line is the bar of all, one stays free
    failed = _failures(state.failed, room // 2)
    room -= len(failed)
    shown = state.running if len(state.running) <= room else state.running[: room - 1]
    rest = len(state.running) - len(shown)
    return Group(*head, *failed, _bars(state, shown, width), *([_line(f"and {rest} more workers")] if rest else []))


def _head(state: SweepState) -> list[Text]:
    counts = counts_text(state.counts, state.driver is not None)
    lines = [_line(f"{state.name}: {len(state.trials)} trials ({counts})", "bold")]
    if state.since:
        left = f", {time_left_text(state.left)}" if state.left else ""
        lines.append(_line(f"{duration(state.time - state.since)} so far{left}"))
    if state.best:
        lines.append(_line(f"best {best_text(state, state.best)}"))
    if state.driving:
        lines.append(_line(f"{state.driving} ({duration(state.time - state.driving_since)})"))
    return lines


def _failures(failed: Sequence[TrialState], most: int) -> list[Text]:
    shown = failed if len(failed) <= most else failed[: most - 1]
    lines = [_line(f"failed: {failure_text(trial)}", "red") for trial in shown]
    return lines + ([_line(f"and {len(failed) - len(shown)} more failed", "red")] if len(shown) < len(failed) else [])


def _bars(state: SweepState, workers: Sequence[Running], width: int) -> Table:
    """A bar for the whole sweep, and one for each of these workers."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    wide = width >= NARROW
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, max_width=width // 4)
    table.add_column(width=12 if wide else 8)
    table.add_column(no_wrap=True, ratio=1)
    if wide:
        table.add_column(no_wrap=True, justify="right", max_width=width // 4)

    def add(name: str, done: float, doing: str, place: str) -> None:
        row: list[RenderableType] = [
            _line(name),
            ProgressBar(total=1.0, completed=done),
            _line(doing),
            _line(place, "dim"),
        ]
        table.add_row(*row[: len(table.columns)])

    tasks = f"{state.tasks_done} of {state.tasks} tasks; {stages_text(state)}"
    add("all", state.tasks_done / max(1, state.tasks), tasks, "")
    for worker in workers:
        long = "" if worker.steps else f" ({duration(state.time - worker.since)})"
        add(pack_text(worker), worker.done, doing_text(worker) + long, place_text(worker))
    return table


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(" ".join(printable(text).split()), style, no_wrap=True, overflow="ellipsis")
