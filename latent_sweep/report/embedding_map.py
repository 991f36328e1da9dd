"""A map of the pooled embeddings that the router reads: figure 3 of the paper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from latent_sweep.report.figures import Picture
from latent_sweep.report.style import COLORS, INK, MARKERS, PAGE, SMALL, new_figure, plain
from latent_sweep.results.routing import StoredRouter
from latent_sweep.results.selection import UNREADABLE, finished_trial, reason, short_task_names
from latent_sweep.routing.gaussian import spread
from latent_sweep.storage.folders import SweepFolder, TrialFolder

Array = npt.NDArray[np.float64]

MOST_ROWS = 200
"""Rows of a task that are drawn, evenly spaced over its test rows."""
_SEED = 0
_FEWEST = 4
"""Points below which there is nothing to lay out."""


def embedding_map(sweep: SweepFolder, trial: TrialFolder) -> list[Picture] | str:
    """Lay the pooled embeddings of a trial's test rows out in a plane, by t-SNE.

    They are what the trial's router has read, pooled and scaled alike, from the store; no backbone is needed. It takes
    seconds to a minute, so that nobody should ask for it unasked.

    Returns:
        One picture, or the reason why there is none.
    """
    found = finished_trial(sweep, trial)
    if found is None:
        return f"{trial.trial_id}: it has not finished, or its journal cannot be read"
    stored = StoredRouter(sweep, found)
    rows = []
    try:
        for position in range(len(found.tasks)):
            rows.append(spread(stored.embeddings(position, "test"), MOST_ROWS))
    except UNREADABLE as error:
        return f"{found.name}: {reason(error)}"
    if sum(map(len, rows)) < _FEWEST:
        return f"{found.name}: it has fewer than {_FEWEST} test rows"
    places = layout(rows)
    counts = sorted({len(of_task) for of_task in rows})
    of_each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    caption = (
        f"Trial {found.name}. Pooled embeddings of {of_each} test rows of each task, as the router reads them from the "
        "frozen embedding table, laid out by t-SNE (seed 0): who is near whom means something, distances between "
        "groups and their sizes do not. A number stands at the median of its task."
    )
    picture = Picture(
        "embedding_map", f"Pooled embeddings: {found.name}", caption, embedding_figure(found.tasks, places)
    )
    return [picture]


def layout(rows: Sequence[npt.NDArray[np.floating]]) -> list[Array]:
    """Place embeddings in a plane by t-SNE, which keeps neighbors together; the same rows give the same places.

    Args:
        rows: (n, d) of each task.

    Returns:
        (n, 2) of each task.
    """
    from sklearn.manifold import TSNE  # a second to import
    from threadpoolctl import threadpool_limits

    every = np.concatenate(list(rows)).astype(np.float64)
    perplexity = min(30.0, (len(every) - 1) / 3)
    initial = "pca" if min(every.shape) >= 2 else "random"
    with threadpool_limits(1):  # on a busy machine threads wait for each other longer than they compute
        places = TSNE(perplexity=perplexity, init=initial, random_state=_SEED, n_jobs=1).fit_transform(every)
    ends = np.cumsum([len(of_task) for of_task in rows])[:-1]
    return [part.astype(np.float64) for part in np.split(places, ends)]


def embedding_figure(tasks: Sequence[str], places: Sequence[Array]) -> Figure:
    """Draw the places (n, 2) of each task's rows, each task with a color and marker of its own and its number."""
    figure = new_figure(PAGE, max(3.6, 0.7 + 0.2 * len(tasks)))
    axes = figure.add_subplot()
    names = [f"{i}  {plain(name)}" for i, name in enumerate(short_task_names(tasks), start=1)]
    for i, (name, points) in enumerate(zip(names, places, strict=True)):
        # 7 colors and 8 markers: no two of 56 tasks have both in common
        marker = (*MARKERS, "<")[i % (len(MARKERS) + 1)]
        drawn = axes.scatter(points[:, 0], points[:, 1], s=9, color=COLORS[i % len(COLORS)], marker=marker)
        drawn.set(label=name, linewidths=0.3, edgecolors="white")
    for i, points in enumerate(places, start=1):
        box = dict(boxstyle="round,pad=0.15", facecolor="white", edgecolor=INK, linewidth=0.5, alpha=0.85)
        x, y = np.median(points, axis=0)
        axes.text(x, y, str(i), ha="center", va="center", fontsize=SMALL, bbox=box)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#bbbbbb")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=SMALL, markerscale=1.6)
    return figure
