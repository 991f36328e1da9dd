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
_SEED = 0
_FEWEST = 4


def embedding_map(sweep: SweepFolder, folder: TrialFolder) -> list[Picture] | str:
    """Draw the pooled embeddings of a trial's test examples by t-SNE; or return why that is impossible."""
    trial = finished_trial(sweep, folder)
    if trial is None:
        return f"{folder.trial_id}: it has not finished, or its journal cannot be read"
    try:
        router = StoredRouter(trial)
        embeddings = [spread(router.embeddings(task, "test"), MOST_ROWS) for task in range(len(trial.tasks))]
    except UNREADABLE as error:
        return f"{trial.name}: {reason(error)}"
    if sum(map(len, embeddings)) < _FEWEST:
        return f"{trial.name}: it has fewer than {_FEWEST} test examples"
    points = layout(embeddings)
    counts = sorted({len(of_task) for of_task in embeddings})
    count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    caption = (
        f"Trial {trial.name}. Pooled embeddings of {count} test examples of each task, as the router reads them from "
        "the frozen embedding table, laid out by t-SNE (seed 0). Neighborhoods are meaningful; distances between "
        "groups and their sizes are not. A number marks the median of its task."
    )
    title = f"Pooled embeddings: {trial.name}"
    return [Picture("embedding_map", title, caption, embedding_figure(trial.tasks, points))]


def layout(embeddings: Sequence[npt.NDArray[np.floating]]) -> list[Array]:
    """Lay embeddings (n, d) of each task out in a plane by t-SNE, reproducibly; (n, 2) of each task."""
    from sklearn.manifold import TSNE  # takes a second to import
    from threadpoolctl import threadpool_limits

    stacked = np.concatenate(list(embeddings)).astype(np.float64)
    perplexity = min(30.0, (len(stacked) - 1) / 3)
    initial = "pca" if min(stacked.shape) >= 2 else "random"
    with threadpool_limits(1):  # on a busy machine more threads mostly wait for each other
        points = TSNE(perplexity=perplexity, init=initial, random_state=_SEED, n_jobs=1).fit_transform(stacked)
    ends = np.cumsum([len(of_task) for of_task in embeddings])[:-1]
    return [part.astype(np.float64) for part in np.split(points, ends)]


def embedding_figure(tasks: Sequence[str], points: Sequence[Array]) -> Figure:
    """Draw the points (n, 2) of each task in a color and marker of its own, with the task's number."""
    figure = new_figure(PAGE, max(3.6, 0.7 + 0.2 * len(tasks)))
    axes = figure.add_subplot()
    names = [f"{i}  {plain(name)}" for i, name in enumerate(short_task_names(tasks), start=1)]
    for i, (name, of_task) in enumerate(zip(names, points, strict=True)):
        marker = (*MARKERS, "<")[i % (len(MARKERS) + 1)]  # 7 colors and 8 markers: 56 different pairs
        drawn = axes.scatter(of_task[:, 0], of_task[:, 1], s=9, color=COLORS[i % len(COLORS)], marker=marker)
        drawn.set(label=name, linewidths=0.3, edgecolors="white")
    for i, of_task in enumerate(points, start=1):
        box = dict(boxstyle="round,pad=0.15", facecolor="white", edgecolor=INK, linewidth=0.5, alpha=0.85)
        x, y = np.median(of_task, axis=0)
        axes.text(x, y, str(i), ha="center", va="center", fontsize=SMALL, bbox=box)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#bbbbbb")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=SMALL, markerscale=1.6)
    return figure
