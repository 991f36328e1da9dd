"""Runs on disk to tables: mean and spread over seeds for each configuration, as text, Markdown, CSV or LaTeX.

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
from dataclasses import dataclass
from typing import Any, NamedTuple

from latent_sweep.errors import ConfigError
from latent_sweep.labels import format_value, label, short_names
from latent_sweep.security import printable, spelled_out
from latent_sweep.store.folders import SweepFolder, TrialFolder
from latent_sweep.store.journal import Event, Status, attempts, restarts, stages, status


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
    """One point of every axis but the seed, over its finished trials."""

    values: Mapping[str, Any]
    """Short name of each axis but the seed -> value."""
    trial_ids: tuple[str, ...]
    n_finished: int
    average_performance: Statistic | None
    forgetting: Statistic | None
    task_scores: Mapping[str, Statistic]
    """Task -> score after the last task, in the order of learning."""
    router: Mapping[str, Statistic]
    """Metric of `ROUTER_MEASURES` -> its value after the last task that has one; a mean over stages of the AUROC."""
    computed_with: Mapping[str, tuple[str, ...]]
    """Library, `device` or `dtype` -> every value that its stages were learned or scored with."""

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
    """Short names of all axes but the seed."""
    configurations: tuple[Configuration, ...]
    ended_early: tuple[Ended, ...]
    started_again: tuple[str, ...]
    """A line for every trial that was tried more than once: why, and what was changed."""
    mixed: Mapping[str, Mapping[str, tuple[str, ...]]]
    """What was not the same for all trials: library, `device` or `dtype` -> value -> the trials computed with it."""
    counts: Mapping[Status, int]

    @property
    def best_average_performance(self) -> float | None:
        """The highest mean AP of any configuration; None before the first trial finishes."""
        return max(
            (c.average_performance.mean for c in self.configurations if c.average_performance is not None), default=None
        )

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


def summarise(sweep: SweepFolder) -> Summary:
    """Group the sweep's trials by every axis but the seed; only finished trials enter the statistics.

    Raises:
        StoreError: `sweep.json` is missing, or it or a journal is damaged.
    """
    names = short_names(sweep.axes)
    trials = [(trial, trial.events()) for trial in sweep]
    groups: dict[str, list[tuple[TrialFolder, list[Event]]]] = {}
    for trial, events in trials:
        key = json.dumps([trial.values[axis] for axis in sweep.axes if axis != sweep.seed_axis])
        groups.setdefault(key, []).append((trial, events))
    return Summary(
        name=sweep.name,
        axes=tuple(names[axis] for axis in sweep.axes if axis != sweep.seed_axis),
        configurations=tuple(_configuration(members, names, sweep.seed_axis) for members in groups.values()),
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
        counts=Counter(status(events) for _, events in trials),
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


def _configuration(
    members: Sequence[tuple[TrialFolder, list[Event]]], names: Mapping[str, str], seed_axis: str
) -> Configuration:
    first, _ = members[0]
    finished = [events for _, events in members if status(events) == "finished"]
    final_metrics = [events[-1]["metrics"] for events in finished]
    final_scores = [stages(events)[-1]["scores"] for events in finished]
    tasks = dict.fromkeys(task for scores in final_scores for task in scores)
    per_task = {task: Statistic.of([scores[task] for scores in final_scores if task in scores]) for task in tasks}
    return Configuration(
        values={name: first.values[axis] for axis, name in names.items() if axis != seed_axis},
        trial_ids=tuple(trial.trial_id for trial, _ in members),
        n_finished=len(finished),
        average_performance=Statistic.of([metrics["AP"] for metrics in final_metrics if "AP" in metrics]),
        forgetting=Statistic.of([metrics["FM"] for metrics in final_metrics if "FM" in metrics]),
        task_scores={task: found for task, found in per_task.items() if found is not None},
        router=_router_statistics(finished),
        computed_with=computed_with(*(events for _, events in members)),
    )


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
    """The first axis, seed apart, with more than one value and only numbers; None where there is none."""
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
            "FM_mean": _percent(configuration.forgetting, "mean"),
            "FM_std": _percent(configuration.forgetting, "std"),
            "best_AP": summary.is_best(configuration),
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
    return f"{value:.2f}" if name.startswith(("AP_", "FM_", "score/", "router_")) else format_value(value)


def _render_text(summary: Summary) -> str:
    parts = [
        f"sweep {_one_line(summary.name)}: {_counts(summary)}",
        _aligned(_main_header(summary), _main_rows(summary, best="{} *", spread="{:.2f} ± {:.2f}")),
        "* highest AP; mean ± sample standard deviation over the finished trials of a configuration",
    ]
    if tasks := _tasks(summary):
        parts += [
            "Final scores by task (%)",
            _aligned(_task_header(summary), _task_rows(summary)),
            "\n".join(f"T{number} = {_one_line(task)}" for number, task in enumerate(tasks, start=1)),
        ]
    if rows := _router_rows(summary):
        parts += [_ROUTER, _aligned(_router_header(summary), rows), _ROUTER_NOTE]
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
        f"{_counts(summary)}. Mean ± sample standard deviation over the finished trials; highest AP in bold.",
        _piped(
            _main_header(summary, _escape_markdown),
            _main_rows(summary, best="**{}**", spread="{:.2f} ± {:.2f}", escape=_escape_markdown),
        ),
    ]
    if tasks := _tasks(summary):
        parts += [
            "## Final scores by task (%)",
            _piped(_task_header(summary, _escape_markdown), _task_rows(summary, _escape_markdown)),
            ", ".join(f"T{number} = {_escape_markdown(task)}" for number, task in enumerate(tasks, start=1)),
        ]
    if rows := _router_rows(summary, _escape_markdown):
        parts += [f"## {_ROUTER}", _piped(_router_header(summary, _escape_markdown), rows), f"{_ROUTER_NOTE}."]
    if summary.ended_early:
        parts += ["## Ended early", "\n".join(f"- {_escape_markdown(line)}" for line in _ended_lines(summary))]
    if summary.started_again:
        parts += ["## Started again", "\n".join(f"- {_escape_markdown(line)}" for line in summary.started_again)]
    if summary.mixed:
        parts += [f"## {_NOT_ALIKE}", "\n".join(f"- {_escape_markdown(line)}" for line in mixed_lines(summary))]
    return "\n\n".join(parts) + "\n"


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
    notes = [f"sweep {summary.name}: {_counts(summary)}", *(f"ended early: {line}" for line in _ended_lines(summary))]
    notes += [f"{_NOT_ALIKE}: {line}" for line in mixed_lines(summary)]
    notes += [f"T{number} = {task}" for number, task in enumerate(_tasks(summary), start=1)]
    main = _main_rows(summary, best=r"\textbf{{{}}}", spread=r"{:.2f} $\pm$ {:.2f}", escape=_escape_latex)
    parts = ["\n".join(f"% {_one_line(note)}" for note in notes), _booktabs(_main_header(summary), main)]
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
    return [*map(escape, summary.axes), "n", "AP (%)", "FM (%)"]


def _main_rows(
    summary: Summary, *, best: str, spread: str, escape: Callable[[str], str] = _one_line
) -> Iterable[Sequence[str]]:
    for configuration in summary.configurations:
        performance = _spread(configuration.average_performance, spread)
        complete = configuration.n_finished == configuration.n_trials
        yield [
            *_axis_cells(configuration, escape),
            str(configuration.n_trials) if complete else f"{configuration.n_finished}/{configuration.n_trials}",
            best.format(performance) if summary.is_best(configuration) else performance,
            _spread(configuration.forgetting, spread),
        ]


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
