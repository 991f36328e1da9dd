"""Runs on disk to tables: mean and spread over repetitions for each configuration, as text, Markdown, CSV or LaTeX.

Inside, scores are fractions; in the tables they are per cent with two decimals.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from latent_sweep.errors import ConfigError
from latent_sweep.labels import format_value, label, short_names
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.results.bootstrap import RESAMPLES
from latent_sweep.results.comparison import Comparison, Difference, Outcome, compare, find_baselines
from latent_sweep.security import printable, spelled_out
from latent_sweep.store.folders import SweepFolder, TrialFolder
from latent_sweep.store.journal import Event, Status, attempts, restarts, stages, status
from latent_sweep.store.trial_files import row_scores
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
    n_finished: int
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
    comparison: Comparison | None = None
    """With the baseline; None for a baseline, and where none was asked for."""

    @property
    def n_trials(self) -> int:
        """Return the number of its trials, finished or not."""
        return len(self.trial_ids)


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

    @property
    def best_average_performance(self) -> float | None:
        """The highest mean AP of any configuration; None before the first trial finishes."""
        return max(
            (c.average_performance.mean for c in self.configurations if c.average_performance is not None), default=None
        )

    @property
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
    groups: dict[str, list[tuple[TrialFolder, list[Event]]]] = {}
    for trial, events in trials:
        key = json.dumps([trial.values[axis] for axis in shown])
        groups.setdefault(key, []).append((trial, events))
    configurations = tuple(_configuration(members, shown) for members in groups.values())
    if baseline:
        configurations = _compared(configurations, list(groups.values()), shown, repeats, baseline)
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
    )


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
    final_metrics = [events[-1]["metrics"] for events in finished]
    final_scores = [stages(events)[-1]["scores"] for events in finished]
    told = [stage for _, events in members for stage in stages(events)]
    tasks = dict.fromkeys(task for scores in final_scores for task in scores)
    per_task = {task: Statistic.of([scores[task] for scores in final_scores if task in scores]) for task in tasks}
    return Configuration(
        values={name: first.values[axis] for axis, name in shown.items()},
        trial_ids=tuple(trial.trial_id for trial, _ in members),
        n_finished=len(finished),
        average_performance=Statistic.of([metrics["AP"] for metrics in final_metrics if "AP" in metrics]),
        learning_accuracy=Statistic.of([_matrix(events).mean_diagonal() for events in finished]),
        forgetting=Statistic.of([metrics["FM"] for metrics in final_metrics if "FM" in metrics]),
        trained_numbers=_distinct(stage.get("trained_numbers") for stage in told),
        learning_rates=_distinct(trial.params.get("training.learning_rate") for trial, _ in members),
        steps=_distinct(stage.get("steps") for stage in told),
        task_scores={task: found for task, found in per_task.items() if found is not None},
        router=_router_statistics(finished),
        computed_with=computed_with(*(events for _, events in members)),
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


def _matrix(events: Sequence[Event]) -> ScoreMatrix:
    """The score matrix that a journal tells."""
    told = stages(events)
    return ScoreMatrix(tuple(told[-1]["scores"]), tuple(tuple(stage["scores"].values()) for stage in told))


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


def numeric_axis(summary: Summary) -> str | None:
    """The first axis, those that repeat apart, with more than one value and only numbers; None where there is none."""
    return next((axis for axis in summary.axes if _is_numeric(summary, axis)), None)


def _is_numeric(summary: Summary, axis: str) -> bool:
    values = [configuration.values[axis] for configuration in summary.configurations]
    return len(set(map(str, values))) > 1 and all(type(value) in (int, float) for value in values)


def curves(summary: Summary) -> Curves | None:
    """AP against the first numeric axis, or None where there is no such axis."""
    x_name = numeric_axis(summary)
    if x_name is None:
        return None
    x_values = sorted({configuration.values[x_name] for configuration in summary.configurations})
    series: dict[str, tuple[list[float], list[float]]] = {}
    for configuration in summary.configurations:
        rest = {name: value for name, value in configuration.values.items() if name != x_name}
        means, stds = series.setdefault(label(rest), ([float("nan")] * len(x_values), [float("nan")] * len(x_values)))
        found, place = configuration.average_performance, x_values.index(configuration.values[x_name])
        if found is not None:
            means[place] = 100 * found.mean
            stds[place] = float("nan") if found.std is None else 100 * found.std
    return Curves(x_name, tuple(x_values), series)


def records(summary: Summary) -> list[dict[str, Any]]:
    """One flat row per configuration, scores in per cent rounded to two decimals, None where there is none."""
    tasks = _tasks(summary)
    return [
        {
            **configuration.values,
            "n_finished": configuration.n_finished,
            "n_trials": configuration.n_trials,
            "AP_mean": _percent(configuration.average_performance, "mean"),
            "AP_std": _percent(configuration.average_performance, "std"),
            "LA_mean": _percent(configuration.learning_accuracy, "mean"),
            "LA_std": _percent(configuration.learning_accuracy, "std"),
            "FM_mean": _percent(configuration.forgetting, "mean"),
            "FM_std": _percent(configuration.forgetting, "std"),
            "best_AP": summary.is_best(configuration),
            **{name: _range(values, json.dumps) or None for name, values in protocol(configuration).items()},
            **_comparison_record(configuration.comparison, summary.is_compared),
            **{f"score/{task}": _percent(configuration.task_scores.get(task), "mean") for task in tasks},
            **{
                measure.metric: _router_value(configuration, measure)
                for measure in ROUTER_MEASURES
                if any(other.router for other in summary.configurations)
            },
            **{
                f"computed_with/{name}": " and ".join(configuration.computed_with.get(name, ()))
                for name in summary.mixed
            },
        }
        for configuration in summary.configurations
    ]


def protocol(configuration: Configuration) -> dict[str, tuple[Any, ...]]:
    """How its tasks were learned: every number of trained parameters, learning rate and number of steps."""
    return {
        "trained": configuration.trained_numbers,
        "rate": configuration.learning_rates,
        "steps": configuration.steps,
    }


def _comparison_record(comparison: Comparison | None, is_compared: bool) -> dict[str, Any]:
    """What a flat row says of a comparison: nothing where no configuration has one."""
    if not is_compared:
        return {}
    found = comparison or Comparison("", 0, None, None, "nothing")
    return {
        "baseline": found.baseline or None,
        "n_pairs": found.n,
        **_difference_record("AP", found.average_performance),
        **_difference_record("FM", found.forgetting),
        "AP_resampled": found.resampled,
    }


def _difference_record(name: str, difference: Difference | None) -> dict[str, float | None]:
    low, high = difference.interval if difference and difference.interval else (None, None)
    mean = difference.mean if difference else None
    values = {"difference": mean, "difference_low": low, "difference_high": high}
    return {f"{name}_{part}": None if value is None else round(100 * value, 2) + 0.0 for part, value in values.items()}


def _range(values: Sequence[Any], write: Callable[[Any], str]) -> str:
    """The value that all have, or the smallest and the largest; empty where none is known."""
    return " to ".join(write(value) for value in dict.fromkeys((*values[:1], *values[-1:])))


def _router_value(configuration: Configuration, measure: RouterMeasure) -> float | None:
    statistic = configuration.router.get(measure.metric)
    return None if statistic is None else round(measure.factor * statistic.mean, 2)


def _percent(statistic: Statistic | None, part: str) -> float | None:
    value = getattr(statistic, part, None)
    return None if value is None else round(100 * value, 2)


def _tasks(summary: Summary) -> list[str]:
    return list(dict.fromkeys(task for configuration in summary.configurations for task in configuration.task_scores))


def score_matrix_csv(tasks: Sequence[str], scores: Sequence[Sequence[float | None]]) -> str:
    """The score matrix as CSV: one row per task learned, one column per task scored, fractions, empty where unseen."""
    return _csv(
        ["after", *tasks],
        ([task, *("" if score is None else score for score in row)] for task, row in zip(tasks, scores, strict=False)),
    )


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_inert, header))
    writer.writerows([*map(_inert, row), *[""] * (len(header) - len(row))] for row in rows)
    return text.getvalue()


def _inert(cell: Any) -> Any:
    """Make a cell of CSV that a spreadsheet does not take for a formula; numbers stay numbers."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def render(summary: Summary, format: str = "text") -> str:
    """The summary as a table in one of `FORMATS`, the highest AP marked, trials that ended early beneath.

    Names, values and reasons come from elsewhere: they hold no secrets here, steer no terminal, and are neither
    Markdown, HTML, LaTeX nor a spreadsheet's formula.

    Raises:
        ConfigError: the format is unknown.
    """
    if format not in FORMATS:
        raise ConfigError(f"report format: found {format!r}; expected one of {', '.join(FORMATS)}.")
    return printable(FORMATS[format](summary))


def _render_csv(summary: Summary) -> str:
    rows = records(summary)
    return _csv(
        list(rows[0]) if rows else [], ([_csv_cell(name, value) for name, value in row.items()] for row in rows)
    )


def _csv_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.2f}"
        if isinstance(value, float) and name.startswith(("AP_", "LA_", "FM_", "score/", "router_"))
        else format_value(value)
    )


def _render_text(summary: Summary) -> str:
    parts = [
        f"sweep {_one_line(summary.name)}: {_counts(summary)}",
        _aligned(_main_header(summary), _main_rows(summary, best="{} *", spread="{:.2f} ± {:.2f}")),
        "\n".join(["* highest AP", *map(_one_line, _notes(summary))]),
    ]
    if summary.is_compared:
        parts += [
            _COMPARED,
            _aligned(_comparison_header(summary), _comparison_rows(summary)),
            "\n".join(map(_one_line, _comparison_notes(summary))),
        ]
    if tasks := _tasks(summary):
        parts += [
            "Final scores by task (%)",
            _aligned(_task_header(summary), _task_rows(summary)),
            "\n".join(f"T{number} = {_one_line(task)}" for number, task in enumerate(tasks, start=1)),
        ]
    if rows := _router_rows(summary):
        parts += [_ROUTER, _aligned(_router_header(summary), rows), _ROUTER_NOTE]
    if summary.tuned:
        parts += [_TUNED, "\n".join(map(_one_line, summary.tuned))]
    if summary.ended_early:
        parts += ["Ended early", "\n".join(_ended_lines(summary))]
    if summary.started_again:
        parts += ["Started again", "\n".join(map(_one_line, summary.started_again))]
    if summary.mixed:
        parts += [_NOT_ALIKE, "\n".join(map(_one_line, mixed_lines(summary)))]
    return "\n\n".join(parts) + "\n"


def _render_markdown(summary: Summary) -> str:
    parts = [
        f"# Sweep {_escape_markdown(summary.name)}",
        f"{_counts(summary)}. Highest AP in bold.",
        _piped(
            _main_header(summary, _escape_markdown),
            _main_rows(summary, best="**{}**", spread="{:.2f} ± {:.2f}", escape=_escape_markdown),
        ),
        "\n".join(f"- {_escape_markdown(note)}" for note in _notes(summary)),
    ]
    if summary.is_compared:
        parts += [
            f"## {_COMPARED}",
            _piped(_comparison_header(summary, _escape_markdown), _comparison_rows(summary, _escape_markdown)),
            "\n".join(f"- {_escape_markdown(note)}" for note in _comparison_notes(summary)),
        ]
    if tasks := _tasks(summary):
        parts += [
            "## Final scores by task (%)",
            _piped(_task_header(summary, _escape_markdown), _task_rows(summary, _escape_markdown)),
            ", ".join(f"T{number} = {_escape_markdown(task)}" for number, task in enumerate(tasks, start=1)),
        ]
    if rows := _router_rows(summary, _escape_markdown):
        parts += [f"## {_ROUTER}", _piped(_router_header(summary, _escape_markdown), rows), f"{_ROUTER_NOTE}."]
    if summary.tuned:
        parts += [f"## {_TUNED}", "\n".join(f"- {_escape_markdown(line)}" for line in summary.tuned)]
    if summary.ended_early:
        parts += ["## Ended early", "\n".join(f"- {_escape_markdown(line)}" for line in _ended_lines(summary))]
    if summary.started_again:
        parts += ["## Started again", "\n".join(f"- {_escape_markdown(line)}" for line in summary.started_again)]
    if summary.mixed:
        parts += [f"## {_NOT_ALIKE}", "\n".join(f"- {_escape_markdown(line)}" for line in mixed_lines(summary))]
    return "\n\n".join(parts) + "\n"


_COMPARED = "Differences from the baseline (percentage points)"
_FEW = 5
"""So many repetitions tell a bootstrap well how they vary."""
_TUNED = "Chosen by tuning, by average performance on rows held out of the training rows"

_ROUTER = "Router"
_ROUTER_NOTE = (
    "means over the finished trials, after the last task; novelty AUROC: over the stages before it, rows of tasks not "
    "yet seen against rows of seen ones by their Mahalanobis distance"
)
_NOT_ALIKE = "Not all trials were computed alike"


def mixed_lines(summary: Summary) -> Iterator[str]:
    """A line for each library, device or type that was not the same for all trials: which ones had which."""
    for name, values in summary.mixed.items():
        users = (f"{value} ({_counted(trials)})" for value, trials in values.items())
        yield f"{name}: {'; '.join(users)}"


def _counted(trials: Sequence[str], shown: int = 4) -> str:
    listed = ", ".join([*trials[:shown], *(["..."] if len(trials) > shown else [])])
    return f"{len(trials)} trial{'s' if len(trials) > 1 else ''}: {listed}"


def _render_latex(summary: Summary) -> str:
    notes = [f"sweep {summary.name}: {_counts(summary)}", *_notes(summary), *_comparison_notes(summary)]
    notes += [*(f"ended early: {line}" for line in _ended_lines(summary))]
    notes += [f"{_NOT_ALIKE}: {line}" for line in mixed_lines(summary)]
    notes += [f"T{number} = {task}" for number, task in enumerate(_tasks(summary), start=1)]
    main = _main_rows(summary, best=r"\textbf{{{}}}", spread=r"{:.2f} $\pm$ {:.2f}", escape=_escape_latex)
    parts = ["\n".join(f"% {_one_line(note)}" for note in notes), _booktabs(_main_header(summary), main)]
    if summary.is_compared:
        parts.append(_booktabs(_comparison_header(summary), _comparison_rows(summary, _escape_latex)))
    if _tasks(summary):
        parts.append(_booktabs(_task_header(summary), _task_rows(summary, escape=_escape_latex)))
    if rows := _router_rows(summary, escape=_escape_latex):
        parts += [f"% {_ROUTER}: {_ROUTER_NOTE}", _booktabs(_router_header(summary), rows)]
    return "\n\n".join(parts) + "\n"


FORMATS: Mapping[str, Callable[[Summary], str]] = {
    "text": _render_text,
    "markdown": _render_markdown,
    "csv": _render_csv,
    "latex": _render_latex,
}
"""Every format that `render` knows."""


def _counts(summary: Summary) -> str:
    found = [f"{summary.counts[state]} {state}" for state in _COUNT_ORDER if summary.counts.get(state)]
    return f"{sum(summary.counts.values())} trials" + (f" ({', '.join(found)})" if found else "")


_COUNT_ORDER: tuple[Status, ...] = ("finished", "running", "pending", "failed", "stopped")


def _ended_lines(summary: Summary) -> list[str]:
    return [_one_line(f"{label(end.values)} {end.status}: {end.reason}") for end in summary.ended_early]


def _one_line(text: str) -> str:
    return " ".join(spelled_out(text).split())


def _main_header(summary: Summary, escape: Callable[[str], str] = _one_line) -> list[str]:
    return [*map(escape, summary.axes), "n", "AP (%)", "LA (%)", "FM (%)", *_differing(summary)]


def _differing(summary: Summary) -> list[str]:
    """What of the protocol is not the same for all configurations that it is known of, and so has a column."""
    return [name for name, cells in _protocol_cells(summary).items() if len({cell for cell in cells if cell}) > 1]


def _protocol_cells(summary: Summary) -> dict[str, list[str]]:
    """The cells of each column of the protocol; those of which nothing is known are empty."""
    cells: dict[str, list[str]] = {}
    for configuration in summary.configurations:
        for name, values in protocol(configuration).items():
            cells.setdefault(name, []).append(_range(values, format_value if name == "rate" else "{:,}".format))
    return cells


def _notes(summary: Summary) -> list[str]:
    """What the columns of the main table are, and what is the same in all its rows."""
    notes = [
        f"n: finished trials, one for each {' and '.join(summary.repeats)}; mean ± sample standard deviation over them",
        "AP, average performance: mean score over all tasks after the last one",
        "LA, learning accuracy: mean score of each task when it was new, right after it was learned",
        "FM, forgetting measure: mean over the earlier tasks of the best score ever minus the last one",
        "trained: numbers (parameters) a task trains; rate: learning rate as run; steps: optimizer steps of a task",
    ]
    differing = _differing(summary)
    alike = {name: max(cells) for name, cells in _protocol_cells(summary).items() if name not in differing}
    found = ", ".join(f"{name} {cell or 'unknown'}" for name, cell in alike.items())
    return notes + ([f"the same in all rows: {found}"] if alike else [])


def _main_rows(
    summary: Summary, *, best: str, spread: str, escape: Callable[[str], str] = _one_line
) -> Iterable[Sequence[str]]:
    cells = _protocol_cells(summary)
    differing = [cells[name] for name in _differing(summary)]
    for row, configuration in enumerate(summary.configurations):
        performance = _spread(configuration.average_performance, spread)
        complete = configuration.n_finished == configuration.n_trials
        yield [
            *_axis_cells(configuration, escape),
            str(configuration.n_trials) if complete else f"{configuration.n_finished}/{configuration.n_trials}",
            best.format(performance) if summary.is_best(configuration) else performance,
            _spread(configuration.learning_accuracy, spread),
            _spread(configuration.forgetting, spread),
            *(column[row] or "-" for column in differing),
        ]


def _comparison_header(summary: Summary, escape: Callable[[str], str] = _one_line) -> list[str]:
    return [*map(escape, summary.axes), "n", "AP", "FM", "AP resampled"]


def _comparison_rows(summary: Summary, escape: Callable[[str], str] = _one_line) -> Iterable[Sequence[str]]:
    for configuration in summary.configurations:
        if (found := configuration.comparison) is not None:
            differences = map(_difference_cell, (found.average_performance, found.forgetting))
            yield [*_axis_cells(configuration, escape), str(found.n), *differences, found.resampled]


def _difference_cell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    if difference.interval is None:
        return _points(difference.mean)
    verdict = "" if difference.told_apart else ", cannot be told apart"
    return f"{_points(difference.mean)} [{', '.join(map(_points, difference.interval))}]{verdict}"


def _points(fraction: float) -> str:
    return f"{round(100 * fraction, 2) + 0.0:+.2f}"  # no -0.00


def _comparison_notes(summary: Summary) -> list[str]:
    """What the columns of the comparisons are, and how far they can be trusted."""
    found = [configuration.comparison for configuration in summary.configurations if configuration.comparison]
    if not found:
        return []
    notes = [
        f"baseline: {'; '.join(dict.fromkeys(comparison.baseline for comparison in found))}",
        f"n: pairs of finished trials with the same {' and '.join(summary.repeats)}; in brackets 95 % intervals",
        f"AP: hierarchical bootstrap, {RESAMPLES:,} resamples of repetitions and test rows, alike for both",
        "FM: Student's t over the repetitions, for rows of earlier stages are not kept",
        "cannot be told apart: 0 lies in the interval",
    ]
    if any(comparison.resampled == "repetitions" for comparison in found):
        notes.append("AP from repetitions alone: Student's t over them, for no scores of the same rows are at hand")
    if any(1 < comparison.n < _FEW and "rows" in comparison.resampled for comparison in found):
        notes.append("AP of two to four pairs: too narrow an interval where seeds matter far more than test rows")
    if any(comparison.n == 1 for comparison in found):
        notes.append("with one pair, an interval tells of other test rows, and nothing of another seed")
    if len(found) > 1:
        notes.append(
            f"{len(found)} comparisons, not corrected for their number: of those without a difference, one in twenty "
            "seems to have one"
        )
    return notes


def _task_header(summary: Summary, escape: Callable[[str], str] = _one_line) -> list[str]:
    return [*map(escape, summary.axes), *(f"T{number}" for number in range(1, len(_tasks(summary)) + 1))]


def _task_rows(summary: Summary, escape: Callable[[str], str] = _one_line) -> Iterable[Sequence[str]]:
    tasks = _tasks(summary)
    for configuration in summary.configurations:
        means = (_spread(configuration.task_scores.get(task), "{:.2f}") for task in tasks)
        yield [*_axis_cells(configuration, escape), *means]


def _router_header(summary: Summary, escape: Callable[[str], str] = _one_line) -> list[str]:
    return [*map(escape, summary.axes), *(measure.heading for measure in ROUTER_MEASURES)]


def _router_rows(summary: Summary, escape: Callable[[str], str] = _one_line) -> list[list[str]]:
    """A row for each configuration of which something is known of its router."""
    rows = []
    for configuration in summary.configurations:
        if configuration.router:
            values = [_router_value(configuration, measure) for measure in ROUTER_MEASURES]
            cells = ["-" if value is None else f"{value:.2f}" for value in values]
            rows.append([*_axis_cells(configuration, escape), *cells])
    return rows


def _axis_cells(configuration: Configuration, escape: Callable[[str], str]) -> list[str]:
    return [escape(format_value(value)) for value in configuration.values.values()]


def _spread(statistic: Statistic | None, spread: str) -> str:
    if statistic is None:
        return "-"
    if statistic.std is None:
        return f"{100 * statistic.mean:.2f}"
    return spread.format(100 * statistic.mean, 100 * statistic.std)


def _aligned(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _piped(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


_MARKDOWN = re.compile(r"[\\`*\[\]|]|~(?=~)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def _escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it as it is, in one line; HTML and a table's bars too."""
    return _MARKDOWN.sub(r"\\\g<0>", html.escape(_one_line(text), quote=False))


_LATEX_HEADINGS = {"lambda": r"$\lambda$", "K": "$K$", "epsilon": r"$\varepsilon$", "n": "$n$"}
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # behind the line break of a table it would begin an argument
    "]": "{]}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def _escape_latex(text: str) -> str:
    return "".join(_LATEX_ESCAPES.get(character, character) for character in _one_line(text))


def _booktabs(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heading = [_LATEX_HEADINGS.get(name, _escape_latex(name)) for name in header]
    body = [" & ".join(row) + r" \\" for row in rows]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{'l' * len(header)}}}",
            r"\toprule",
            " & ".join(heading) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )
