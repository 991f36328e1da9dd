"""What a sweep on disk has come to: its configurations, and mean and spread of their trials; scores are fractions."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from latent_sweep.errors import ConfigError
from latent_sweep.labels import label, short_names
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.results.bootstrap import ROUNDING
from latent_sweep.results.columns import differing, value_read
from latent_sweep.results.comparison import Comparison, Outcomes, Repeat, compare, find_baselines, tested_on
from latent_sweep.results.compute_used import AtWork, compute_used, held_at_work
from latent_sweep.results.definition import Measure, defined_measures, learns_in_turn
from latent_sweep.results.outcomes import outcomes
from latent_sweep.storage.folders import SweepFolder, TrialFolder, driven_since
from latent_sweep.storage.journal import (
    Event,
    Failed,
    Lost,
    Stage,
    Status,
    Stopped,
    attempts,
    final_metrics,
    restarts,
    stages,
    status,
)
from latent_sweep.storage.trial_files import recorded_matrix
from latent_sweep.sweep.plan import is_read, values_read
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
    """Short name of each axis but those -> value; it is called by these."""
    read: Mapping[str, Any]
    """The same, also with what its entry of a list leaves out: see `values_read`."""
    trial_ids: tuple[str, ...]
    settings: Mapping[str, Any]
    """What is the same for all its trials, by dotted path."""
    n_tasks: int
    finished_ids: tuple[str, ...]
    """Of those trials that have finished."""
    n_trainings: int
    """How many trainings those answer from: fewer, where what repeats the configuration changes answers alone."""
    last_finish: float | None
    """When the last of them finished, in Unix seconds; None where none has."""
    average_performance: Statistic | None
    learning_accuracy: Statistic | None
    """Of each trial the mean score of its tasks when they were new."""
    forgetting: Statistic | None
    trainable_parameters: tuple[int, ...]
    """Every number of parameters that a stage trained; none where no stage says."""
    learning_rates: tuple[float, ...]
    steps: tuple[int, ...]
    """Every number of optimizer steps that a stage took."""
    task_scores: Mapping[str, Statistic]
    """Task -> score after the last task, in the order of learning."""
    constants: Mapping[str, float]
    """Task -> score of its most frequent training answer; without tasks whose journal has none."""
    router: Mapping[str, Statistic]
    """Metric of `ROUTER_MEASURES` -> its value after the last task that has one; a mean over stages of the AUROC."""
    computed_with: Mapping[str, tuple[str, ...]]
    """Library, `device` or `dtype` -> every value that its stages were learned or scored with."""
    n_stopped: int = 0
    """How many of its trials a scheduler has stopped."""
    n_failed: int = 0
    learns_in_turn: bool = True
    """Whether its trials learn something at every stage, as far as they tell: a reference run need not."""
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
    """Stages that were there, learned for another trial or earlier, or that trials of one training have together."""
    generated_share: float | None
    """Of all answers that the stages asked for, what was generated; None where nothing says."""


@dataclass(frozen=True)
class Ended:
    """A trial that ended without finishing, and why."""

    values: Mapping[str, Any]
    status: Literal[Status, "interrupted"]
    reason: str


@dataclass(frozen=True)
class Summary:
    """A sweep in numbers, as its journals stand."""

    name: str
    axes: tuple[str, ...]
    """Columns of its configurations: short names of all axes but those that repeat a configuration, and of `beside`."""
    paths: Mapping[str, str]
    """Of each of these, the dotted path."""
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
    chosen: frozenset[str]
    """Short names of the axes whose values were chosen so."""
    counts: Mapping[Status, int]
    driven: bool
    """Whether somebody runs it: else the trials that are running were interrupted."""
    latest: float
    """When the last event of any trial was written, in Unix seconds; 0 where there is none."""
    cost: Cost
    compute_used: tuple[Item, ...]
    """What is paid for, see `results/compute_used.py`."""
    apart: tuple[str, ...] = ()
    """Those of `axes` in which it differs from the sweeps that it is compared with."""
    beside: frozenset[str] = frozenset()
    """Those of `apart` that are no axis of this sweep: all of its configurations have the same."""

    @cached_property
    def best_average_performances(self) -> Mapping[tuple[str, ...], float]:
        """The highest mean AP of any configuration none of whose trials was stopped, by what it is tested on.

        What a scheduler has stopped was the worse part, so the mean of the rest compares with no other's.
        """
        best: dict[tuple[str, ...], float] = {}
        for one in self.configurations:
            if one.average_performance is not None and not one.n_stopped:
                place = tested_on(one.settings)
                best[place] = max(best.get(place, 0.0), one.average_performance.mean)
        return best

    @cached_property
    def nothing_learned(self) -> bool:
        """Whether trials have finished, and every AP is 0."""
        found = [one.average_performance for one in self.configurations if one.average_performance is not None]
        return bool(found) and all(statistic.mean < ROUNDING for statistic in found)

    @property
    def best_average_performance(self) -> float | None:
        """The highest of them; None where none has finished."""
        return max(self.best_average_performances.values(), default=None)

    @cached_property
    def is_compared(self) -> bool:
        """Whether a configuration was compared with a baseline."""
        return any(configuration.comparison is not None for configuration in self.configurations)

    def is_best(self, configuration: Configuration) -> bool:
        """Whether no configuration tested on the same has a higher mean AP, but for the rounding of sums."""
        found = configuration.average_performance
        best = self.best_average_performances.get(tested_on(configuration.settings))
        if found is None or best is None or configuration.n_stopped or best < ROUNDING:
            return False
        return best - found.mean < ROUNDING

    def is_marked(self, configuration: Configuration) -> bool:
        """Whether tables mark it as the best one: not where all that is tested on the same has an equal AP."""
        place = tested_on(configuration.settings)
        rivals = [one for one in self.configurations if tested_on(one.settings) == place and one.average_performance]
        return self.is_best(configuration) and not all(map(self.is_best, rivals))


@dataclass(frozen=True)
class Curves:
    """AP in per cent against one numeric axis; one series for each point of the remaining axes."""

    x_name: str
    x_values: tuple[float, ...]
    series: Mapping[str, tuple[list[float], list[float]]]
    """Label -> (means, standard deviations), one entry per x value; NaN where nothing finished or n = 1."""


def end_reason(events: Sequence[Event]) -> str:
    """Tell in a sentence why a failed or stopped trial ended; empty for any other."""
    last = events[-1] if events else None
    if isinstance(last, Stopped):
        return f"after {last.tasks_seen} tasks: {last.reason}"
    if not isinstance(last, Failed):
        return ""
    places = [f"{name} {place}" for name, place in (("task", last.task), ("step", last.step)) if place is not None]
    at = f" at {', '.join(places)}" if places else ""
    return f"{last.kind}{at}: {last.message}"


def _loss_reason(events: Sequence[Event]) -> str:
    """Say why the worker of a trial was lost, which no other has taken up; empty where it was not."""
    last = events[-1] if events else None
    return f"{last.kind}: {last.message}" if isinstance(last, Lost) else ""


def summarize(sweep: SweepFolder, over: Sequence[str] = (), baseline: Sequence[str] = ()) -> Summary:
    """Group the sweep's trials by every axis but those that repeat; only finished trials enter the statistics.

    Args:
        over: axes that repeat a configuration as the seed does, by path or short name.
        baseline: settings, as `name=value`, of the configuration that the others are compared with.

    Raises:
        ConfigError: the sweep has no such axis, or not exactly one such configuration.
        StorageError: `sweep.json` is missing, or it or a journal is damaged.
    """
    return summarize_all([sweep], over, baseline)[0]


def _summarise(sweep: SweepFolder, over: Sequence[str]) -> tuple[Summary, list[list[_Told]], tuple[str, ...]]:
    """Summarise a sweep without a baseline; return also the trials of its configurations, and what repeats these."""
    names = short_names(sweep.axes)
    repeats = (sweep.seed_axis, *(_axis(name, names) for name in over))
    shown = {axis: name for axis, name in names.items() if axis not in repeats}
    driven = driven_since(sweep) is not None  # first: a journal tells its end before
    costs, at_work = _Costs(), list[AtWork]()
    trials = []
    for trial in sweep:  # of thousands no two journals are held at the same time
        events = trial.events()
        trials.append(_told(trial, events))
        costs.add(events)
        at_work += held_at_work(events)
    told = {each.trial.trial_id: each for each in trials}
    tuning = read_tuning(sweep) or []
    groups = [[told[trial.trial_id] for trial in members] for members in _groups(sweep, shown)]
    summary = Summary(
        name=sweep.name,
        axes=tuple(shown.values()),
        paths={name: axis for axis, name in shown.items()},
        repeats=tuple(names.get(axis, axis) for axis in repeats),
        configurations=tuple(_configuration(members, shown) for members in groups),
        ended_early=tuple(
            Ended(
                {names[axis]: each.trial.values[axis] for axis in sweep.axes},
                "interrupted" if each.status == "running" else each.status,
                each.reason,
            )
            for each in trials
            if each.status in ("failed", "stopped") or (each.status == "running" and each.reason and not driven)
        ),
        started_again=tuple(f"{_label(each.trial, names)} {each.restarted}" for each in trials if each.restarted),
        mixed=_mixed({_label(each.trial, names): each.computed_with for each in trials}),
        tuned=tuple(tuning_lines(tuning)),
        chosen=frozenset(names[axis] for choice in tuning for axis in choice.values if axis in names),
        counts=Counter(each.status for each in trials),
        driven=driven,
        latest=max((each.latest for each in trials), default=0.0),
        cost=costs.total(),
        compute_used=compute_used(sweep, at_work),
    )
    return summary, groups, repeats


def summarize_all(
    sweeps: Sequence[SweepFolder], over: Sequence[str] = (), baseline: Sequence[str] = ()
) -> list[Summary]:
    """Summarise several sweeps, with a column for every setting in which they differ.

    Those of one name are called by their folders. Each configuration is compared with the baseline of its own sweep,
    or else with that of another one.

    Raises:
        ConfigError: a sweep is there twice, lacks such an axis, or has not exactly one such configuration.
        StorageError: a sweep or a journal is missing or damaged.
    """
    times = Counter(sweep.path.resolve() for sweep in sweeps)
    if twice := [str(path) for path, count in times.items() if count > 1]:
        raise ConfigError(f"report: {', '.join(twice)} is named more than once; name each sweep once.")
    names = Counter(sweep.name for sweep in sweeps)
    read = [_summarise(sweep, over) for sweep in sweeps]
    axes = [path for sweep in sweeps for path in sweep.axes]
    summaries = _told_apart([summary for summary, *_ in read], axes, [path for *_, paths in read for path in paths])
    if baseline:
        outcomes = [[_outcomes(members, repeats) for members in groups] for _, groups, repeats in read]
        summaries = _compared(summaries, outcomes, baseline)
    return [
        replace(found, name=str(sweep.path)) if names[sweep.name] > 1 else found
        for sweep, found in zip(sweeps, summaries, strict=True)
    ]


def _told_apart(summaries: Sequence[Summary], axes: Sequence[str], repeats: Sequence[str]) -> list[Summary]:
    """Give all configurations a column for each setting in which the sweeps differ, but for what repeats them.

    Args:
        axes: paths of all axes of all sweeps.
        repeats: paths of those that repeat a configuration.
    """
    settings = [[one.settings for one in summary.configurations] for summary in summaries]
    found = differing(settings, [summary.paths.values() for summary in summaries])
    apart = [path for path in found if path not in repeats]
    names = short_names(dict.fromkeys([*axes, *apart]))
    return [_with_columns(summary, names, apart) for summary in summaries]


def _with_columns(summary: Summary, names: Mapping[str, str], apart: Sequence[str]) -> Summary:
    """Add columns for these paths to those of a sweep's own axes, and call all of them by these names."""
    own = {path: name for name, path in summary.paths.items()}
    beside = [path for path in apart if path not in own]

    def columns(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        found = {names[path]: values[name] for path, name in own.items()}
        return found | {names[path]: value_read(settings, path) for path in beside}

    return replace(
        summary,
        axes=tuple(names[path] for path in (*own, *beside)),
        paths={names[path]: path for path in (*own, *beside)},
        chosen=frozenset(names[summary.paths[name]] for name in summary.chosen),
        apart=tuple(names[path] for path in apart),
        beside=frozenset(names[path] for path in beside),
        configurations=tuple(
            replace(one, values=columns(one.values, one.settings), read=columns(one.read, one.settings))
            for one in summary.configurations
        ),
    )


def repetitions(sweep: SweepFolder) -> list[list[TrialFolder]]:
    """The trials of each configuration, which differ in the seed alone; no journal is read."""
    return _groups(sweep, _shown(sweep))


def summarize_one(sweep: SweepFolder, members: Sequence[TrialFolder]) -> Configuration:
    """Summarise one of the `repetitions` as `summarize` does it; no other journal is read.

    Raises:
        StorageError: a journal of them is damaged.
    """
    return _configuration([_told(trial, trial.events()) for trial in members], _shown(sweep))


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


@dataclass(frozen=True, slots=True)
class _Told:
    """What a summary needs of a trial's journal, a small part of it."""

    trial: TrialFolder
    status: Status
    reason: str
    """Why it ended without finishing."""
    restarted: str
    """Why it was started again, and what was changed."""
    trainable_parameters: tuple[int, ...]
    steps: tuple[int, ...]
    computed_with: Mapping[str, tuple[str, ...]]
    latest: float
    """When its last event was written, in Unix seconds; 0 where there is none."""
    learns_in_turn: bool
    measures: tuple[Measure, ...]
    """Those that are defined for it."""
    finish: float | None = None
    """When it finished, in Unix seconds; None, as all below, where it has not."""
    metrics: Mapping[str, float] | None = None
    matrix: ScoreMatrix | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    """By task, see `Configuration`."""
    router: Mapping[str, float] | None = None
    """By `ROUTER_MEASURES`."""

    def values(self, measure: Measure) -> list[float]:
        """Return its value of a measure in a list, which is empty if it has not finished or has no such measure."""
        if self.metrics is None or self.matrix is None or measure not in self.measures:
            return []
        if measure == "LA":
            return [self.matrix.mean_diagonal()]
        return [self.metrics[measure]] if measure in self.metrics else []


def _told(trial: TrialFolder, events: Sequence[Event]) -> _Told:
    """Take what a summary needs of a journal."""
    told = stages(events)
    known = _Told(
        trial,
        status(events),
        end_reason(events) or _loss_reason(events),
        _restart_line(events),
        _distinct(stage.trainable_parameters for stage in told),
        _distinct(stage.steps for stage in told),
        computed_with(events),
        events[-1].time if events else 0.0,
        learns_in_turn(trial, told),
        defined_measures(trial, told),
    )
    if known.status != "finished":
        return known
    return replace(
        known,
        finish=events[-1].time,
        metrics=final_metrics(events),
        matrix=recorded_matrix(told),
        constants={stage.task: stage.constant for stage in told if stage.constant is not None},
        router=_router_measures(told),
    )


def _label(trial: TrialFolder, names: Mapping[str, str]) -> str:
    """The settings of a trial that vary, by their short names; its id where none does."""
    return label({name: trial.values[axis] for axis, name in names.items()}) or trial.trial_id


def computed_with(events: Sequence[Event]) -> dict[str, tuple[str, ...]]:
    """Map library, `device` or `dtype` to every value that a trial's stages were learned or scored with, sorted."""
    sources = [source for stage in stages(events) for source in (stage.learned_with, stage.scored_with)]
    return _values_by_name(source.items() for source in sources)


def _values_by_name(sources: Iterable[Iterable[tuple[str, str]]]) -> dict[str, tuple[str, ...]]:
    """Map each name to every value that it has, sorted."""
    found: dict[str, set[str]] = {}
    for name, value in itertools.chain.from_iterable(sources):
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
        "learning": f"{last.micro_batch_size} rows in a forward pass",
        "answering": "answers of half a batch at a time",
        "statistics": "statistics of half a batch at a time",
    }
    now = [smaller[phase] for phase in smaller if phase in last.halved]
    return f"started again after {', '.join(why)}" + (f"; now {', '.join(now)}" if now else "")


def _configuration(members: Sequence[_Told], shown: Mapping[str, str]) -> Configuration:
    first, read = members[0].trial, values_read(members[0].trial)
    finished = [each for each in members if each.status == "finished"]
    matrices = tuple(each.matrix for each in finished if each.matrix is not None)
    final_scores = [dict(zip(matrix.tasks, matrix.rows[-1], strict=True)) for matrix in matrices]
    tasks = dict.fromkeys(task for scores in final_scores for task in scores)
    per_task = {task: Statistic.of([scores[task] for scores in final_scores if task in scores]) for task in tasks}
    return Configuration(
        values={name: first.values[axis] for axis, name in shown.items()},
        read={name: read[axis] for axis, name in shown.items()},
        trial_ids=tuple(each.trial.trial_id for each in members),
        settings={
            path: value
            for path, value in first.params.items()
            if all(each.trial.params.get(path) == value for each in members)
        },
        n_tasks=first.n_tasks,
        finished_ids=tuple(each.trial.trial_id for each in finished),
        n_trainings=len({each.trial.training_id for each in finished}),
        last_finish=max((each.finish for each in finished if each.finish is not None), default=None),
        average_performance=Statistic.of([value for each in finished for value in each.values("AP")]),
        learning_accuracy=Statistic.of([value for each in finished for value in each.values("LA")]),
        forgetting=Statistic.of([value for each in finished for value in each.values("FM")]),
        trainable_parameters=_distinct(number for each in members for number in each.trainable_parameters),
        learning_rates=_distinct(each.trial.params.get("training.learning_rate") for each in members),
        steps=_distinct(number for each in members for number in each.steps),
        task_scores={task: found for task, found in per_task.items() if found is not None},
        constants={task: score for each in finished for task, score in each.constants.items()},
        router=_router_statistics([each.router for each in finished if each.router is not None]),
        computed_with=_values_by_name(
            ((name, value) for name, values in each.computed_with.items() for value in values) for each in members
        ),
        n_stopped=sum(each.status == "stopped" for each in members),
        n_failed=sum(each.status == "failed" for each in members),
        learns_in_turn=all(each.learns_in_turn for each in members),
        matrices=matrices,
    )


class _Costs:
    """Adds up what journals tell; trials that have learned a stage together tell each of it, and it counts once."""

    def __init__(self) -> None:
        self._learning: dict[str, float] = {}
        """Seconds, by lineage."""
        self._answering, self._reused, self._generated, self._asked = 0.0, 0, 0.0, 0.0

    def add(self, events: Sequence[Event]) -> None:
        """Add what a trial's journal tells."""
        for stage in stages(events):
            metrics, lineage = stage.metrics, stage.lineage
            self._answering += metrics.get("seconds_eval", 0.0)
            if stage.reused or lineage in self._learning:
                self._reused += 1
            else:
                self._learning[lineage] = metrics.get("seconds_train", 0.0)
            if "generated_share" in metrics:
                asked = metrics.get("answers_asked", len(stage.scores))  # earlier versions tell of tasks alone
                self._generated += metrics["generated_share"] * asked
                self._asked += asked

    def total(self) -> Cost:
        """Return what they have taken together."""
        return Cost(
            seconds_learning=sum(self._learning.values()),
            seconds_answering=self._answering,
            learned=len(self._learning),
            reused=self._reused,
            generated_share=self._generated / self._asked if self._asked else None,
        )


def _compared(
    summaries: Sequence[Summary], outcomes: Sequence[Sequence[Mapping[Repeat, Outcomes]]], baseline: Sequence[str]
) -> list[Summary]:
    """Compare the configurations of all sweeps with their baselines.

    Args:
        outcomes: of each sweep, what the trials of each of its configurations have come to.
    """
    paths = {name: path for summary in summaries for name, path in summary.paths.items()}
    all_of = [(summary, one) for summary in summaries for one in summary.configurations]
    values = [{name: one.read.get(name) for name in paths} for _, one in all_of]
    sweeps = [summary.name for summary, _ in all_of]
    labels = [label(one.values) for _, one in all_of]
    if len(summaries) > 1:
        values = [{"sweep": sweep} | each for sweep, each in zip(sweeps, values, strict=True)]
    positions = find_baselines(values, labels, paths, baseline, sweeps)
    if len(summaries) > 1:
        labels = [f"{sweep}: {text}".removesuffix(": ") for sweep, text in zip(sweeps, labels, strict=True)]
    found = iter(compare([each for sweep in outcomes for each in sweep], positions, labels))
    return [
        replace(summary, configurations=tuple(replace(one, comparison=next(found)) for one in summary.configurations))
        for summary in summaries
    ]


def _outcomes(members: Sequence[_Told], repeats: Sequence[str]) -> dict[Repeat, Outcomes]:
    """What the trials have come to, by what tells one repetition from another: settings that they read."""
    return {
        tuple(_repeat(one.trial, axis) for axis in repeats): outcomes(one.trial) if one.status == "finished" else None
        for one in members
    }


def _repeat(trial: TrialFolder, axis: str) -> str | None:
    """A trial's value on an axis that repeats it; the seed need not be one. None where it is not read, or not set.

    A setting that is null, as `training.max_steps` may be, has a value like any other.
    """
    if axis not in trial.params or not is_read(axis, trial.params.get("router.combine")):
        return None
    resolved = trial.params[axis]
    value = trial.values.get(axis, resolved)
    return None if value is None and resolved is not None else json.dumps(value)


def _distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Every different value, ascending; None does not count."""
    return tuple(sorted({value for value in values if value is not None}))


def _router_measures(told: Sequence[Stage]) -> dict[str, float]:
    """What the stages of a trial tell of the router; without one, and in journals of earlier versions, maybe nothing.

    Novelty exists while tasks are still to come, so its AUROC is a mean over those stages; the rest is of the last one.
    """
    found = {}
    for measure in ROUTER_MEASURES:
        values = [stage.metrics[measure.metric] for stage in told if measure.metric in stage.metrics]
        if values:
            mean = measure.metric == "router_novelty_auroc"
            found[measure.metric] = statistics.fmean(values) if mean else values[-1]
    return found


def _router_statistics(finished: Sequence[Mapping[str, float]]) -> dict[str, Statistic]:
    """Summarise what is known of the routers of trials, in the order of `ROUTER_MEASURES`."""
    found = {}
    for measure in ROUTER_MEASURES:
        values = [measures[measure.metric] for measures in finished if measure.metric in measures]
        if (statistic := Statistic.of(values)) is not None:
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
    """AP against the first numeric axis, or None where there is no such axis.

    Without the configurations some of whose trials a scheduler has stopped: their means are those of the better ones.
    """
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
        if found is not None and not configuration.n_stopped:
            means[place] = 100 * found.mean
            stds[place] = float("nan") if found.std is None else 100 * found.std
    return Curves(x_name, tuple(x_values), series)


def protocol(configuration: Configuration) -> dict[str, tuple[Any, ...]]:
    """How its tasks were learned: every number of trained parameters, learning rate and number of steps."""
    return {
        "trained": configuration.trainable_parameters,
        "rate": () if configuration.trainable_parameters == (0,) else configuration.learning_rates,
        "steps": configuration.steps,
    }
