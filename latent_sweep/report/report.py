"""Summaries as text, Markdown, CSV or LaTeX.

Tables for people have percentages with two decimals. CSV has four, as its readers may round again.
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
    Section,
    counts,
    has_held_out,
    joint_sections,
    one_line,
    router_value,
    sections,
    tasks_of,
    value_range,
    without_comparison,
)
from latent_sweep.results.comparison import Comparison, Difference
from latent_sweep.results.definition import MEASURES, Measure
from latent_sweep.results.summaries import ROUTING_METRICS, Statistic, Summary, protocol
from latent_sweep.security import printable

FORMATS = ("text", "markdown", "csv", "latex")
DECIMALS = 4
"""Of scores in CSV."""


def records(summary: Summary) -> list[dict[str, Any]]:
    """Return one flat row per configuration, with scores in percent and None for missing values."""
    tasks = tasks_of(summary)
    measures = ROUTING_METRICS if any(one.router for one in summary.configurations) else ()
    with_constants = any(one.constants for one in summary.configurations)
    rows = []
    for one in summary.configurations:
        row: dict[str, Any] = dict(one.read)
        if has_held_out(summary):
            row["score_on"] = one.settings.get("benchmark.score_on")
        row |= {name: getattr(one, name) for name in ("n_finished", "n_trials", "n_stopped", "n_failed")}
        statistics = {"AP": one.average_performance, "LA": one.learning_accuracy, "FM": one.forgetting}
        for name, statistic in statistics.items():
            row |= {f"{name}_{part}": _percent(getattr(statistic, part, None)) for part in ("mean", "std")}
        row["best_AP"] = summary.is_best(one)
        row |= {name: value_range(values, json.dumps) or None for name, values in protocol(one).items()}
        row |= _comparison_record(one.comparison, summary.is_compared)
        row |= {f"score/{task}": _mean(one.task_scores.get(task)) for task in tasks}
        if with_constants:
            row |= {f"constant/{task}": _percent(one.constants.get(task)) for task in tasks}
        row |= {measure.metric: _rounded(router_value(one, measure)) for measure in measures}
        row |= {f"computed_with/{name}": " and ".join(one.computed_with.get(name, ())) for name in summary.mixed}
        rows.append(row)
    return rows


def _comparison_record(comparison: Comparison | None, is_compared: bool) -> dict[str, Any]:
    if not is_compared:
        return {}
    own = comparison or Comparison("", 0, {})
    row: dict[str, Any] = {"baseline": own.baseline or None, "n_pairs": own.n}
    for measure in MEASURES:
        row |= _difference_record(measure, own.differences.get(measure))
    return row


def _difference_record(measure: Measure, difference: Difference | None) -> dict[str, Any]:
    low, high = difference.interval if difference and difference.interval else (None, None)
    mean = difference.mean if difference else None
    values = {"difference": mean, "difference_low": low, "difference_high": high}
    return {
        **{f"{measure}_{part}": _percent(value) for part, value in values.items()},
        f"{measure}_resampled": difference.resampled if difference else "nothing",
    }


def _mean(statistic: Statistic | None) -> float | None:
    return None if statistic is None else _percent(statistic.mean)


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else _rounded(100 * fraction)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS) + 0.0  # no -0.0


def score_matrix_csv(tasks: Sequence[str], scores: Sequence[Sequence[float | None]]) -> str:
    """Return the score matrix as CSV: a row per task learned, a column per task scored, fractions."""
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
    """Quote a cell that a spreadsheet would read as a formula; numbers are left alone."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def render(summary: Summary, format: str = "text", width: int | None = None, verbose: bool = False) -> str:
    """Return a summary in one of `FORMATS`, with the highest AP marked.

    Names, values and reasons are untrusted: they are redacted and escaped for the format.

    Args:
        width: columns of the terminal, for text; None does not limit the lines.
        verbose: include definitions and other details.

    Raises ConfigError for another format.
    """
    if format not in FORMATS:
        raise ConfigError(f"report format: found {format!r}; expected one of {', '.join(FORMATS)}.")
    if format == "csv":
        return printable(_csv_table(records(summary)))
    parts = sections(summary)
    if format != "markdown":
        return printable(_listed(format, parts, summary.name, width, verbose))
    marked = " Highest AP in bold." * any(map(summary.is_marked, summary.configurations))
    head = f"# Sweep {_escape_markdown(summary.name)}\n\n{counts(summary)}.{marked}\n\n"
    return printable(head + _list_markdown([replace(parts[0], title=""), *parts[1:]], verbose))


def render_all(
    summaries: Sequence[Summary], format: str = "text", width: int | None = None, verbose: bool = False
) -> str:
    """Return several summaries, preceded by a table of all configurations; CSV has only that, by `sweep`."""
    if len(summaries) == 1:
        return render(summaries[0], format, width, verbose)
    if format == "csv":
        rows = [{"sweep": summary.name, **row} for summary in summaries for row in records(summary)]
        return printable(_csv_table(rows))
    single = [render(without_comparison(summary), format, width, verbose) for summary in summaries]
    names = " and ".join(summary.name for summary in summaries)
    joint = _listed(format, joint_sections(summaries), names, width, verbose)
    return printable(joint) + "\n" + "\n".join(single)


def _csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return _csv(columns, ([_csv_cell(name, row.get(name)) for name in columns] for row in rows))


def _csv_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    is_score = name.startswith(("AP_", "LA_", "BWT_", "FM_", "score/", "constant/", "router_"))
    return f"{value:.{DECIMALS}f}" if isinstance(value, float) and is_score else format_value(value)


def _listed(format: str, parts: Sequence[Section], name: str, width: int | None, verbose: bool) -> str:
    if format == "markdown":
        return _list_markdown(parts, verbose)
    parts = [replace(section, notes=_notes(section, verbose)) for section in parts]
    return latex(parts, name) if format == "latex" else plain(parts, width)


def _notes(section: Section, verbose: bool) -> list[str]:
    return [*section.notes, *(section.details if verbose else ())]


def _list_markdown(parts: Sequence[Section], verbose: bool) -> str:
    blocks = []
    for section in parts:
        if section.title:
            blocks.append(f"## {_escape_markdown(section.title)}")
        if (table := section.table) is not None:
            rows = [
                [f"**{_escape_markdown(cell.text)}**" if cell.best else _escape_markdown(cell.text) for cell in row]
                for row in table.rows
            ]
            lines = [list(map(_escape_markdown, table.header)), ["---"] * len(table.header), *rows]
            blocks.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        blocks.append("\n".join(f"- {_escape_markdown(note)}" for note in _notes(section, verbose)))
    return "\n\n".join(filter(None, blocks)) + "\n"


_MARKDOWN = re.compile(r"[\\`*\[\]|]|~(?=~)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def _escape_markdown(text: str) -> str:
    """Escape Markdown, HTML and the bars of tables, and join the text into one line."""
    return _MARKDOWN.sub(r"\\\g<0>", html.escape(one_line(text), quote=False))
