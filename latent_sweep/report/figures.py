"""The score matrix as a heat map.

Figures are made from `matplotlib.figure.Figure`, not by pyplot: no global state changes, so any thread may draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from latent_sweep.report.style import INK, decimals, draw_cells, new_figure, plain

_LONGEST_TASK_NAME = 30
QUICK_DPI = 100
"""Resolution of `score_matrix_png`, of which a sweep may draw thousands."""
_SCORE_COLORS, _DARK, _SCORE_SIZE = "YlGnBu", 55, 8
"""Color map of a score matrix, percentage above which cells are dark, font size in points."""


class Picture(NamedTuple):
    """A figure with its title and caption."""

    name: str
    """File name without an extension: letters, digits, `-` and `_`."""
    title: str
    caption: str
    figure: Figure


def score_matrix_figure(tasks: Sequence[str], scores: Sequence[Sequence[float | None]]) -> Figure:
    """Draw a heat map of `scores[i][j]`, the fraction reached on task j after learning task i, in percent."""
    n = len(scores)
    percent = _lower_triangle(n, scores)
    figure = new_figure(3.6 + 0.52 * n, 2.6 + 0.46 * n)
    axes = figure.add_subplot()
    image = axes.imshow(percent, cmap=_SCORE_COLORS, vmin=0, vmax=100, aspect="auto")
    draw_cells(axes, percent, percent > _DARK, decimals(1), _SCORE_SIZE)
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


def score_matrix_png(tasks: Sequence[str], scores: Sequence[Sequence[float | None]]) -> bytes:
    """Return `score_matrix_figure` as a PNG file, 15 times as fast: the empty matrix of the same tasks is cached."""
    frame, corners, dpi = _empty_score_matrix(tuple(tasks[: len(scores)]))
    picture = frame.copy()
    draw, font = ImageDraw.Draw(picture), _font(_SCORE_SIZE * dpi / 72)
    formatted, percent = decimals(1), _lower_triangle(len(scores), scores)
    fills = colormaps[_SCORE_COLORS](percent / 100, bytes=True)[..., :3].tolist()
    for (i, j), value in np.ndenumerate(percent):
        if not np.isnan(value):
            (left, top), (right, bottom) = corners[j, i], corners[j + 1, i + 1]
            ink = "white" if value > _DARK else INK
            line = 1.5 * dpi / 144  # half of the line between two cells
            draw.rectangle((left + line, top + line, right - line, bottom - line), fill=tuple(fills[i][j]))
            draw.text(((left + right) / 2, (top + bottom) / 2), formatted(value), fill=ink, font=font, anchor="mm")
    content = BytesIO()
    picture.save(content, format="png", compress_level=1)
    return content.getvalue()


@lru_cache(maxsize=16)  # up to 3 MB each; trials may stop after any task, or learn them in another order
def _empty_score_matrix(tasks: tuple[str, ...]) -> tuple[Image.Image, npt.NDArray[np.float64], float]:
    """Draw a score matrix without scores; also return its dpi, and the corners of its cells by column and row.

    Corners are (n + 1, n + 1, 2) pixels from the upper left.
    """
    figure = score_matrix_figure(tasks, [[None] * (i + 1) for i in range(len(tasks))])
    figure.set_dpi(QUICK_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    frame = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    lines = np.arange(len(tasks) + 1) - 0.5
    grid = np.stack(np.meshgrid(lines, lines, indexing="ij"), axis=-1)
    corners = figure.axes[0].transData.transform(grid.reshape(-1, 2)).reshape(grid.shape)
    corners[..., 1] = frame.height - corners[..., 1]
    return frame, corners, figure.dpi


@lru_cache(maxsize=4)
def _font(pixels: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont("DejaVu Sans"), pixels)


def _lower_triangle(n: int, scores: Sequence[Sequence[float | None]]) -> npt.NDArray[np.float64]:
    percent = np.full((n, n), np.nan)
    for i, row in enumerate(scores):
        for j, score in enumerate(row[: i + 1]):
            percent[i, j] = np.nan if score is None else 100 * score
    return percent


def shortened(name: str, longest: int = _LONGEST_TASK_NAME) -> str:
    return plain(name if len(name) <= longest else name[: longest - 1] + "…")
