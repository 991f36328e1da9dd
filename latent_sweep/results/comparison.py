"""Paired differences of configurations to a named baseline, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latent_sweep.errors import ConfigError
from latent_sweep.labels import format_value, label
from latent_sweep.results.bootstrap import Interval, Repetition, bootstrap_means, percentile_interval, student_interval
from latent_sweep.store.trial_files import RowScores


@dataclass(frozen=True)
class Outcome:
    """What a finished trial has come to."""

    average_performance: float
    forgetting: float
    rows: Mapping[str, RowScores] | None
    """By task, the scores of its test rows after the last task; None where they are not at hand."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, a fraction, and its interval of 95 %; None where nothing says how it varies."""

    mean: float
    interval: Interval | None

    @property
    def told_apart(self) -> bool:
        """Whether there is an interval, and 0 is not in it."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Comparison:
    """One configuration against its baseline, over the repetitions that both have finished."""

    baseline: str
    """Its label."""
    n: int
    """How many pairs there are."""
    average_performance: Difference | None
    forgetting: Difference | None
    """Both None without a pair."""
    resampled: str
    """What the interval of AP is from: repetitions, rows, both or nothing."""


Pair = tuple[Outcome, Outcome]
"""The same repetition of a configuration and of its baseline."""


def compare(
    configurations: Sequence[Mapping[str, Outcome]], baselines: Sequence[int], labels: Sequence[str]
) -> list[Comparison | None]:
    """Compare each configuration with its baseline; None for one that is its own.

    Args:
        configurations: the outcomes of each, by repetition.
        baselines: the position of each one's baseline.
        labels: what each is called.
    """
    pairs = [
        [] if position == own else _pairs(configurations[own], configurations[position])
        for own, position in enumerate(baselines)
    ]
    rows = [_row_differences(found) for found in pairs]
    by_row = iter(map(percentile_interval, bootstrap_means([found for found in rows if found])))
    intervals = [next(by_row) if found else None for found in rows]
    return [
        None if position == own else _comparison(pairs[own], intervals[own], labels[position])
        for own, position in enumerate(baselines)
    ]


def _pairs(ours: Mapping[str, Outcome], theirs: Mapping[str, Outcome]) -> list[Pair]:
    return [(ours[key], theirs[key]) for key in ours if key in theirs]


def _comparison(pairs: Sequence[Pair], by_row: Interval | None, baseline: str) -> Comparison:
    """Put together what is known: the interval of AP from rows, or else from repetitions alone."""
    if not pairs:
        return Comparison(baseline, 0, None, None, "nothing")
    performance = [mine.average_performance - other.average_performance for mine, other in pairs]
    forgetting = [mine.forgetting - other.forgetting for mine, other in pairs]
    sources = ["repetitions"] * (len(pairs) > 1) + ["rows"] * (by_row is not None)
    return Comparison(
        baseline,
        len(pairs),
        Difference(statistics.fmean(performance), by_row or student_interval(performance)),
        Difference(statistics.fmean(forgetting), student_interval(forgetting)),
        " and ".join(sources) or "nothing",
    )


def _row_differences(pairs: Sequence[Pair]) -> list[Repetition]:
    """Of each pair, by task and the ids of its rows, what a row scores more than with the baseline.

    Empty unless all pairs have the scores of the same rows.
    """
    found: list[Repetition] = []
    for mine, other in pairs:
        if mine.rows is None or other.rows is None or _ids(mine.rows) != _ids(other.rows):
            return []
        found.append({(task, own.ids): own.scores - other.rows[task].scores for task, own in mine.rows.items()})
    return found


def _ids(rows: Mapping[str, RowScores]) -> dict[str, tuple[str, ...]]:
    return {task: found.ids for task, found in rows.items()}


_TESTED_ON = ("benchmark.name", "benchmark.order", "benchmark.tasks")


def find_baselines(
    configurations: Sequence[Mapping[str, Any]], paths: Mapping[str, str], wanted: Sequence[str]
) -> list[int]:
    """The position of each configuration's baseline: tested on the same tasks, and of several, with its backbone.

    Args:
        configurations: short name of each axis -> value.
        paths: short name -> path.
        wanted: settings of the baseline as `name=value`, by short name or path; or its whole label alone.

    Raises:
        ConfigError: not exactly one configuration fits.
    """
    tested_on = [name for name, path in paths.items() if path in _TESTED_ON]
    backbone = [name for name, path in paths.items() if path == "backbone.name"]
    labels = [label(values) for values in configurations]
    found = [i for i, whole in enumerate(labels) if [whole] == list(wanted)]
    found = found or [i for i, values in enumerate(configurations) if set(wanted) <= _terms(values, paths)]
    baselines = []
    for values in configurations:
        fitting = [i for i in found if _agree(configurations[i], values, tested_on)]
        if len(fitting) > 1:
            fitting = [i for i in fitting if _agree(configurations[i], values, backbone)]
        if len(fitting) != 1:
            listed = [labels[i] for i in fitting or range(len(labels))]
            problem = "fits several configurations" if fitting else "fits no configuration"
            raise ConfigError(
                f"report --baseline: {' '.join(wanted)!r} {problem}{_place(values, tested_on)}; expected settings of "
                f"exactly one of:{''.join(f'{chr(10)}  {text}' for text in listed)}\nGive --baseline name=value, again "
                "for each setting that it takes to tell them apart, or a whole line of these."
            )
        baselines.append(fitting[0])
    return baselines


def _agree(values: Mapping[str, Any], others: Mapping[str, Any], names: Sequence[str]) -> bool:
    return all(values[name] == others[name] for name in names)


def _terms(values: Mapping[str, Any], paths: Mapping[str, str]) -> set[str]:
    """A configuration's settings as they may be named."""
    written = {name: format_value(value) for name, value in values.items()}
    return {f"{name}={value}" for short, value in written.items() for name in (short, paths[short])}


def _place(values: Mapping[str, Any], tested_on: Sequence[str]) -> str:
    place = label({name: values[name] for name in tested_on})
    return f" with {place}" if place else ""
