"""The cost of a sweep: hours at the prices of the sweep file, requests to an object store, and gigabytes written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from latent_sweep.storage.predictions import KeepAnswers
from latent_sweep.sweep.schema import PriceSettings, ResourceSettings, RunSettings

GB = 10**9
UNITS = ("B", "kB", "MB", "GB", "TB")

# Requests per event, as the store and pyarrow make them, in PUTs (with lists) and GETs (with looks at an object). An
# object is looked at before it is read or deleted, and deleting one PUTs a marker of its folder.
PUTS_PER_STAGE, GETS_PER_STAGE = 5, 9
"""Tensors and facts, the lease and its release, looking for these and for a checkpoint, deleting the checkpoint."""
PUTS_PER_CHECKPOINT, GETS_PER_CHECKPOINT = 1, 1
PUTS_PER_ROW, GETS_PER_ROW = 3, 2
"""The score matrix, a list for the times of its files, a journal event."""
PUTS_PER_FILE, GETS_PER_FILE = 1, 0
"""Files of predictions written with a row: one for each task seen, and one with the saved answers."""
PUTS_PER_TRIAL, GETS_PER_TRIAL = 4, 5
"""A list of its folder, two journal events, the result."""
PUTS_PER_TRAINING, GETS_PER_TRAINING = 2, 4
"""The lease on its trials."""
PUTS_PER_HOUR, GETS_PER_HOUR = 60 * 4, 60 * 4
"""A worker's heartbeat every 15 seconds, which the driver reads every 30."""

BYTES_PER_PARAMETER = 4
"""Of a snapshot, in float32, without what a method saves besides its trainable parameters."""
BYTES_PER_SNAPSHOT = 2000
BYTES_PER_ANSWER = 80
"""Of a saved answer with its score; published targets have about ten tokens."""
BYTES_PER_PREDICTION = 200
"""Of an answer of the newest stage, with references and weights."""
BYTES_PER_EVENT, BYTES_PER_TASK_SEEN = 1500, 250
"""Of a stage in the journal, and of each task's score, metric and digest in it."""

OTHER = "any"
"""Key of `gpu_hour` for GPUs without a price of their own."""


@dataclass(frozen=True)
class Writing:
    """What the work that is left writes."""

    trainings: int
    trials: int
    stages: int
    """Snapshots."""
    numbers: int
    """Trainable parameters of all stages, without those of backbones whose shapes are unknown here."""
    checkpoints: int
    """Within stages."""
    rows: int
    """Of score matrices."""
    files: int
    """Predictions of these rows, one for each task seen."""
    answers: int
    """Of these rows."""
    predictions: int
    """Answers of the last row of each trial."""


class Item(NamedTuple):
    """An amount, as a range, and the price of a unit."""

    name: str
    least: float
    most: float
    price: float | None = None

    def record(self) -> dict[str, Any]:
        costs = (None, None) if self.price is None else (self.least * self.price, self.most * self.price)
        return {**self._asdict(), "cost_least": costs[0], "cost_most": costs[1]}

    def text(self) -> str:
        least, most, name = self.least, self.most, self.name
        if "-hours" in name and most < 1:
            least, most, name = 60 * least, 60 * most, name.replace("-hours", "-minutes")
        amount = f"{_span(least, most, _number)} {name}"
        if self.price is None:
            return amount
        return f"{amount} ({_span(self.least * self.price, self.most * self.price, '{:,.2f}'.format)})"


def items_text(items: Sequence[Item]) -> str:
    text = ", ".join(item.text() for item in items)
    priced = [(item.least * item.price, item.most * item.price) for item in items if item.price is not None]
    if len(priced) < 2:
        return text
    least, most = (math.fsum(cost[end] for cost in priced) for end in (0, 1))
    return f"{text}; {_span(least, most, '{:,.2f}'.format)} in total"


def _span(least: float, most: float, write: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys((write(least), write(most))))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


# --- hours -----------------------------------------------------------------------------------------------------------


def gpu_price(prices: PriceSettings, name: str) -> float | None:
    """Return the price of a GPU for an hour: of the longest type in its name, e.g. `NVIDIA A100-SXM4-80GB`."""
    types = [kind for kind in prices.gpu_hour if re.search(rf"(?i)(?<![a-z0-9]){re.escape(kind)}(?![a-z0-9])", name)]
    return prices.gpu_hour[max(types, key=len)] if types else prices.gpu_hour.get(OTHER)


def hours_of(least: float, most: float, resources: ResourceSettings, prices: PriceSettings) -> Item:
    """Return GPU-hours, or CPU-hours without GPUs, for the hours of one worker.

    Workers that share a GPU, or a trial, are assumed to take as many GPU-hours together as one with a GPU of its
    own.
    """
    if resources.gpus:
        kind = resources.accelerator or ""
        name = f"GPU-hours of {kind}" if kind else "GPU-hours"
        return Item(name, least, most, gpu_price(prices, kind))
    return Item("CPU-hours", least * resources.cpus, most * resources.cpus, prices.cpu_hour)


# --- storage ---------------------------------------------------------------------------------------------------------


def bucket_items(writing: Writing, run: RunSettings, hours: tuple[float, float] | None) -> list[Item]:
    """Return the requests and gigabytes of an object store; without hours heartbeats are left out."""
    w = writing
    events = (
        (w.stages, PUTS_PER_STAGE, GETS_PER_STAGE),
        (w.checkpoints, PUTS_PER_CHECKPOINT, GETS_PER_CHECKPOINT),
        (w.rows, PUTS_PER_ROW, GETS_PER_ROW),
        (w.files + (w.rows if run.keep_answers == "all" else 0), PUTS_PER_FILE, GETS_PER_FILE),
        (w.trials, PUTS_PER_TRIAL, GETS_PER_TRIAL),
        (w.trainings, PUTS_PER_TRAINING, GETS_PER_TRAINING),
    )
    puts, gets = (sum(count * each[kind] for count, *each in events) for kind in (0, 1))
    least, most = hours or (0.0, 0.0)
    stored = stored_bytes(w, run.keep_answers) / GB
    return [
        Item("PUTs", puts + least * PUTS_PER_HOUR, puts + most * PUTS_PER_HOUR),
        Item("GETs", gets + least * GETS_PER_HOUR, gets + most * GETS_PER_HOUR),
        Item("GB", stored, stored),
    ]


def stored_bytes(writing: Writing, keep: KeepAnswers) -> int:
    """Return about how many bytes the work that is left writes."""
    w = writing
    size = w.numbers * BYTES_PER_PARAMETER + w.stages * BYTES_PER_SNAPSHOT + w.predictions * BYTES_PER_PREDICTION
    size += w.answers * BYTES_PER_ANSWER if keep == "all" else 0
    return size + w.rows * BYTES_PER_EVENT + w.files * BYTES_PER_TASK_SEEN


def bytes_text(size: float) -> str:
    power = min(4, int(math.log10(max(1, size)) / 3))
    scaled = size / 1000**power
    return f"{scaled:.0f} {UNITS[power]}" if scaled >= 100 else f"{scaled:.2g} {UNITS[power]}"
