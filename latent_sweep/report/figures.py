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
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

from latent_sweep.report.style import (
    COLOR_MAP,
    GRID_WIDTH,
    INK,
    color_bar,
    decimals,
    heat_map,
    is_dark,
    new_figure,
    plain,
)

_LONGEST_TASK_NAME = 30
QUICK_DPI = 100
_SCORE_SIZE = 8


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
    figure = new_figure(3.6 + 0.52 * n, 2.6 + 0.46 * n)
    axes, names = figure.add_subplot(), [shortened(task) for task in tasks[:n]]
    percent = _lower_triangle(n, scores)
    image = heat_map(axes, names, names, percent, decimals(1), Normalize(0, 100), size=_SCORE_SIZE)
    color_bar([axes], image, "score (%)")
    axes.set_xticks(range(n), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set(xlabel="scored on", ylabel="after learning")
    axes.tick_params(labelsize=9)
    return figure


def score_matrix_png(tasks: Sequence[str], scores: Sequence[Sequence[float | None]]) -> bytes:
    """Return `score_matrix_figure` as a PNG file, 15 times as fast: the empty matrix of the same tasks is cached."""
    frame, corners, dpi = _empty_score_matrix(tuple(tasks[: len(scores)]))
    picture = frame.copy()
    draw, font = ImageDraw.Draw(picture), _font(_SCORE_SIZE * dpi / 72)
    formatted, percent = decimals(1), _lower_triangle(len(scores), scores)
    colors = colormaps[COLOR_MAP](percent / 100)
    fills, dark = (255.5 * colors[..., :3]).astype(int).tolist(), is_dark(colors)
    for (i, j), value in np.ndenumerate(percent):
        if not np.isnan(value):
            (left, top), (right, bottom) = corners[j, i], corners[j + 1, i + 1]
            ink = "white" if dark[i, j] else INK
            line = GRID_WIDTH * dpi / 144  # half of the line between two cells
            draw.rectangle((left + line, top + line, right - line, bottom - line), fill=tuple(fills[i][j]))
            draw.text(((left + right) / 2, (top + bottom) / 2), formatted(value), fill=ink, font=font, anchor="mm")
    content = BytesIO()
    picture.save(content, format="png", compress_level=1)
    return content.getvalue()


@lru_cache(maxsize=16)  # up to 3 MB each; trials may stop after any task, or learn them in another order
def _empty_score_matrix(tasks: tuple[str, ...]) -> tuple[Image.Image, npt.NDArray[np.float64], float]:
    """Draw a score matrix without scores; also return its cells' corners, (n + 1, n + 1, 2) pixels, and dpi."""
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
