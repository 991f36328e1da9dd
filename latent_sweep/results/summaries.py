"""What a sweep on disk has come to: its configurations, and mean and spread of their trials; scores are fractions."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from latent_sweep.errors import ConfigError
from latent_sweep.labels import label, short_names
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.results.comparison import Comparison, Outcome, compare, find_baselines
from latent_sweep.results.spending import spent
from latent_sweep.store.folders import SweepFolder, TrialFolder
from latent_sweep.store.journal import Event, Status, attempts, restarts, stages, status
from latent_sweep.store.trial_files import row_scores, told_matrix
from latent_sweep.sweep.prices import Item
from latent_sweep.sweep.tuning import read_tuning, tuning_lines


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation (n - 1 in the denominator) of `n` fractions; one value has no spread."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistic | None:
        """The statistic of `values`, or None where there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


class RouterMeasure(NamedTuple):
    """A column of the router's table."""

    metric: str
    """Its name in a journal."""
    heading: str
    factor: float
    """What it is multiplied by: tables show shares in per cent, and a log loss in nats."""


ROUTER_MEASURES = (
    RouterMeasure("router_p_correct", "p(correct) (%)", 100),
    RouterMeasure("router_accuracy", "top-1 (%)", 100),
    RouterMeasure("router_nll", "NLL (nats)", 1),
    RouterMeasure("router_ece", "ECE (%)", 100),
    RouterMeasure("router_one_hot", "one-hot (%)", 100),
    RouterMeasure("router_novelty_auroc", "novelty AUROC (%)", 100),
)


@dataclass(frozen=True)
class Configuration:
    """One point of every axis but those that repeat it, over its finished trials."""

    values: Mapping[str, Any]
    """Short name of each axis but those -> value."""
    trial_ids: tuple[str, ...]
    settings: Mapping[str, Any]
    """What is the same for all its trials, by dotted path."""
    n_tasks: int
    finished_ids: tuple[str, ...]
    """Of those trials that have finished."""
    last_finish: float | None
    """When the last of them finished, in Unix seconds; None where none has."""
    average_performance: Statistic | None
    learning_accuracy: Statistic | None
    """Of each trial the mean score of its tasks when they were new."""
    forgetting: Statistic | None
    trained_numbers: tuple[int, ...]
    """Every number of parameters that a stage trained; none where no stage says."""
    learning_rates: tuple[float, ...]
    steps: tuple[int, ...]
    """Every number of optimizer steps that a stage took."""
    task_scores: Mapping[str, Statistic]
    """Task -> score after the last task, in the order of learning."""
    router: Mapping[str, Statistic]
    """Metric of `ROUTER_MEASURES` -> its value after the last task that has one; a mean over stages of the AUROC."""
    computed_with: Mapping[str, tuple[str, ...]]
    """Library, `device` or `dtype` -> every value that its stages were learned or scored with."""
    matrices: tuple[ScoreMatrix, ...] = ()
    """Of its finished trials."""
    comparison: Comparison | None = None
    """With the baseline; None for a baseline, and where none was asked for."""

    @property
    def n_trials(self) -> int:
        """Return the number of its trials, finished or not."""
        return len(self.trial_ids)

    @property
    def n_finished(self) -> int:
        """Return the number of those that have finished."""
        return len(self.finished_ids)


@dataclass(frozen=True)
class Cost:
    """What the stages of a sweep have taken. Time that workers of a pack share counts once."""

    seconds_learning: float
    seconds_answering: float
    learned: int
    """Stages that were learned."""
    reused: int
    """Stages that were there: learned for another trial, or earlier."""
    generated_share: float | None
    """Of all answers that the stages asked for, what was generated; None where nothing says."""


@dataclass(frozen=True)
class Ended:
    """A trial that ended without finishing, and why."""

    values: Mapping[str, Any]
    status: Status
    reason: str


@dataclass(frozen=True)
class Summary:
    """A sweep in numbers, as its journals stand."""

    name: str
    axes: tuple[str, ...]
    """Short names of all axes but those that repeat a configuration."""
    repeats: tuple[str, ...]
    """Short names of those: the seed first."""
    configurations: tuple[Configuration, ...]
    ended_early: tuple[Ended, ...]
    started_again: tuple[str, ...]
    """A line for every trial that was tried more than once: why, and what was changed."""
    mixed: Mapping[str, Mapping[str, tuple[str, ...]]]
    """What was not the same for all trials: library, `device` or `dtype` -> value -> the trials computed with it."""
    tuned: tuple[str, ...]
    """A line for every choice of settings that was made before the trials ran."""
    counts: Mapping[Status, int]
    cost: Cost
    spent: tuple[Item, ...]
    """What is paid for, see `spending`."""

    @cached_property
    def best_average_performance(self) -> float | None:
        """The highest mean AP of any configuration; None before the first trial finishes."""
        return max(
            (c.average_performance.mean for c in self.configurations if c.average_performance is not None), default=None
        )

    @cached_property
    def is_compared(self) -> bool:
        """Whether a configuration was compared with a baseline."""
        return any(configuration.comparison is not None for configuration in self.configurations)

    def is_best(self, configuration: Configuration) -> bool:
        """Whether no configuration has a higher mean AP."""
        found = configuration.average_performance
        return found is not None and found.mean == self.best_average_performance


@dataclass(frozen=True)
class Curves:
    """AP in per cent against one numeric axis; one series for each point of the remaining axes."""

    x_name: str
    x_values: tuple[float, ...]
    series: Mapping[str, tuple[list[float], list[float]]]
    """Label -> (means, standard deviations), one entry per x value; NaN where nothing finished or n = 1."""


def end_reason(events: Sequence[Event]) -> str:
    """Tell in a sentence why a failed or stopped trial ended; empty for any other."""
    last = events[-1] if events else {}
    if last.get("event") == "stopped":
        return f"after {last['tasks_seen']} tasks: {last['reason']}"
    if last.get("event") != "failed":
        return ""
    places = [f"{place} {last[place]}" for place in ("task", "step") if last.get(place) is not None]
    at = f" at {', '.join(places)}" if places else ""
    return f"{last['kind']}{at}: {last['message']}"


def summarise(sweep: SweepFolder, over: Sequence[str] = (), baseline: Sequence[str] = ()) -> Summary:
    """Group the sweep's trials by every axis but those that repeat; only finished trials enter the statistics.

    Args:
        over: axes that repeat a configuration as the seed does, by path or short name.
        baseline: settings, as `name=value`, of the configuration that the others are compared with.

    Raises:
        ConfigError: the sweep has no such axis, or not exactly one such configuration.
        StoreError: `sweep.json` is missing, or it or a journal is damaged.
    """
    names = short_names(sweep.axes)
    repeats = (sweep.seed_axis, *(_axis(name, names) for name in over))
    shown = {axis: name for axis, name in names.items() if axis not in repeats}
    trials = [(trial, trial.events()) for trial in sweep]
    told = {trial.trial_id: events for trial, events in trials}
    groups = [[(trial, told[trial.trial_id]) for trial in members] for members in _groups(sweep, shown)]
    configurations = tuple(_configuration(members, shown) for members in groups)
    if baseline:
        configurations = _compared(configurations, groups, shown, repeats, baseline)
    return Summary(
        name=sweep.name,
        axes=tuple(shown.values()),
        repeats=tuple(names.get(axis, axis) for axis in repeats),
        configurations=configurations,
        ended_early=tuple(
            Ended({names[axis]: trial.values[axis] for axis in sweep.axes}, status(events), end_reason(events))
            for trial, events in trials
            if status(events) in ("failed", "stopped")
        ),
        started_again=tuple(
            f"{label({names[axis]: trial.values[axis] for axis in sweep.axes}) or trial.trial_id} {line}"
            for trial, events in trials
            if (line := _restart_line(events))
        ),
        mixed=_mixed(
            {
                label({names[axis]: trial.values[axis] for axis in sweep.axes}) or trial.trial_id: computed_with(events)
                for trial, events in trials
            }
        ),
        tuned=tuple(tuning_lines(read_tuning(sweep) or [])),
        counts=Counter(status(events) for _, events in trials),
        cost=_cost(trials),
        spent=spent(sweep, [events for _, events in trials]),
    )


def repetitions(sweep: SweepFolder) -> list[list[TrialFolder]]:
    """The trials of each configuration, which differ in the seed alone; no journal is read."""
    return _groups(sweep, _shown(sweep))


def summarise_one(sweep: SweepFolder, members: Sequence[TrialFolder]) -> Configuration:
    """Summarise one of the `repetitions` as `summarise` does it; no other journal is read.

    Raises:
        StoreError: a journal of them is damaged.
    """
    return _configuration([(trial, trial.events()) for trial in members], _shown(sweep))


def _shown(sweep: SweepFolder) -> dict[str, str]:
    """Short names of all axes but the seed's, by path."""
    return {axis: name for axis, name in short_names(sweep.axes).items() if axis != sweep.seed_axis}


def _groups(sweep: SweepFolder, shown: Mapping[str, str]) -> list[list[TrialFolder]]:
    """The trials that have these axes in common, group by group."""
    groups: dict[str, list[TrialFolder]] = {}
    for trial in sweep:
        groups.setdefault(json.dumps([trial.values[axis] for axis in shown]), []).append(trial)
    return list(groups.values())


def _axis(wanted: str, names: Mapping[str, str]) -> str:
    """The axis with this path or short name."""
    for axis, name in names.items():
        if wanted in (axis, name):
            return axis
    raise ConfigError(
        f"report --over: found {wanted!r}; expected one of the sweep's axes: {', '.join(names) or 'none'}."
    )


def computed_with(*trials: Sequence[Event]) -> dict[str, tuple[str, ...]]:
    """Map library, `device` or `dtype` to every value that the trials' stages were learned or scored with, sorted."""
    newest = [event for events in trials for event in stages(events)]
    sources = [event.get(name) or {} for event in newest for name in ("learned_with", "scored_with")]
    found: dict[str, set[str]] = {}
    for name, value in (item for source in sources for item in source.items()):
        found.setdefault(name, set()).add(value)
    return {name: tuple(sorted(values)) for name, values in found.items()}


def _mixed(trials: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, dict[str, tuple[str, ...]]]:
    users: dict[str, dict[str, list[str]]] = {}
    for trial, computed in trials.items():
        for name, value in ((name, value) for name, values in computed.items() for value in values):
            users.setdefault(name, {}).setdefault(value, []).append(trial)
    return {
        name: {value: tuple(found) for value, found in sorted(values.items())}
        for name, values in users.items()
        if len(values) > 1
    }


def _restart_line(events: Sequence[Event]) -> str:
    """Tell why a trial was started again, with the size of its forward passes and other batches that were halved."""
    why = restarts(events)
    if not why:
        return ""
    last = attempts(events)[-1]
    smaller = {
        "learning": f"{last.get('micro_batch_size')} rows in a forward pass",
        "answering": "answers of half a batch at a time",
        "statistics": "statistics of half a batch at a time",
    }
    now = [smaller[phase] for phase in smaller if phase in last.get("halved", ())]
    return f"started again after {', '.join(why)}" + (f"; now {', '.join(now)}" if now else "")


def _configuration(members: Sequence[tuple[TrialFolder, list[Event]]], shown: Mapping[str, str]) -> Configuration:
    first, _ = members[0]
    finished = [events for _, events in members if status(events) == "finished"]
    matrices = tuple(told_matrix(stages(events)) for events in finished)
    final_metrics = [events[-1]["metrics"] for events in finished]
    final_scores = [stages(events)[-1]["scores"] for events in finished]
    told = [stage for _, events in members for stage in stages(events)]
    tasks = dict.fromkeys(task for scores in final_scores for task in scores)
    per_task = {task: Statistic.of([scores[task] for scores in final_scores if task in scores]) for task in tasks}
    return Configuration(
        values={name: first.values[axis] for axis, name in shown.items()},
        trial_ids=tuple(trial.trial_id for trial, _ in members),
        settings={
            path: value
            for path, value in first.params.items()
            if all(trial.params.get(path) == value for trial, _ in members)
        },
        n_tasks=first.n_tasks,
        finished_ids=tuple(trial.trial_id for trial, events in members if status(events) == "finished"),
        last_finish=max((events[-1]["time"] for events in finished), default=None),
        average_performance=Statistic.of([metrics["AP"] for metrics in final_metrics if "AP" in metrics]),
        learning_accuracy=Statistic.of([matrix.mean_diagonal() for matrix in matrices]),
        forgetting=Statistic.of([metrics["FM"] for metrics in final_metrics if "FM" in metrics]),
        trained_numbers=_distinct(stage.get("trained_numbers") for stage in told),
        learning_rates=_distinct(trial.params.get("training.learning_rate") for trial, _ in members),
        steps=_distinct(stage.get("steps") for stage in told),
        task_scores={task: found for task, found in per_task.items() if found is not None},
        router=_router_statistics(finished),
        computed_with=computed_with(*(events for _, events in members)),
        matrices=matrices,
    )


def _cost(trials: Sequence[tuple[TrialFolder, list[Event]]]) -> Cost:
    """Add up what journals tell; trials that share a training tell each of it, and it counts once."""
    learning: dict[tuple[str, int], float] = {}
    answering = 0.0
    reused, shares = 0, []
    for trial, events in trials:
        for stage in stages(events):
            metrics, place = stage["metrics"], (trial.training_id, stage["tasks_seen"])
            answering += metrics.get("seconds_eval", 0.0)
            if stage.get("reused"):
                reused += 1
            else:
                learning.setdefault(place, metrics.get("seconds_train", 0.0))
            if "generated_share" in metrics:
                shares.append((metrics["generated_share"], len(stage["scores"])))
    asked = sum(weight for _, weight in shares)
    return Cost(
        seconds_learning=sum(learning.values()),
        seconds_answering=answering,
        learned=len(learning),
        reused=reused,
        generated_share=sum(share * weight for share, weight in shares) / asked if asked else None,
    )


def _compared(
    configurations: Sequence[Configuration],
    groups: Sequence[Sequence[tuple[TrialFolder, list[Event]]]],
    shown: Mapping[str, str],
    repeats: Sequence[str],
    baseline: Sequence[str],
) -> tuple[Configuration, ...]:
    """The configurations, compared with their baselines over what repeats them."""
    paths = {name: axis for axis, name in shown.items()}
    positions = find_baselines([configuration.values for configuration in configurations], paths, baseline)
    labels = [label(configuration.values) for configuration in configurations]
    found = compare([_outcomes(members, repeats) for members in groups], positions, labels)
    return tuple(replace(one, comparison=comparison) for one, comparison in zip(configurations, found, strict=True))


def _outcomes(members: Sequence[tuple[TrialFolder, list[Event]]], repeats: Sequence[str]) -> dict[str, Outcome]:
    """What the finished trials have come to, by what tells one repetition from another."""
    return {
        json.dumps([trial.params[axis] for axis in repeats]): Outcome(
            events[-1]["metrics"]["AP"], events[-1]["metrics"]["FM"], row_scores(trial.path, events)
        )
        for trial, events in members
        if status(events) == "finished"
    }


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Every different value, ascending; None does not count."""
    return tuple(sorted({value for value in values if value is not None}))


def _router_statistics(finished: Sequence[Sequence[Event]]) -> dict[str, Statistic]:
    """Summarise what is known of the router; without one, and in journals of earlier versions, there may be nothing.

    Novelty exists while tasks are still to come, so its AUROC is a mean over those stages; the rest is of the last one.
    """
    found = {}
    for measure in ROUTER_MEASURES:
        told = [
            [event["metrics"][measure.metric] for event in stages(events) if measure.metric in event["metrics"]]
            for events in finished
        ]
        of_trials = [statistics.fmean(v) if measure.metric == "router_novelty_auroc" else v[-1] for v in told if v]
        if (statistic := Statistic.of(of_trials)) is not None:
            found[measure.metric] = statistic
    return found


def numeric_axes(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The axes of these points with more than one value and only numbers.

    A point whose method has no such setting, where the value is None, does not count.
    """
    found = []
    for axis in points[0] if points else ():
        values = [point[axis] for point in points if point[axis] is not None]
        if all(type(value) in (int, float) for value in values) and len(set(values)) > 1:
            found.append(axis)
    return found


def numeric_axis(points: Sequence[Mapping[str, Any]]) -> str | None:
    """The first of the numeric axes; None where there is none."""
    return next(iter(numeric_axes(points)), None)


def curves(summary: Summary) -> Curves | None:
    """AP against the first numeric axis, or None where there is no such axis."""
    x_name = numeric_axis([configuration.values for configuration in summary.configurations])
    if x_name is None:
        return None
    drawn = [configuration for configuration in summary.configurations if configuration.values[x_name] is not None]
    x_values = sorted({configuration.values[x_name] for configuration in drawn})
    series: dict[str, tuple[list[float], list[float]]] = {}
    for configuration in drawn:
        rest = {name: value for name, value in configuration.values.items() if name != x_name}
        means, stds = series.setdefault(label(rest), ([float("nan")] * len(x_values), [float("nan")] * len(x_values)))
        found, place = configuration.average_performance, x_values.index(configuration.values[x_name])
        if found is not None:
            means[place] = 100 * found.mean
            stds[place] = float("nan") if found.std is None else 100 * found.std
    return Curves(x_name, tuple(x_values), series)


def protocol(configuration: Configuration) -> dict[str, tuple[Any, ...]]:
    """How its tasks were learned: every number of trained parameters, learning rate and number of steps."""
    return {
        "trained": configuration.trained_numbers,
        "rate": configuration.learning_rates,
        "steps": configuration.steps,
    }
