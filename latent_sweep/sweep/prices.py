"""What a sweep costs, as an estimate: amounts of what is paid for, by the prices that the sweep file gives.

No price is looked up and none is assumed: what has none is told as an amount alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from latent_sweep.sweep.schema import PriceSettings, ResourceSettings, RunSettings

GB = 10**9
"""Bytes by which object stores charge."""

# Requests of one kind of event, as the store and pyarrow make them: PUTs, with what is charged as such (a list), and
# GETs, with what is charged as such (a look at an object). Something is looked at before it is got or deleted, and what
# is deleted has its folder marked, by a PUT.
PUTS_PER_STAGE, GETS_PER_STAGE = 5, 9
"""Learning a task: tensors and facts; the lease, given up again; looking for these and a checkpoint; deleting that."""
PUTS_PER_CHECKPOINT, GETS_PER_CHECKPOINT = 1, 1
"""It is put, and asked for its time."""
PUTS_PER_ROW, GETS_PER_ROW = 3, 2
"""Recording a row of scores: the score matrix, a list for the times of its files, and an event of the journal."""
PUTS_PER_FILE, GETS_PER_FILE = 1, 0
"""Of answers and predictions that are written with a row: one file for each task seen, one for what is kept."""
PUTS_PER_TRIAL, GETS_PER_TRIAL = 4, 5
"""Beginning and ending: a list of its folder, two events of the journal, the result."""
PUTS_PER_TRAINING, GETS_PER_TRAINING = 2, 4
"""The lease under which its trials are written."""
PUTS_PER_HOUR, GETS_PER_HOUR = 60 * 4, 60 * 4
"""While a worker works: a sign of life every 15 seconds, and the driver, which reads what it tells every 30."""

BYTES_PER_NUMBER = 4
"""Of a snapshot, in float32. What a method keeps beside what it trains is left out."""
BYTES_PER_SNAPSHOT = 2000
"""Of the facts beside it."""
BYTES_PER_ANSWER = 80
"""Of an answer that is kept, with its score: published targets have some ten tokens."""
BYTES_PER_PREDICTION = 200
"""Of an answer of the newest stage, with its references and mixing weights."""
BYTES_PER_EVENT, BYTES_PER_TASK_SEEN = 1500, 250
"""Of a stage in the journal: what it was computed with, and each task's score, metric and digest."""

OTHER = "any"
"""A GPU whose type is not known, or has no price of its own."""


@dataclass(frozen=True)
class Writing:
    """What the work of a sweep that is left would write."""

    trainings: int
    trials: int
    stages: int
    """Snapshots to learn."""
    numbers: int
    """Trained by all of these stages; those of backbones whose shapes are not known here are left out."""
    checkpoints: int
    """Inside of these stages."""
    rows: int
    """Of score matrices, of all trials."""
    files: int
    """Of predictions written with these rows, one for each task seen."""
    answers: int
    """Answers of these rows: as many as are kept where no stage gives again what the one before gave."""
    predictions: int
    """Answers of the last row of each of these trials."""


class Item(NamedTuple):
    """Something that is paid for: how much of it there is, as far as it is known, and the price of one."""

    name: str
    least: float
    most: float
    price: float | None = None

    def record(self) -> dict[str, Any]:
        """Return it as plain values."""
        costs = (None, None) if self.price is None else (self.least * self.price, self.most * self.price)
        return {**self._asdict(), "cost_least": costs[0], "cost_most": costs[1]}

    def text(self) -> str:
        """Tell the amount, less than an hour in minutes, and what it costs where that is known."""
        least, most, name = self.least, self.most, self.name
        if "-hours" in name and most < 1:
            least, most, name = 60 * least, 60 * most, name.replace("-hours", "-minutes")
        amount = f"{_span(least, most, _number)} {name}"
        if self.price is None:
            return amount
        return f"{amount} ({_span(self.least * self.price, self.most * self.price, '{:,.2f}'.format)})"


def total_text(items: Iterable[Item]) -> str:
    """Tell what the items with a price cost together; empty where there are not several of them."""
    priced = [item for item in items if item.price is not None]
    if len(priced) < 2:
        return ""
    least, most = (math.fsum(getattr(i, end) * (i.price or 0) for i in priced) for end in ("least", "most"))
    return f"; {_span(least, most, '{:,.2f}'.format)} together"


def _span(least: float, most: float, write: Any) -> str:
    return " to ".join(dict.fromkeys((write(least), write(most))))


def _number(value: float) -> str:
    """Write an amount: whole where it is large, with two digits where it is small."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


# --- hours -----------------------------------------------------------------------------------------------------------


def gpu_price(prices: PriceSettings, name: str) -> float | None:
    """Return the price of an hour of a GPU.

    Args:
        name: its type as Ray names it, or its own name, as in `NVIDIA A100-SXM4-80GB`: the longest type in it counts.
    """
    known = [kind for kind in prices.gpu_hour if re.search(rf"(?i)(?<![a-z0-9]){re.escape(kind)}(?![a-z0-9])", name)]
    return prices.gpu_hour[max(known, key=len)] if known else prices.gpu_hour.get(OTHER)


def hours_of(least: float, most: float, resources: ResourceSettings, prices: PriceSettings) -> Item:
    """Return the hours of GPUs, or where there are none of CPU cores, that a worker's work takes.

    Workers that share a GPU, or a trial, are taken to share the work evenly: together they take as many hours of GPUs
    as one that has its GPU to itself.

    Args:
        least, most: hours of work of one worker.
    """
    if resources.gpus:
        kind = resources.accelerator or ""
        name = f"GPU-hours of {kind}" if kind else "GPU-hours"
        return Item(name, least, most, gpu_price(prices, kind))
    return Item("CPU-hours", least * resources.cpus, most * resources.cpus, prices.cpu_hour)


# --- an object store -------------------------------------------------------------------------------------------------


def bucket_items(writing: Writing, run: RunSettings, hours: tuple[float, float] | None) -> list[Item]:
    """Return requests and gigabytes that the work takes in an object store.

    Args:
        hours: of work of one worker, at least and at most; without them what is written by the clock is left out.
    """
    w, prices, keeps = writing, run.prices, run.keep_answers == "all"
    files = w.files + (w.rows if keeps else 0)
    events = (
        (w.stages, PUTS_PER_STAGE, GETS_PER_STAGE),
        (w.checkpoints, PUTS_PER_CHECKPOINT, GETS_PER_CHECKPOINT),
        (w.rows, PUTS_PER_ROW, GETS_PER_ROW),
        (files, PUTS_PER_FILE, GETS_PER_FILE),
        (w.trials, PUTS_PER_TRIAL, GETS_PER_TRIAL),
        (w.trainings, PUTS_PER_TRAINING, GETS_PER_TRAINING),
    )
    puts, gets = (sum(count * each[kind] for count, *each in events) for kind in (0, 1))
    least, most = hours or (0.0, 0.0)
    stored = w.numbers * BYTES_PER_NUMBER + w.stages * BYTES_PER_SNAPSHOT + w.predictions * BYTES_PER_PREDICTION
    stored += w.answers * BYTES_PER_ANSWER if keeps else 0
    stored += w.rows * BYTES_PER_EVENT + w.files * BYTES_PER_TASK_SEEN
    return [
        Item("PUTs", puts + least * PUTS_PER_HOUR, puts + most * PUTS_PER_HOUR, _each(prices.per_1000_puts)),
        Item("GETs", gets + least * GETS_PER_HOUR, gets + most * GETS_PER_HOUR, _each(prices.per_1000_gets)),
        Item("GB for a month", stored / GB, stored / GB, prices.gigabyte_month),
    ]


def _each(per_1000: float | None) -> float | None:
    return None if per_1000 is None else per_1000 / 1000


def items_text(items: Sequence[Item]) -> str:
    """Tell items in a line."""
    return ", ".join(item.text() for item in items) + total_text(items)
