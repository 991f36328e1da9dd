"""The pictures of a sweep: what its summary says, drawn at the width of a paper's page or column.

Every picture stays legible with hundreds of configurations: those with the highest AP are named and colored, the rest
is drawn in gray behind them, and the caption says how many they are. Colors (Okabe and Ito) are told apart by the
color-blind, markers and dashes without any color.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latent_sweep.labels import format_value, label
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.report.figures import Picture, scale_x, shortened
from latent_sweep.report.style import (
    COLORS,
    COLUMN,
    DASHES,
    GRAYS,
    INK,
    MARKERS,
    NORMAL,
    PAGE,
    decimals,
    draw_cells,
    new_figure,
    plain,
    tidy,
)
from latent_sweep.report.tables import how_compared, place_by_performance
from latent_sweep.results.definition import MEASURES
from latent_sweep.results.summaries import Configuration, Summary, numeric_axes

NAMED = len(COLORS)
"""So many configurations have a color and a name."""
MATRICES = 6
ROWS = 30
EQUAL = 4
"""So many groups of configurations with equal scores are told, by the names of so many."""
_GRAY = "#c8c8c8"

Array = npt.NDArray[np.float64]


def sweep_pictures(summary: Summary) -> tuple[list[Picture], list[str]]:
    """Draw what a summary holds; nothing where no trial has finished.

    Returns:
        The pictures, and a line for each that a scheduler has left too few whole configurations for.
    """
    ranked = _ranked(summary)
    if not ranked:
        return [], []
    different, equal = _different(ranked)
    long, by_task = (_repetitions_alike(different, key) for key in (len, tuple))
    found = [(_matrices(by_task), by_task)]
    if lines := [one for one in long if len(one.matrices[0].tasks) > 1]:
        found = [(_over_tasks(lines), long), *found]
    if columns := [one for one in by_task if len(one.matrices[0].tasks) > 1 and one.learns_in_turn]:
        found.insert(-1, (_forgetting(columns), by_task))
    stopped = _survivors(different)
    drawn = [
        picture._replace(caption=picture.caption + _left_out(different, shown) + equal + stopped)
        for picture, shown in found
    ]
    curves, no_curves = _curves(summary, ranked)
    interactions, no_interactions = _interactions(summary, ranked)
    return [*curves, *interactions, *_differences(summary, ranked), *drawn], [*no_curves, *no_interactions]


def _ranked(summary: Summary) -> list[Configuration]:
    """The configurations with finished trials, the highest AP first; last those whose other trials were stopped."""
    finished = [one for one in summary.configurations if one.average_performance is not None and one.matrices]
    return sorted(finished, key=place_by_performance)


def _different(ranked: Sequence[Configuration]) -> tuple[list[Configuration], str]:
    """The first of those with the same score matrices, as with a router that is certain, and a line on the others."""
    alike: dict[tuple[ScoreMatrix, ...], list[Configuration]] = {}
    for one in ranked:
        alike.setdefault(one.matrices, []).append(one)
    groups = [_listed(list(map(_name, found))) for found in alike.values() if len(found) > 1]
    more = f"; and {len(groups) - EQUAL} more groups" if len(groups) > EQUAL else ""
    told = f"; with the same scores, and drawn once: {'; '.join(groups[:EQUAL])}{more}" if groups else ""
    return [found[0] for found in alike.values()], told


def _repetitions_alike(found: Sequence[Configuration], key: Callable[[Sequence[str]], Any]) -> list[Configuration]:
    """Each with those of its trials alone whose tasks have the same key as its first one's: others have no mean."""
    first = [key(one.matrices[0].tasks) for one in found]
    return [
        dataclasses.replace(one, matrices=tuple(matrix for matrix in one.matrices if key(matrix.tasks) == wanted))
        for one, wanted in zip(found, first, strict=True)
    ]


def _left_out(found: Sequence[Configuration], shown: Sequence[Configuration]) -> str:
    count = sum(len(one.matrices) for one in found) - sum(len(one.matrices) for one in shown)
    return f"; left out, as other streams of tasks than their configuration's first trial: {count}" if count else ""


def _survivors(found: Sequence[Configuration]) -> str:
    names = [_name(one) for one in found if one.n_stopped]
    return f"; last, for a scheduler has left the better of their trials alone: {_listed(names)}" if names else ""


def _without(found: Iterable[Configuration]) -> str:
    count = sum(bool(one.n_stopped) for one in found)
    return f"; left out, for a scheduler has left the better of their trials alone: {count}" if count else ""


_STOPPED = "a scheduler has stopped trials of too many configurations"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - EQUAL} more" if len(names) > EQUAL else ""
    return ", ".join(names[:EQUAL]) + more


def _name(configuration: Configuration) -> str:
    """What a picture calls it: its settings, the method by its name alone."""
    values = dict(configuration.values)
    method = values.pop("method", None)
    return " ".join(filter(None, (method, label(values)))) or "all trials"


def _wrapped(name: str, width: int) -> str:
    """Break a name into at most three lines; what does not fit ends in an ellipsis."""
    return plain("\n".join(textwrap.wrap(name, width, max_lines=3, placeholder=" …")))


def _behind(ranked: Sequence[Any]) -> str:
    left = len(ranked) - NAMED
    return f"; named are the {NAMED} with the highest AP, gray the other {left}" if left > 0 else ""


def _band(values: Sequence[Sequence[float]]) -> tuple[Array, Array]:
    """Mean and sample standard deviation over trials, in per cent; the latter is 0 for one trial."""
    table = 100 * np.asarray(values, dtype=np.float64)
    return table.mean(0), table.std(0, ddof=1) if len(table) > 1 else np.zeros(table.shape[1])


def _draw_lines(axes: Axes, lines: Sequence[tuple[str, Sequence[float], Array, Array]]) -> None:
    """Draw (name, x, mean, deviation), the first ones with color, name and band."""
    for position, (name, x, mean, deviation) in reversed(list(enumerate(lines))):
        if position >= NAMED:
            axes.plot(x, mean, color=_GRAY, linewidth=0.6)
            continue
        color = COLORS[position]
        style: dict[str, Any] = {
            "marker": MARKERS[position],
            "markersize": 3.5,
            "linestyle": DASHES[position % len(DASHES)],
            "linewidth": 1.3,
        }
        axes.plot(x, mean, color=color, label=name, **style)
        low, high = np.clip((mean - deviation, mean + deviation), 0, 100)  # no score lies beyond
        axes.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
    low, high = axes.get_ylim()
    if high - low < 1:  # all are equal: an axis of hundredths would show noise
        axes.set_ylim(max(0, low - 5), min(100, high + 5))
    axes.grid(color="#e4e4e4", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        options: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 7}
        columns = max(1, min(3, int(110 / max(map(len, names)))))
        figure.legend(handles[::-1], [shortened(name, 90) for name in names[::-1]], ncols=columns, **options)


def _over_tasks(ranked: Sequence[Configuration]) -> Picture:
    figure = new_figure(PAGE, 2.7 + 0.13 * min(NAMED, len(ranked)))
    left, right = figure.subplots(1, 2, sharey=True)
    performance, new = [], []
    for one in ranked:
        stages = range(1, len(one.matrices[0].rows) + 1)
        performance.append((_name(one), stages, *_band([list(map(np.mean, matrix.rows)) for matrix in one.matrices])))
        mean_new, deviation = _band([_mean_when_new(matrix) for matrix in one.matrices])
        new.append((_name(one), stages, mean_new if one.learns_in_turn else np.nan * mean_new, deviation))
    _draw_lines(left, performance)
    _draw_lines(right, new)
    left.set_title("AP of the tasks seen", fontsize=8)
    right.set_title("mean score when new", fontsize=8)
    left.set_ylabel("score (%)", fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("tasks seen", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
    _add_legend(figure, left)
    return Picture(
        "over_tasks",
        "Over the tasks seen",
        "left: mean score over the tasks seen so far; right: mean score that these tasks had right after they were "
        f"learned, of what is learned task after task; mean over finished trials, bands of one standard "
        f"deviation{_behind(ranked)}",
        figure,
    )


def _mean_when_new(matrix: ScoreMatrix) -> list[float]:
    diagonal = [row[task] for task, row in enumerate(matrix.rows)]
    return list(np.cumsum(diagonal) / np.arange(1, len(diagonal) + 1))


def forgetting_by_task(matrices: Sequence[ScoreMatrix]) -> Array:
    """Best score ever minus the last one of each task but the last (the terms of FM), a mean over trials; (T - 1,)."""
    found = []
    for matrix in matrices:
        last = matrix.rows[-1]
        found.append([max(row[j] for row in matrix.rows[j:]) - last[j] for j in range(len(last) - 1)])
    return np.mean(found, axis=0)


def _forgetting(ranked: Sequence[Configuration]) -> Picture:
    alike = [one for one in ranked if one.matrices[0].tasks == ranked[0].matrices[0].tasks]
    shown = alike[:ROWS]
    tasks = shown[0].matrices[0].tasks[:-1]
    values = 100 * np.array([forgetting_by_task(one.matrices) for one in shown])
    figure = new_figure(PAGE, 1.3 + 0.28 * len(shown))
    axes = figure.add_subplot()
    largest = max(10.0, float(np.abs(values).max()))
    image = axes.imshow(values, cmap="PuOr_r", vmin=-largest, vmax=largest, aspect="auto")
    draw_cells(axes, values, np.abs(values) > 0.6 * largest, decimals(0), 7 if len(tasks) <= 10 else 6)
    axes.set_xticks(range(len(tasks)), [shortened(task, 16) for task in tasks], rotation=40, ha="right", fontsize=7)
    axes.set_yticks(range(len(shown)), [_wrapped(_name(one), 36) for one in shown], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02).ax.tick_params(labelsize=7)
    rest = f"; the {len(shown)} with the highest AP of {len(alike)}" if len(shown) < len(alike) else ""
    if others := len(ranked) - len(alike):
        rest += f"; left out, as they learn other streams of tasks than the one with the highest AP: {others}"
    return Picture(
        "forgetting",
        "Forgetting by task",
        f"best score ever minus the last one, percentage points, mean over finished trials{rest}",
        figure,
    )


def _matrices(ranked: Sequence[Configuration]) -> Picture:
    shown = ranked[:MATRICES]
    size = max(len(one.matrices[0].tasks) for one in shown)
    columns = min(len(shown), 3 if size <= 6 else 2)
    rows = math.ceil(len(shown) / columns)
    width = PAGE if columns > 1 or size > 6 else COLUMN
    figure = new_figure(width, rows * (0.86 * width / columns + 0.9))
    image = None
    for place, one in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, place)
        tasks = one.matrices[0].tasks
        mean = np.full((len(tasks), len(tasks)), np.nan)
        for i in range(len(tasks)):
            mean[i, : i + 1] = 100 * np.mean([matrix.rows[i] for matrix in one.matrices], axis=0)
        image = axes.imshow(mean, cmap="YlGnBu", vmin=0, vmax=100)
        draw_cells(axes, mean, mean > 55, decimals(0), 7 if size <= 8 else 5)
        axes.set_title(_wrapped(_name(one), 84 // columns if columns > 1 else 40), fontsize=7)
        axes.set_xticks(range(len(tasks)), [shortened(task, 12) for task in tasks], rotation=60, ha="right")
        axes.set_yticks(range(len(tasks)), [shortened(task, 12) for task in tasks])
        axes.tick_params(length=0, labelsize=6)
        axes.spines[:].set_visible(False)
    if image is not None:
        bar = figure.colorbar(image, ax=figure.axes, fraction=0.025, pad=0.02)
        bar.ax.tick_params(labelsize=6)
        bar.outline.set_visible(False)
    rest = f"; the {len(shown)} with the highest AP of {len(ranked)}" if len(shown) < len(ranked) else ""
    return Picture(
        "matrices",
        "Score matrices",
        f"score (%) on each task (columns) after learning each task (rows), mean over finished trials{rest}",
        figure,
    )


def _differences(summary: Summary, ranked: Sequence[Configuration]) -> list[Picture]:
    """Differences from the baseline with their intervals; nothing where none was asked for, or there are no pairs."""
    compared = [(one, one.comparison.differences) for one in ranked if one.comparison and one.comparison.differences]
    if not compared:
        return []
    shown = compared[:ROWS]
    figure = new_figure(PAGE, 0.9 + 0.3 * len(shown))
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for axes, measure in zip(panels, MEASURES, strict=True):
        axes.axvline(0, color=INK, linewidth=0.7)
        for row, (_, differences) in enumerate(shown):
            if (found := differences.get(measure)) is None:
                continue
            low, high = found.interval or (found.mean, found.mean)
            color = COLORS[0] if found.told_apart else GRAYS[1]
            inside = color if found.told_apart else "white"
            axes.plot([100 * low, 100 * high], [row, row], color=color, linewidth=1.2)
            axes.plot([100 * found.mean], [row], "o", markersize=4, color=color, markerfacecolor=inside)
        axes.set_title(measure, fontsize=NORMAL)
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.5)
        tidy(axes)
    figure.supxlabel("difference (percentage points)", fontsize=NORMAL)
    panels[0].set_yticks(range(len(shown)), [_wrapped(_name(one), 36) for one, _ in shown])
    panels[0].set_ylim(len(shown) - 0.5, -0.5)
    rest = f"; the {len(shown)} with the highest AP of {len(compared)}" if len(shown) < len(compared) else ""
    caption = (
        "means of the pairs, with intervals of 95 %; gray and hollow where 0 lies in the interval, or there is none"
        f"{rest}; {'; '.join(how_compared([summary]))}"
    )
    return [Picture("differences", "Differences from the baseline", caption, figure)]


# --- against settings


def _curves(summary: Summary, ranked: Sequence[Configuration]) -> tuple[list[Picture], list[str]]:
    """AP and FM against each numeric axis; a line for each point of the others. Without what was stopped in part."""
    pictures, gaps = [], []
    for axis in numeric_axes([one.values for one in summary.configurations]):
        lines = _lines([one for one in ranked if not one.n_stopped], axis)
        if not lines:
            gaps += [f"AP and FM against {axis}: {_STOPPED}"] * bool(_lines(ranked, axis))
            continue
        figure = new_figure(PAGE, 2.5 + 0.13 * min(NAMED, len(lines)))
        panels = figure.subplots(1, 2)
        measures = {"AP": ScoreMatrix.average_performance, "FM": ScoreMatrix.forgetting}
        for axes, (title, measure) in zip(panels, measures.items(), strict=True):
            drawn = []
            for name, found in lines.items():
                points = sorted(found, key=lambda one: one.values[axis])
                bands = [_band([[measure(matrix)] for matrix in one.matrices]) for one in points]
                mean, deviation = (np.concatenate([band[part] for band in bands]) for part in (0, 1))
                if title == "FM":
                    mean = np.where([one.learns_in_turn and one.n_tasks > 1 for one in points], mean, np.nan)
                drawn.append((name, [one.values[axis] for one in points], mean, deviation))
            _draw_lines(axes, drawn)
            scale_x(axes, sorted({x for _, values, _, _ in drawn for x in values}))
            axes.set_title(f"{title} (%)", fontsize=8)
            axes.set_xlabel(plain(axis), fontsize=8)
        _add_legend(figure, panels[0])
        pictures.append(
            Picture(
                f"against_{_file_name(axis)}",
                f"Against {axis}",
                f"average performance and forgetting measure, mean over finished trials, bands of one standard "
                f"deviation{_behind(list(lines))}{_without(_along(ranked, axis))}",
                figure,
            )
        )
    return pictures, gaps


def _lines(ranked: Sequence[Configuration], axis: str) -> dict[str, list[Configuration]]:
    """Those that differ along an axis alone, by the rest of their settings; the line with the best point first."""
    lines: dict[str, list[Configuration]] = {}
    for one in _along(ranked, axis):
        lines.setdefault(label({name: value for name, value in one.values.items() if name != axis}), []).append(one)
    return {name: found for name, found in lines.items() if len(found) > 1}


def _along(found: Sequence[Configuration], *axes: str) -> list[Configuration]:
    return [one for one in found if all(one.values[axis] is not None for axis in axes)]


def _interactions(summary: Summary, ranked: Sequence[Configuration]) -> tuple[list[Picture], list[str]]:
    """AP over each pair of numeric axes, where other axes do not vary with them. Without what was stopped in part."""
    pictures, gaps = [], []
    for x_axis, y_axis in itertools.combinations(numeric_axes([one.values for one in summary.configurations]), 2):
        grids = _grids([one for one in summary.configurations if not one.n_stopped], x_axis, y_axis)
        if not grids:
            gaps += [f"AP over {x_axis} and {y_axis}: {_STOPPED}"] * bool(_grids(ranked, x_axis, y_axis))
            continue
        shown = list(grids.items())[:4]
        figure = new_figure(PAGE if len(shown) > 1 else COLUMN, 2.9 * math.ceil(len(shown) / 2))
        for place, (name, found) in enumerate(shown, start=1):
            axes = figure.add_subplot(math.ceil(len(shown) / 2), min(2, len(shown)), place)
            xs, ys = (sorted({one.values[axis] for one in found}) for axis in (x_axis, y_axis))
            table = np.full((len(ys), len(xs)), np.nan)
            for one in found:
                if one.average_performance is not None:
                    place_of = ys.index(one.values[y_axis]), xs.index(one.values[x_axis])
                    table[place_of] = 100 * one.average_performance.mean
            low, high = float(np.nanmin(table)), float(np.nanmax(table))
            axes.imshow(table, cmap="YlGnBu", aspect="auto", origin="lower")
            draw_cells(axes, table, table > low + 0.55 * (high - low), decimals(1), 7)
            axes.set_xticks(range(len(xs)), [format_value(value) for value in xs], fontsize=7)
            axes.set_yticks(range(len(ys)), [format_value(value) for value in ys], fontsize=7)
            axes.set_xlabel(plain(x_axis), fontsize=8)
            axes.set_ylabel(plain(y_axis), fontsize=8)
            axes.set_title(_wrapped(name, 48), fontsize=7)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
        more = len(grids) - len(shown)
        rest = f"; {more} more points of the other settings are not drawn" if more else ""
        left = _without(_along(ranked, x_axis, y_axis))
        file = f"{_file_name(x_axis)}_and_{_file_name(y_axis)}"
        pictures.append(
            Picture(file, f"{x_axis} and {y_axis}", f"AP (%), mean over finished trials{rest}{left}", figure)
        )
    return pictures, gaps


def _grids(found: Sequence[Configuration], x_axis: str, y_axis: str) -> dict[str, list[Configuration]]:
    """Those that differ along two axes alone, by the rest of their settings, where both vary and a trial finished."""
    groups: dict[str, list[Configuration]] = {}
    for one in _along(found, x_axis, y_axis):
        others = {name: value for name, value in one.values.items() if name not in (x_axis, y_axis)}
        groups.setdefault(label(others), []).append(one)
    return {name: each for name, each in groups.items() if _is_grid(each, x_axis, y_axis)}


def _is_grid(found: Sequence[Configuration], x_axis: str, y_axis: str) -> bool:
    vary = all(len({one.values[axis] for one in found}) > 1 for axis in (x_axis, y_axis))
    return vary and any(one.average_performance is not None for one in found)


def _file_name(text: str) -> str:
    return "".join(character if character.isalnum() or character in "-_" else "_" for character in text)
