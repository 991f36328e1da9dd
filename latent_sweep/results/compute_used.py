"""What a sweep has taken of what is paid for: hours that workers were at work, by its journals, on what hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from latent_sweep.results.trial_states import Span, cover
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.journal import Event, Started, is_from_worker
from latent_sweep.sweep.prices import Item, gpu_price
from latent_sweep.sweep.schema import PriceSettings, ResourceSettings


class Held(NamedTuple):
    """What a worker held while it was at work."""

    gpu: str | None
    """The type of its GPUs; None where it had none."""
    amount: int
    """GPUs of this type, or CPU cores."""
    process: tuple[str, int | None]
    """Node and process id of the worker."""


AtWork = tuple[Held, Span]


def held_at_work(events: Sequence[Event]) -> list[AtWork]:
    """Return what each attempt at a trial has held, and from when to when it has told something."""
    found = []
    starts = [(number, event) for number, event in enumerate(events) if isinstance(event, Started)]
    ends = [*(number for number, _ in starts[1:]), len(events)]
    for (start, event), end in zip(starts, ends, strict=False):
        if hardware := event.hardware:
            gpu, workers = hardware.get("gpu"), hardware.get("workers", 1)
            amount = workers if gpu else workers * hardware.get("threads", 1)
            last = max(number for number in range(start, end) if is_from_worker(events[number]))
            span = event.time, events[last].time
            found.append((Held(gpu, amount, (event.node, event.pid)), span))
    return found


def covered(spans: Sequence[Span]) -> float:
    """Count the seconds in any of these spans: what several of them share counts once."""
    apart: list[Span] = []
    for span in sorted(spans):
        cover(apart, span)
    return sum((end - begin for begin, end in apart), 0.0)


def compute_used(sweep: SweepFolder, at_work: Iterable[AtWork]) -> tuple[Item, ...]:
    """Return the hours of GPUs of each type, and of CPU cores without one, that the sweep's workers were at work.

    A worker is at work from the first to the last that it tells of any of its trials; what it did before, as loading a
    backbone, and what it did not come to tell, is left out, and so is the time that a node was held idle. The trials of
    a pack share the time of their worker. Of a GPU that several trials share, each counts its share of now.

    Args:
        at_work: the `held_at_work` of all its trials.
    """
    spans: dict[Held, list[Span]] = {}
    for holding, span in at_work:
        spans.setdefault(holding, []).append(span)
    hours: dict[str | None, float] = {}
    for of, found in spans.items():
        hours[of.gpu] = hours.get(of.gpu, 0.0) + of.amount * covered(found) / 3600
    resources = ResourceSettings.model_validate(sweep.run.get("resources", {}))
    prices = PriceSettings.model_validate(sweep.run.get("prices", {}))
    items = []
    for gpu, total in sorted(hours.items(), key=lambda item: item[0] or ""):
        if gpu is None:
            items.append(Item("CPU-hours", total, total, prices.cpu_hour))
        else:
            held = total * (resources.gpus or 1)
            items.append(Item(f"GPU-hours of {gpu}", held, held, gpu_price(prices, resources.accelerator or gpu)))
    return tuple(items)
