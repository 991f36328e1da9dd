"""Runs on disk to tables: mean and spread over repetitions for each configuration, as text, Markdown, CSV or LaTeX.

Inside, scores are fractions; in the tables they are per cent with two decimals. What programs read has four, for
whoever rounds them again would round twice.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from latent_sweep.errors import ConfigError
from latent_sweep.labels import format_value
from latent_sweep.report.latex import latex
from latent_sweep.report.plain_text import plain
from latent_sweep.report.tables import (
    Cell,
    Section,
    counts,
    has_held_out,
    joint_sections,
    router_value,
    sections,
    tasks_of,
    value_range,
    without_comparison,
)
from latent_sweep.results.comparison import Comparison, Difference
from latent_sweep.results.definition import MEASURES, Measure
from latent_sweep.results.summaries import ROUTER_MEASURES, Statistic, Summary, protocol
from latent_sweep.security import printable, spelled_out

DECIMALS = 4
"""Of scores in what programs read."""


def records(summary: Summary) -> list[dict[str, Any]]:
    """One flat row per configuration, scores in per cent rounded to four decimals, None where there is none."""
    tasks = tasks_of(summary)
    measures = ROUTER_MEASURES if any(configuration.router for configuration in summary.configurations) else ()
    return [
        {
            **configuration.read,
            **({"score_on": configuration.settings.get("benchmark.score_on")} if has_held_out(summary) else {}),
            "n_finished": configuration.n_finished,
            "n_trials": configuration.n_trials,
            "n_stopped": configuration.n_stopped,
            "n_failed": configuration.n_failed,
            "AP_mean": _percent(configuration.average_performance, "mean"),
            "AP_std": _percent(configuration.average_performance, "std"),
            "LA_mean": _percent(configuration.learning_accuracy, "mean"),
            "LA_std": _percent(configuration.learning_accuracy, "std"),
            "FM_mean": _percent(configuration.forgetting, "mean"),
            "FM_std": _percent(configuration.forgetting, "std"),
            "best_AP": summary.is_best(configuration),
            **{name: value_range(values, json.dumps) or None for name, values in protocol(configuration).items()},
            **_comparison_record(configuration.comparison, summary.is_compared),
            **{f"score/{task}": _percent(configuration.task_scores.get(task), "mean") for task in tasks},
            **{
                f"constant/{task}": None
                if (score := configuration.constants.get(task)) is None
                else _rounded(100 * score)
                for task in tasks
                if any(one.constants for one in summary.configurations)
            },
            **{measure.metric: _rounded(router_value(configuration, measure)) for measure in measures},
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
    found = comparison or Comparison("", 0, {})
    return {
        "baseline": found.baseline or None,
        "n_pairs": found.n,
        **{
            column: value
            for measure in MEASURES
            for column, value in _difference_record(measure, found.differences.get(measure)).items()
        },
    }


def _difference_record(measure: Measure, difference: Difference | None) -> dict[str, Any]:
    low, high = difference.interval if difference and difference.interval else (None, None)
    mean = difference.mean if difference else None
    values = {"difference": mean, "difference_low": low, "difference_high": high}
    return {
        **{f"{measure}_{part}": _rounded(None if value is None else 100 * value) for part, value in values.items()},
        f"{measure}_resampled": difference.resampled if difference else "nothing",
    }


def _percent(statistic: Statistic | None, part: str) -> float | None:
    value = getattr(statistic, part, None)
    return _rounded(None if value is None else 100 * value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS) + 0.0  # no -0.0


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


def render(summary: Summary, format: str = "text", width: int | None = None) -> str:
    """The summary as tables in one of `FORMATS`, the highest AP marked, trials that ended early below.

    Names, values and reasons come from elsewhere: they hold no secrets here, steer no terminal, and are neither
    Markdown, HTML, LaTeX nor a spreadsheet's formula.

    Args:
        width: columns of the terminal that text is written for; None leaves its lines as long as they are.

    Raises:
        ConfigError: the format is unknown.
    """
    if format not in FORMATS:
        raise ConfigError(f"report format: found {format!r}; expected one of {', '.join(FORMATS)}.")
    if format == "csv":
        return printable(_csv_table(records(summary)))
    if format == "markdown":
        return printable(_render_markdown(summary))
    return printable(_listed(format, sections(summary), summary.name, width))


def render_all(summaries: Sequence[Summary], format: str = "text", width: int | None = None) -> str:
    """The summaries of several sweeps one after another, and before them all their configurations in one table.

    As CSV they are one table, whose first column is the sweep.

    Args:
        width: as for `render`.

    Raises:
        ConfigError: the format is unknown.
    """
    if len(summaries) == 1:
        return render(summaries[0], format, width)
    if format == "csv":
        rows = [{"sweep": summary.name, **row} for summary in summaries for row in records(summary)]
        return printable(_csv_table(rows))
    apart = [render(without_comparison(summary), format, width) for summary in summaries]
    joint = _listed(format, joint_sections(summaries), " and ".join(summary.name for summary in summaries), width)
    return printable(joint) + "\n" + "\n".join(apart)


def _csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return _csv(columns, ([_csv_cell(name, row.get(name)) for name in columns] for row in rows))


def _csv_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.{DECIMALS}f}"
        if isinstance(value, float) and name.startswith(("AP_", "LA_", "BWT_", "FM_", "score/", "constant/", "router_"))
        else format_value(value)
    )


def _render_markdown(summary: Summary) -> str:
    main, *others = sections(summary)
    marked = " Highest AP in bold." * any(map(summary.is_marked, summary.configurations))
    head = f"# Sweep {_escape_markdown(summary.name)}\n\n{counts(summary)}.{marked}\n\n"
    return head + _list_markdown([replace(main, title="")]) + ("\n" + _list_markdown(others) if others else "")


def _list_markdown(found: Sequence[Section]) -> str:
    parts = []
    for section in found:
        if section.title:
            parts.append(f"## {_escape_markdown(section.title)}")
        if (table := section.table) is not None:
            rows = [[_marked(_escape_markdown(cell.text), "**{}**", cell) for cell in row] for row in table.rows]
            parts.append(_piped([*map(_escape_markdown, table.header)], rows))
        parts.append("\n".join(f"- {_escape_markdown(note)}" for note in section.notes))
    return "\n\n".join(parts) + "\n"


def _marked(text: str, mark: str, cell: Cell) -> str:
    return mark.format(text) if cell.best else text


def _listed(format: str, found: Sequence[Section], name: str, width: int | None) -> str:
    """Write sections in a format that has them one after another."""
    if format == "text":
        return plain(found, width)
    return latex(found, name) if format == "latex" else _list_markdown(found)


FORMATS = ("text", "markdown", "csv", "latex")
"""Every format that `render` knows."""


def _one_line(text: str) -> str:
    return " ".join(spelled_out(text).split())


def _piped(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


_MARKDOWN = re.compile(r"[\\`*\[\]|]|~(?=~)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def _escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it as it is, in one line; HTML and a table's bars too."""
    return _MARKDOWN.sub(r"\\\g<0>", html.escape(_one_line(text), quote=False))
