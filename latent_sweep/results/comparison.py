"""Paired differences of configurations to a named baseline, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latent_sweep.errors import ConfigError
from latent_sweep.labels import format_value, label
from latent_sweep.results.bootstrap import (
    ROUNDING,
    Interval,
    Repetition,
    bootstrap_means,
    percentile_interval,
    student_interval,
)
from latent_sweep.results.definition import MEASURES, Measure
from latent_sweep.results.outcomes import Outcome, mean_outcome, row_ids


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, a fraction, and its interval of 95 %; None where nothing says how it varies."""

    mean: float
    interval: Interval | None
    resampled: str
    """What the interval is from: repetitions, rows, both or nothing."""

    @property
    def significant(self) -> bool:
        """Whether there is an interval, and 0 is not in it, nor at its bound but for the rounding of sums."""
        return self.interval is not None and not self.interval[0] - ROUNDING <= 0 <= self.interval[1] + ROUNDING


@dataclass(frozen=True)
class Comparison:
    """One configuration against its baseline, over the repetitions that both have finished."""

    baseline: str
    """Its label."""
    n: int
    """How many pairs there are."""
    differences: Mapping[Measure, Difference]
    """Empty without a pair."""
    averaged: tuple[int, ...] = ()
    """Places in `Repeat` of settings that one of the two does not read: the other's trials are averaged over them."""


Outcomes = Mapping[Measure, Outcome] | None
"""Of one trial, without the measures that are not defined for it; None for one that has not finished."""
Repeat = tuple[str | None, ...]
"""What tells a repetition from others: the settings that repeat a configuration; None for one that is not read."""
Pair = tuple[Outcome, Outcome]
"""A measure of the same repetition of a configuration and of its baseline."""


def compare(
    configurations: Sequence[Mapping[Repeat, Outcomes]], baselines: Sequence[int], labels: Sequence[str]
) -> list[Comparison | None]:
    """Compare each configuration with its baseline; None for one that is its own.

    Args:
        configurations: the outcomes of each, by repetition, also of those to come.
        baselines: the position of each one's baseline.
        labels: what each is called.
    """
    pairs = {
        (own, measure): _pairs(configurations[own], configurations[position], measure)
        for own, position in enumerate(baselines)
        for measure in MEASURES
        if position != own
    }
    intervals: dict[tuple[int, Measure], Interval] = {}
    for each in MEASURES:  # one at a time, for what is resampled takes memory
        rows = {place: found for place in pairs if place[1] == each and (found := _row_differences(pairs[place]))}
        intervals |= zip(rows, map(percentile_interval, bootstrap_means(list(rows.values()))), strict=True)
    return [
        None
        if position == own
        else Comparison(
            labels[position],
            len(pairs[own, MEASURES[0]]),
            {
                measure: _difference(pairs[own, measure], intervals.get((own, measure)))
                for measure in MEASURES
                if pairs[own, measure]
            },
            _read_by_one(configurations[own], configurations[position]),
        )
        for own, position in enumerate(baselines)
    ]


def _pairs(ours: Mapping[Repeat, Outcomes], theirs: Mapping[Repeat, Outcomes], measure: Measure) -> list[Pair]:
    """Pair what is equal in all that both read, averaged over what only one of them reads, where all of it is there."""
    places = [place for place, values in _by_place(ours, theirs) if None not in values]
    mine, others = ({key: mean_outcome(found) for key, found in _at(each, places, measure)} for each in (ours, theirs))
    return [(mine[key], others[key]) for key in mine if key in others]


def _by_place(ours: Iterable[Repeat], theirs: Iterable[Repeat]) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """Each place of a repetition's settings with all values there."""
    return enumerate(zip(*ours, *theirs, strict=True))


def _at(
    found: Mapping[Repeat, Outcomes], places: Sequence[int], measure: Measure
) -> Iterator[tuple[Repeat, list[Outcome]]]:
    """A measure of those trials together that have the settings at these places in common, if all have finished.

    A mean over a part of them would be another.
    """
    together: dict[Repeat, list[Outcomes]] = {}
    for key, measured in found.items():
        together.setdefault(tuple(key[place] for place in places), []).append(measured)
    for key, each in together.items():
        finished = [measured[measure] for measured in each if measured is not None and measure in measured]
        if len(finished) == len(each):
            yield key, finished


def _read_by_one(ours: Iterable[Repeat], theirs: Iterable[Repeat]) -> tuple[int, ...]:
    return tuple(place for place, values in _by_place(ours, theirs) if None in values and set(values) != {None})


def _difference(pairs: Sequence[Pair], by_row: Interval | None) -> Difference:
    """Put together what is known: the interval from rows, or else from repetitions alone."""
    values = [mine.value - other.value for mine, other in pairs]
    interval = by_row or student_interval(values)
    sources = ["repetitions"] * (interval is not None and len(pairs) > 1) + ["rows"] * (by_row is not None)
    return Difference(statistics.fmean(values), interval, " and ".join(sources) or "nothing")


def _row_differences(pairs: Sequence[Pair]) -> list[Repetition]:
    """Of each pair, by task and the ids of its rows, what a row adds more than with the baseline.

    Empty unless all pairs have the same rows.
    """
    found: list[Repetition] = []
    for mine, other in pairs:
        if mine.rows is None or other.rows is None or row_ids(mine.rows) != row_ids(other.rows):
            return []
        found.append({(task, own.ids): own.scores - other.rows[task].scores for task, own in mine.rows.items()})
    return found


TESTED_ON = ("benchmark.name", "benchmark.order", "benchmark.tasks", "benchmark.score_on")
"""What configurations must have in common for their scores to be compared."""


def tested_on(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What a configuration is tested on, by the settings that all of its trials have in common."""
    return tuple(format_value(settings.get(path)) for path in TESTED_ON)


def find_baselines(
    configurations: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    paths: Mapping[str, str],
    wanted: Sequence[str],
    sweeps: Sequence[str],
) -> list[int]:
    """The position of each configuration's baseline: tested on the same tasks; of several, of its backbone and sweep.

    Args:
        configurations: short name of each axis -> value.
        labels: what each is called.
        paths: short name -> path.
        wanted: settings of the baseline as `name=value`, by short name or path; or its whole label.
        sweeps: the sweep of each configuration.

    Raises:
        ConfigError: not exactly one configuration fits.
    """
    tested_on = [name for name, path in paths.items() if path in TESTED_ON]
    backbone = [name for name, path in paths.items() if path == "backbone.name"]
    by_label = [i for i, values in enumerate(configurations) if list(wanted) in ([labels[i]], [_whole(values)])]
    by_terms = [i for i, values in enumerate(configurations) if all(_fits(term, values, paths) for term in wanted)]
    baselines = []
    for values, sweep in zip(configurations, sweeps, strict=True):
        fitting = [i for i in by_terms or by_label if _agree(configurations[i], values, tested_on)]
        if len(fitting) > 1:
            fitting = [i for i in fitting if _agree(configurations[i], values, backbone)]
        if len(fitting) > 1:
            fitting = [i for i in fitting if sweeps[i] == sweep] or fitting
        if len(fitting) != 1:
            listed = [_whole(configurations[i]) for i in fitting] or list(dict.fromkeys(filter(None, labels)))
            problem = "fits several configurations" if fitting else "fits no configuration"
            place = _place(values, tested_on) if by_terms or by_label else ""
            choices = "".join(f"\n  {text}" for text in listed) or " none, for no setting varies"
            raise ConfigError(
                f"report --baseline: {' '.join(wanted)!r} {problem}{place}; expected settings of "
                f"exactly one of:{choices}\nGive --baseline name=value, again "
                "for each setting that it takes to tell them apart, or a whole line of these."
            )
        baselines.append(fitting[0])
    return baselines


def _agree(values: Mapping[str, Any], others: Mapping[str, Any], names: Sequence[str]) -> bool:
    return all(values[name] == others[name] for name in names)


def _whole(values: Mapping[str, Any]) -> str:
    """A configuration with all of its settings, as the table shows them: `-` where one is null or not read."""
    return " ".join(f"{name}={format_value(value)}" for name, value in values.items())


def _fits(term: str, values: Mapping[str, Any], paths: Mapping[str, str]) -> bool:
    """Whether a configuration has a setting, named as `name=value`, as it is written or as the same number."""
    name, _, text = term.partition("=")
    short = name if name in values else next((each for each, path in paths.items() if path == name), None)
    if short is None:
        return False
    value = values[short]
    if value is None and text == "null":
        return True
    return text == format_value(value) or (type(value) in (int, float) and value == _number(text))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _place(values: Mapping[str, Any], tested_on: Sequence[str]) -> str:
    place = label({name: values[name] for name in tested_on})
    return f" with {place}" if place else ""
