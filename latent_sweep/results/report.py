"""Runs on disk to tables: mean and spread over repetitions for each configuration, as text, Markdown, CSV or LaTeX.

Inside, scores are fractions; in the tables they are per cent with two decimals.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from latent_sweep.errors import ConfigError
from latent_sweep.labels import format_value, label
from latent_sweep.results.bootstrap import RESAMPLES
from latent_sweep.results.comparison import Comparison, Difference
from latent_sweep.results.summaries import ROUTER_MEASURES, Configuration, RouterMeasure, Statistic, Summary, protocol
from latent_sweep.security import printable, spelled_out
from latent_sweep.store.journal import Status


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
