"""Which measures of continual learning are defined for a trial."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from latent_sweep.labels import label, short_names
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.journal import Event, Finished, Stage, stages

Measure = Literal["AP", "LA", "BWT", "FM"]
"""Average performance, learning accuracy, backward transfer and forgetting."""
MEASURES: tuple[Measure, ...] = ("AP", "LA", "BWT", "FM")

_METRICS: Mapping[str, Measure] = {"FM": "FM", "FM_scorer": "FM", "BWT": "BWT"}
"""Metrics of a journal that are such a measure, but AP, which is defined for every trial."""


def learns_in_turn(trial: TrialFolder, told: Sequence[Stage]) -> bool:
    """Return whether a trial learns something at every stage, by the snapshots that it plans or has left behind.

    A reference need not: joint training learns all tasks at the first stage, and zero-shot learns nothing.

    Args:
        told: the stages of its journal.
    """
    lineages = trial.lineages or [stage.lineage for stage in told]
    trained = [number for stage in told if (number := stage.trainable_parameters) is not None]
    return all(a != b for a, b in itertools.pairwise(lineages)) and (not trained or any(trained))


def defined_measures(trial: TrialFolder, told: Sequence[Stage]) -> tuple[Measure, ...]:
    """Return the measures that are defined for a trial.

    LA, BWT and FM need tasks that are learned one after another; BWT and FM are means over the earlier tasks, of which
    a trial of one task has none.

    Args:
        told: the stages of its journal.
    """
    if not learns_in_turn(trial, told):
        return ("AP",)
    return MEASURES if trial.n_tasks > 1 else ("AP", "LA")


def defined_events(trial: TrialFolder, events: Sequence[Event]) -> list[Event]:
    """Return a journal's events, whose metrics are those that are defined by what was known at that event.

    More events never change those before them.
    """
    found: list[Event] = []
    for number, event in enumerate(events, start=1):
        if isinstance(event, (Stage, Finished)):
            metrics = defined_metrics(trial, stages(events[:number]), event.metrics)
            found.append(replace(event, metrics=metrics))
        else:
            found.append(event)
    return found


def defined_metrics(trial: TrialFolder, told: Sequence[Stage], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a journal's event without those that are no defined measure of the trial.

    Args:
        told: the stages of its journal.
        metrics: of the event, by name.
    """
    defined = defined_measures(trial, told)
    return {name: value for name, value in metrics.items() if _METRICS.get(name, "AP") in defined}


def trial_name(sweep: SweepFolder, trial: TrialFolder) -> str:
    """The settings that vary, as `lambda=0.1 seed=0`; of a sweep that varies none, the trial's id."""
    names = short_names(sweep.axes)
    return label({names[axis]: trial.values[axis] for axis in sweep.axes}) or trial.trial_id
