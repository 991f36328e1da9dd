"""Which measures of continual learning are defined for a trial."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from latent_sweep.labels import label, short_names
from latent_sweep.metrics.more import CATEGORY_FM, Flips
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.journal import Event, Finished, Stage, stages

Measure = Literal["AP", "LA", "BWT", "FM"]
MEASURES: tuple[Measure, ...] = ("AP", "LA", "BWT", "FM")

_METRICS: Mapping[str, Measure] = {
    **{"FM": "FM", "FM_scorer": "FM", "BWT": "BWT", "Avg": "LA", "FWT": "BWT"},
    **dict.fromkeys(Flips._fields, "BWT"),
}
"""The journal's metrics that may be undefined, each with a measure that is undefined for the same trials."""


def learns_in_turn(trial: TrialFolder, learned: Sequence[Stage]) -> bool:
    """Return whether every stage of a trial learns a task: not in joint training and zero-shot."""
    lineages = trial.lineages or [stage.lineage for stage in learned]
    trained = [stage.trainable_parameters for stage in learned if stage.trainable_parameters is not None]
    return all(a != b for a, b in itertools.pairwise(lineages)) and (not trained or any(trained))


def defined_measures(trial: TrialFolder, learned: Sequence[Stage]) -> tuple[Measure, ...]:
    if not learns_in_turn(trial, learned):
        return ("AP",)
    return MEASURES if trial.n_tasks > 1 else ("AP", "LA")


def defined_metrics(trial: TrialFolder, learned: Sequence[Stage], metrics: Mapping[str, float]) -> dict[str, float]:
    defined = defined_measures(trial, learned)
    return {name: value for name, value in metrics.items() if _needed(name) in defined}


def _needed(metric: str) -> Measure:
    return "FM" if metric.startswith(CATEGORY_FM) else _METRICS.get(metric, "AP")


def defined_events(trial: TrialFolder, events: Sequence[Event]) -> list[Event]:
    """Return a journal's events without undefined metrics, as known at each event: later events change no earlier."""
    defined: list[Event] = []
    for number, event in enumerate(events, start=1):
        if isinstance(event, (Stage, Finished)):
            metrics = defined_metrics(trial, stages(events[:number]), event.metrics)
            defined.append(replace(event, metrics=metrics))
        else:
            defined.append(event)
    return defined


def trial_name(sweep: SweepFolder, trial: TrialFolder) -> str:
    names = short_names(sweep.axes)
    return label({names[axis]: trial.values[axis] for axis in sweep.axes}) or trial.trial_id
