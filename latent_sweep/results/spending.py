"""What a sweep has taken of what is paid for: hours that workers were at work, by its journals, on what hardware."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from latent_sweep.results.trial_states import Span, cover
from latent_sweep.store.folders import SweepFolder
from latent_sweep.store.journal import Event
from latent_sweep.sweep.groups import PriceSettings, ResourceSettings
from latent_sweep.sweep.prices import Item, gpu_price


def attempt_spans(events: Sequence[Event]) -> Iterator[tuple[Event, Span]]:
    """Yield each attempt at a trial by its `started` event, and from when to when it has told something."""
    starts = [number for number, event in enumerate(events) if event["event"] == "started"]
    for start, end in itertools.pairwise([*starts, len(events)]):
        yield events[start], (events[start]["time"], events[end - 1]["time"])


def covered(spans: Sequence[Span]) -> float:
    """Count the seconds in any of these spans: what several of them share counts once."""
    apart: list[Span] = []
    for span in sorted(spans):
        cover(apart, span)
    return sum((end - begin for begin, end in apart), 0.0)


def spent(sweep: SweepFolder, journals: Sequence[Sequence[Event]]) -> tuple[Item, ...]:
    """Return the hours of GPUs of each type, and of CPU cores without one, that the sweep's workers were at work.

    A worker is at work from the first to the last that it tells of any of its trials; what it did before, as loading a
    backbone, and what it did not come to tell, is left out, and so is the time that a node was held idle. The trials of
    a pack share the time of their worker. Of a GPU that several trials share, each counts its share of now.

    Args:
        journals: the events of each of its trials.
    """
    spans: dict[tuple[str | None, float, object], list[Span]] = {}
    for event, span in itertools.chain.from_iterable(map(attempt_spans, journals)):
        hardware = event.get("hardware")
        if isinstance(hardware, Mapping):  # earlier versions said less
            gpu, workers = hardware.get("gpu"), hardware.get("workers", 1)
            each = workers if gpu else workers * hardware.get("threads", 1)
            spans.setdefault((gpu, each, (event["node"], event.get("pid"))), []).append(span)
    hours: dict[str | None, float] = {}
    for (gpu, each, _), found in spans.items():
        hours[gpu] = hours.get(gpu, 0.0) + each * covered(found) / 3600
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
