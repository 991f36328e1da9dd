"""Pictures of results: the score matrix as a heat map, and a metric against a setting.

Figures are built from `matplotlib.figure.Figure` and never through pyplot, so nothing global changes and any thread
may draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from latent_sweep.results.panels import FAINT, decimals, draw_cells, new_figure, plain

_LONGEST_TASK_NAME = 30


class Picture(NamedTuple):
    """A figure with what a reader is told of it."""

    name: str
    """Of its file, without an ending: letters, digits, `-` and `_`."""
    title: str
    caption: str
    """What is drawn, over which trials and rows, and in which units."""
    figure: Figure


def score_matrix_figure(tasks: Sequence[str], scores: Sequence[Sequence[float | None]]) -> Figure:
    """Heat map of `scores[i][j]`, the fraction reached on task j after learning task i, with the per cent in each cell.

    Args:
        tasks: the order of learning; tasks not yet learned are left out of the picture.
        scores: lower triangle, one row per task learned so far; entries above the diagonal are left blank.
    """
    n = len(scores)
    percent = _lower_triangle(n, scores)
    figure = new_figure(3.6 + 0.52 * n, 2.6 + 0.46 * n)
    axes = figure.add_subplot()
    image = axes.imshow(percent, cmap="YlGnBu", vmin=0, vmax=100, aspect="auto")
    draw_cells(axes, percent, percent > 55, decimals(1), 8)
    names = [shortened(task) for task in tasks[:n]]
    axes.set_xticks(range(n), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(n), names)
    axes.set_xlabel("scored on")
    axes.set_ylabel("after learning")
    axes.set_xticks(np.arange(n + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(n + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="score (%)")
    bar.outline.set_visible(False)
    return figure


def curve_figure(
    x_name: str,
    x_values: Sequence[float],
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    y_name: str = "AP (%)",
) -> Figure:
    """Mean lines with a band of one standard deviation; the x axis is symlog where the values span decades or hold 0.

    Args:
        x_name: the setting on the x axis.
        x_values: its values, ascending.
        series: label -> (means, standard deviations), one entry per x value; NaN leaves a gap or no band.
        y_name: what the lines show, with its unit.
    """
    figure = new_figure(7.6 if len(series) > 1 else 6.0, 4.0)
    axes = figure.add_subplot()
    colours = colormaps["viridis"](np.linspace(0.05, 0.85, max(len(series), 2)))
    band = 0.15 if len(series) <= 4 else 0.06
    for colour, marker, (label, (means, stds)) in zip(colours, cycle("osD^vP"), series.items(), strict=False):
        mean, std = np.asarray(means, dtype=float), np.asarray(stds, dtype=float)
        axes.plot(x_values, mean, marker=marker, markersize=5, linewidth=1.8, color=colour, label=plain(label))
        axes.fill_between(x_values, mean - std, mean + std, color=colour, alpha=band, linewidth=0)
    scale_x(axes, x_values)
    axes.set_xlabel(plain(x_name))
    axes.set_ylabel(y_name)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def _lower_triangle(n: int, scores: Sequence[Sequence[float | None]]) -> np.ndarray:
    percent = np.full((n, n), np.nan)
    for i, row in enumerate(scores):
        for j, score in enumerate(row[: i + 1]):
            percent[i, j] = np.nan if score is None else 100 * score
    return percent


def shortened(name: str, longest: int = _LONGEST_TASK_NAME) -> str:
    """Cut a name for a picture; what is cut ends in an ellipsis."""
    return plain(name if len(name) <= longest else name[: longest - 1] + "…")


def scale_x(axes: Axes, x_values: Sequence[float]) -> None:
    """Put a tick at every value; the axis is symlog where they span decades or hold 0."""
    sizes = [abs(x) for x in x_values if x != 0]
    spans_decades = len(sizes) > 1 and max(sizes) >= 20 * min(sizes)
    if spans_decades or (sizes and len(sizes) < len(x_values)):
        axes.set_xscale("symlog", linthresh=min(sizes), linscale=0.6)
    axes.xaxis.set_major_locator(FixedLocator(list(x_values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{x:g}" for x in x_values])
