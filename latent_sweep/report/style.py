"""The style of the pictures: sizes for a paper's page, one palette, heat maps with numbers in their cells.

Pictures stay readable in gray and for color-blind readers: lines also differ in marker and dash, and heat maps in
lightness. Text is at least `SMALL` points at the figure's size. Pyplot is never used: it changes global state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from latent_sweep.results.selection import short_task_names

COLUMN, PAGE = 3.3, 6.8
"""Widths of a paper's column and page, in inches."""
SMALL, NORMAL = 7.0, 8.0
INK, FAINT = "#333333", "#d9d9d9"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
"""Okabe and Ito's palette without yellow, which is invisible on white."""
GRAYS = ("#f0f0f0", "#9e9e9e", "#4d4d4d")
COLOR_MAP, GRID_WIDTH = "YlGnBu", 1.2
MARKERS, DASHES = "osD^vPX", ("-", "--", ":", "-.")
_DPI = 160


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    """Escape text, so that matplotlib reads no formula between dollars."""
    return text.replace("$", r"\$")


def numbered(tasks: Sequence[str]) -> list[str]:
    """Return row labels: each task's shortened name and its position in the order of learning."""
    return [f"{plain(name)}  {i}" for i, name in enumerate(short_task_names(tasks), start=1)]


def positions(n_tasks: int) -> list[str]:
    return [str(i + 1) for i in range(n_tasks)]


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL, color=INK, labelcolor=INK)
    axes.xaxis.label.set_fontsize(NORMAL)
    axes.yaxis.label.set_fontsize(NORMAL)
    axes.title.set_fontsize(NORMAL)
    axes.set_axisbelow(True)


def is_dark(colors: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return where text must be white on colors (..., 4)."""
    dark: npt.NDArray[np.bool_] = colors[..., :3] @ [0.3, 0.59, 0.11] < 0.55
    return dark


def decimals(digits: int) -> Callable[[float], str]:
    return lambda value: f"{round(value, digits) + 0.0:.{digits}f}"


def heat_map(
    axes: Axes,
    rows: Sequence[str],
    columns: Sequence[str],
    values: npt.NDArray[np.float64],
    formatted: Callable[[float], str],
    norm: Normalize,
    cmap: str = COLOR_MAP,
    size: float = SMALL,
    aspect: Literal["auto", "equal"] = "auto",
) -> AxesImage:
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap=cmap, norm=norm, aspect=aspect)
    dark = is_dark(image.to_rgba(masked))
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value):
            color = "white" if dark[i, j] else INK
            axes.text(j, i, formatted(value), ha="center", va="center", color=color, fontsize=size)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=GRID_WIDTH)
    tidy(axes)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    return image


def color_bar(axes: Sequence[Axes], image: AxesImage, label: str = "") -> None:
    figure: Any = axes[0].figure
    bar = figure.colorbar(image, ax=list(axes), fraction=0.05, pad=0.02)
    bar.set_label(label, fontsize=NORMAL)
    bar.ax.tick_params(which="both", labelsize=SMALL)
    bar.ax.yaxis.set_major_formatter("{x:g}")  # matplotlib's exponents are smaller than the other text
    bar.ax.yaxis.set_minor_formatter("")
    bar.outline.set_visible(False)


def matrix_height(n_rows: int) -> float:
    return 0.85 + 0.24 * max(n_rows, 4)


def norm_of(values: npt.NDArray[np.float64]) -> Normalize:
    """Return a color scale from zero, or a logarithmic one if the values span two orders of magnitude."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return Normalize(0, 1)
    low, high = float(positive.min()), float(positive.max())
    return LogNorm(low, high, clip=True) if high > 100 * low else Normalize(0, high)


def short_number(value: float) -> str:
    """Return a number below 100 in at most five characters: `0`, `7.1`, `0.031`, `3e-5`."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"
