"""How pictures of evidence look: sizes of a paper's page, one palette, heat maps with numbers in their cells.

Every picture stays readable in gray and to people who confuse colors: lightness alone tells values apart, and lines
also differ in marker and dash. Text is at least `SMALL` points at the size of the figure. Pyplot is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from latent_sweep.results.selection import short_task_names

COLUMN, PAGE = 3.3, 6.8
"""Widths in inches of a column and of a page of a paper."""
SMALL, NORMAL = 7.0, 8.0
"""Font sizes in points."""
INK, FAINT = "#333333", "#d9d9d9"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
"""Okabe and Ito's, without the yellow that vanishes on white."""
GRAYS = ("#f0f0f0", "#9e9e9e", "#4d4d4d")
MARKERS, DASHES = "osD^vPX", ("-", "--", ":", "-.")
_DPI = 160


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, whose parts make room for each other."""
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    """Escape text so that it is drawn as it is: between dollars a formula would be read."""
    return text.replace("$", r"\$")


def numbered(tasks: Sequence[str]) -> list[str]:
    """Names of tasks to stand beside rows: the place in the order of learning, from 1, and the shortened name."""
    return [f"{plain(name)}  {i}" for i, name in enumerate(short_task_names(tasks), start=1)]


def tidy(axes: Axes) -> None:
    """Draw axes lightly, in the fonts of these pictures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL, color=INK, labelcolor=INK)
    axes.xaxis.label.set_fontsize(NORMAL)
    axes.yaxis.label.set_fontsize(NORMAL)
    axes.title.set_fontsize(NORMAL)
    axes.set_axisbelow(True)


def draw_cells(
    axes: Axes,
    values: npt.NDArray[np.float64],
    dark: npt.NDArray[np.bool_],
    written: Callable[[float], str],
    size: float,
) -> None:
    """Write what each number of a matrix is `written` as into its cell; NaN leaves it blank.

    Args:
        dark: (rows, columns) cells that are written in white.
        size: of the font, in points.
    """
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            color = "white" if dark[i, j] else INK
            axes.text(j, i, written(value), ha="center", va="center", color=color, fontsize=size)


def decimals(digits: int) -> Callable[[float], str]:
    """Return what writes a number with so many digits behind the point, and no -0."""
    return lambda value: f"{round(value, digits) + 0.0:.{digits}f}"


def heat_map(
    axes: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    values: npt.NDArray[np.float64],
    written: Callable[[float], str],
    norm: Normalize,
    label: str,
) -> None:
    """Draw a matrix, each cell in a color and with its number; NaN leaves a cell blank.

    Args:
        rows: what stands at the left of each row.
        columns: what stands below each column.
        values: (rows, columns).
        written: the text of a cell.
        norm: from the least value to the largest; logarithmic where it is a `LogNorm`.
        label: what the colors mean, with its unit.
    """
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap="YlGnBu", norm=norm, aspect="auto")
    draw_cells(axes, values, np.ma.filled(norm(masked), 0) > 0.55, written, SMALL)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.2)
    tidy(axes)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    figure: Any = axes.figure
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label(label, fontsize=NORMAL)
    bar.ax.tick_params(which="both", labelsize=SMALL)
    bar.ax.yaxis.set_major_formatter("{x:g}")  # an exponent would be smaller than other text
    bar.ax.yaxis.set_minor_formatter("")
    bar.outline.set_visible(False)


def matrix_height(n_rows: int) -> float:
    """Return the height in inches in which a matrix of so many rows has room for its numbers."""
    return 0.85 + 0.24 * max(n_rows, 4)


def positions(n_tasks: int) -> list[str]:
    """Return places in the order of learning, from 1, to stand below columns."""
    return [str(i + 1) for i in range(n_tasks)]


def norm_of(values: npt.NDArray[np.float64]) -> Normalize:
    """Colors from zero, or by order of magnitude where values span several; zero has the lightest in any case."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return Normalize(0, 1)
    low, high = float(positive.min()), float(positive.max())
    return LogNorm(low, high, clip=True) if high > 100 * low else Normalize(0, high)


def short_number(value: float) -> str:
    """Write a number below 100 in at most five letters: `0`, `7.1`, `0.031`, `3e-5`."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
