"""The cost of a sweep: hours at the prices of the sweep file, requests to an object store, and gigabytes written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from latent_sweep.storage.predictions import KeepAnswers
from latent_sweep.sweep.schema import PriceSettings, ResourceSettings, RunSettings

GB = 10**9
UNITS = ("B", "kB", "MB", "GB", "TB")

REQUESTS: Mapping[str, tuple[int, int]] = {
    "stages": (5, 9),  # tensors and facts, the lease and its release, looking for these and a checkpoint, deleting it
    "checkpoints": (1, 1),
    "rows": (3, 2),  # the score matrix, a list for the times of its files, a journal event
    "files": (1, 0),  # predictions of each task seen, and the saved answers
    "trials": (4, 5),  # a list of its folder, two journal events, the result
    "trainings": (2, 4),  # the lease on its trials
}
"""PUTs (with lists) and GETs (with looks at an object), as the storage and pyarrow make them.

An object is looked at before it is read or deleted, and deleting one PUTs a marker of its folder.
"""
REQUESTS_PER_HOUR = 60 * 4
"""PUTs, and GETs: a worker's heartbeat every 15 seconds, which the driver reads every 30."""

BYTES: Mapping[str, int] = {
    "numbers": 4,  # in float32; what else a method saves is left out
    "stages": 2000,
    "rows": 1500,  # of the journal
    "files": 250,  # the score, metric and digest of each task in the journal
    "answers": 80,  # with its score; published targets have about ten tokens
    "predictions": 200,  # with references and weights
}

OTHER = "any"


@dataclass(frozen=True)
class Writing:
    """What the work that is left writes."""

    trainings: int
    trials: int
    stages: int
    numbers: int
    """Trainable parameters of all stages, without those of backbones whose shapes are unknown here."""
    checkpoints: int
    rows: int
    files: int
    """Predictions of these rows, one for each task seen."""
    answers: int
    predictions: int


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
    """Return GPU-hours, or CPU-hours without GPUs; workers that share a GPU count as one."""
    if resources.gpus:
        kind = resources.accelerator or ""
        name = f"GPU-hours of {kind}" if kind else "GPU-hours"
        return Item(name, least, most, gpu_price(prices, kind))
    return Item("CPU-hours", least * resources.cpus, most * resources.cpus, prices.cpu_hour)


# --- storage ---------------------------------------------------------------------------------------------------------


def bucket_items(writing: Writing, run: RunSettings, hours: tuple[float, float] | None) -> list[Item]:
    """Return the requests and gigabytes of an object store; without hours heartbeats are left out."""
    counts = {name: getattr(writing, name) for name in REQUESTS}
    counts["files"] += writing.rows if run.keep_answers == "all" else 0
    least, most = (worked * REQUESTS_PER_HOUR for worked in hours or (0.0, 0.0))
    puts, gets = (sum(count * REQUESTS[name][kind] for name, count in counts.items()) for kind in (0, 1))
    stored = stored_bytes(writing, run.keep_answers) / GB
    return [
        Item("PUTs", puts + least, puts + most),
        Item("GETs", gets + least, gets + most),
        Item("GB", stored, stored),
    ]


def stored_bytes(writing: Writing, keep: KeepAnswers) -> int:
    return sum(getattr(writing, name) * size for name, size in BYTES.items() if name != "answers" or keep == "all")


def bytes_text(size: float) -> str:
    power = min(4, int(math.log10(max(1, size)) / 3))
    scaled = size / 1000**power
    return f"{scaled:.0f} {UNITS[power]}" if scaled >= 100 else f"{scaled:.2g} {UNITS[power]}"
