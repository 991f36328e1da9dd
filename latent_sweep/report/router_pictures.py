"""Pictures of the router: how sure it is of the right task, where it goes wrong, and whether it notices new tasks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from latent_sweep.report.figures import Picture
from latent_sweep.report.style import (
    COLORS,
    COLUMN,
    DASHES,
    FAINT,
    GRAYS,
    INK,
    MARKERS,
    PAGE,
    SMALL,
    heat_map,
    matrix_height,
    new_figure,
    numbered,
    plain,
    positions,
    tidy,
)
from latent_sweep.results.routing import (
    Array,
    Reliability,
    Routing,
    confusion,
    own_task,
    reliability,
    routed_apart,
    routings,
)
from latent_sweep.results.selection import MOST_DRAWN, finished_trials
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.journal import stages

NOVELTY = "router_novelty_auroc"


def router_pictures(sweep: SweepFolder) -> tuple[list[Picture], list[str]]:
    """Draw all pictures of a sweep's router; none where no trial with a router has finished.

    Returns:
        The pictures, and what could not be drawn of which trial, and why.
    """
    found, unread = routings(sweep)
    gaps = [f"the router of {gap}" for gap in unread]
    gaps += [f"the posterior of {one.gap}" for one in found if one.gap is not None and not one.has_posterior]
    with_posterior = [routing for routing in found if routing.has_posterior]
    pictures = [posterior_picture(routing, i) for i, routing in enumerate(with_posterior, start=1)]
    pictures += [confusion_picture(routing, i) for i, routing in enumerate(found, start=1)]
    if with_posterior:
        pictures.append(reliability_picture(with_posterior))
    if novelty := novelty_by_stage(sweep):
        pictures.append(novelty_picture(novelty))
    return pictures, gaps


# --- the posterior of the right task ---------------------------------------------------------------------------------


def posterior_picture(routing: Routing, number: int) -> Picture:
    """Box plots of p(correct task | x) over each task's test rows: figure 4 of the paper."""
    rows = own_task(routing.probabilities)
    caption = (
        f"{_which(routing)} Posterior of a row's own task over its test rows ({_count(routing.probabilities)}): box "
        "from the first to the third quartile with the median, whiskers to the farthest row within 1.5 boxes, circles "
        f"beyond; diamond and number: the mean. {_where_from(routing)}"
    )
    figure = posterior_figure(routing.trial.tasks, rows)
    return Picture(f"router_posterior_{number}", f"Posterior of the right task{_title(routing)}", caption, figure)


def posterior_figure(tasks: Sequence[str], rows: Sequence[Array]) -> Figure:
    """Draw a horizontal box for each task, the first at the top.

    Args:
        rows: posteriors of the right task, (rows,), by task.
    """
    figure = new_figure(PAGE, 0.75 + 0.21 * max(len(tasks), 3))
    axes = figure.add_subplot()
    places = np.arange(len(tasks))
    ink = dict(color=INK, linewidth=0.8)
    # by hand and not by `boxplot`: one of its arguments has changed its name between the supported versions
    axes.bxp(
        [_box(values) for values in rows],
        positions=places,
        widths=0.55,
        patch_artist=True,
        showmeans=True,
        **_HORIZONTAL,
        boxprops=dict(facecolor="#9ecae1", edgecolor=INK, linewidth=0.8),
        medianprops=dict(color="black", linewidth=1.6),
        whiskerprops=ink,
        capprops=ink,
        meanprops=dict(marker="D", markersize=3.5, markerfacecolor=COLORS[1], markeredgecolor=INK),
        flierprops=dict(marker="o", markersize=2, markerfacecolor="none", markeredgecolor="#777777"),
    )
    axes.set_yticks(places, numbered(tasks))
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("posterior of the row's own task")
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    tidy(axes)
    right = axes.secondary_yaxis("right")
    right.set_yticks(places, [f"{values.mean():.3f}" for values in rows])
    right.tick_params(length=0, labelsize=SMALL, labelcolor=INK)
    right.spines[:].set_visible(False)
    return figure


def _box(values: Array) -> dict[str, Any]:
    from matplotlib.cbook import boxplot_stats

    found: dict[str, Any] = boxplot_stats(values)[0]
    return found


def _horizontal() -> dict[str, Any]:
    import inspect

    known = inspect.signature(Axes.bxp).parameters
    return {"orientation": "horizontal"} if "orientation" in known else {"vert": False}


_HORIZONTAL = _horizontal()


# --- where rows go ---------------------------------------------------------------------------------------------------


def confusion_picture(routing: Routing, number: int) -> Picture:
    """Draw the share of each task's test rows that go to each task."""
    shares = confusion(routing.probabilities)
    caption = (
        f"{_which(routing)} Share in per cent of the test rows of the task at the left ({_count(routing.probabilities)}"
        ") that give the task above its largest weight; less than half a per cent is left blank. Numbers are places in "
        f"the order of learning. Rows that find their own task: {100 * shares.diagonal().mean():.1f} %, the mean over "
        "tasks."
    )
    figure = confusion_figure(routing.trial.tasks, shares)
    return Picture(f"router_confusion_{number}", f"Tasks that rows went to{_title(routing)}", caption, figure)


def confusion_figure(tasks: Sequence[str], shares: Array) -> Figure:
    """Draw the matrix (true, routed) of shares, in per cent."""
    figure = new_figure(PAGE if len(tasks) > 6 else 4.6, matrix_height(len(tasks)))
    axes = figure.add_subplot()
    percent = 100 * shares
    columns = positions(len(tasks))
    heat_map(axes, numbered(tasks), columns, percent, _whole_percent, Normalize(0, 100), "rows (%)")
    axes.set_xlabel("routed to")
    axes.set_ylabel("task of the row")
    return figure


def _whole_percent(value: float) -> str:
    return f"{value:.0f}" if value >= 0.5 else ""


# --- calibration -----------------------------------------------------------------------------------------------------


def reliability_picture(found: Sequence[Routing]) -> Picture:
    """Draw how often the router is right where it is so sure, a panel for each trial."""
    parts = [(routing.name, reliability(routing.probabilities)) for routing in found]
    where = " ".join(dict.fromkeys(map(_where_from, found)))
    caption = (
        "Share of rows routed to their own task (bars) and mean largest posterior (circles) in 15 bins of the largest "
        "posterior, over the test rows of all tasks after the last one; a calibrated router's bars reach the diagonal. "
        "Below: share of rows in each bin, on a logarithmic scale. ECE: the mean gap of bar and circle, weighted by "
        f"rows. {_which(*found)} {where}"
    )
    return Picture("router_reliability", "Calibration of the router", caption, reliability_figure(parts))


def reliability_figure(parts: Sequence[tuple[str, Reliability]]) -> Figure:
    """Draw bars of accuracy by confidence above the share of rows, side by side for each name."""
    figure = new_figure(max(COLUMN, PAGE * len(parts) / MOST_DRAWN), 3.1)
    panels = figure.subplots(2, len(parts), squeeze=False, sharex=True, height_ratios=(3, 1))
    for column, (name, found) in enumerate(parts):
        above, below = panels[0, column], panels[1, column]
        n_bins, filled = len(found.counts), found.counts > 0
        middles = (np.arange(n_bins) + 0.5) / n_bins
        bar = dict(width=0.92 / n_bins, edgecolor=INK, linewidth=0.6)
        above.bar(middles[filled], found.accuracy[filled], color="#9ecae1", **bar)
        above.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle="--")
        above.plot(middles[filled], found.confidence[filled], "o", markersize=3, color=COLORS[1])
        above.text(0.04, 0.94, f"ECE {100 * found.calibration_error:.1f} %", va="top", fontsize=SMALL)
        share = found.counts / found.counts.sum()
        below.bar(middles[filled], 100 * share[filled], color=GRAYS[1], **bar)
        below.set_yscale("log")
        below.set_ylim(min(1.0, 50 * share[filled].min()), 200)
        below.set_yticks([1, 10, 100], ["1", "10", "100"])
        below.minorticks_off()
        above.set(xlim=(0, 1), ylim=(0, 1.02), title=_in_lines(name))
        below.set_xlabel("largest posterior")
        if column == 0:
            above.set_ylabel("routed to own task")
            below.set_ylabel("rows (%)")
        for axes in (above, below):
            tidy(axes)
        above.title.set_fontsize(SMALL)
    return figure


# --- novelty ---------------------------------------------------------------------------------------------------------

Stages = dict[int, list[float]]
"""Values of finished repetitions by the number of tasks seen."""


def novelty_by_stage(sweep: SweepFolder) -> dict[str, Stages]:
    """AUROC with which the router's distance tells rows of unseen tasks from seen ones, by configuration and stage.

    Trials that differ only in what a router does not read have the same one, and count once.
    """
    found: dict[str, Stages] = {}
    for trial in routed_apart(sweep, finished_trials(sweep)):
        for event in stages(trial.events):
            if (auroc := event.metrics.get(NOVELTY)) is not None:
                values = found.setdefault(trial.configuration, {})
                values.setdefault(event.tasks_seen, []).append(auroc)
    return dict(list(found.items())[:MOST_DRAWN])


def novelty_picture(found: dict[str, Stages]) -> Picture:
    """Draw the AUROC at each stage that has tasks still to come."""
    repetitions = {len(values) for stages_of in found.values() for values in stages_of.values()}
    several = "line: mean, band: range over finished repetitions" if max(repetitions) > 1 else "one repetition"
    caption = (
        "Area under the ROC curve with which the distance of a test row to all that the router has seen tells rows of "
        "tasks not yet learned from rows of those that are: 1 is perfect, 0.5 is chance (dotted). After each task but "
        f"the last; {several}."
    )
    return Picture("router_novelty", "Does the router notice new tasks?", caption, novelty_figure(found))


def novelty_figure(found: dict[str, Stages]) -> Figure:
    """Draw a line for each configuration over the number of tasks seen."""
    figure = new_figure(PAGE if len(found) > 1 else COLUMN, 2.4)
    axes = figure.add_subplot()
    for i, (name, values) in enumerate(found.items()):
        seen = sorted(values)
        means = [statistics.fmean(values[stage]) for stage in seen]
        (line,) = axes.plot(seen, means, label=_in_lines(name), color=COLORS[i], linestyle=DASHES[i], linewidth=1.4)
        line.set(marker=MARKERS[i], markersize=4)
        low, high = ([of(values[stage]) for stage in seen] for of in (min, max))
        axes.fill_between(seen, low, high, color=COLORS[i], alpha=0.15, linewidth=0)
    axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=":")
    every = sorted({stage for values in found.values() for stage in values})
    axes.set_xticks(every)
    axes.set_ylim(min(0.45, *(min(v) - 0.05 for values in found.values() for v in values.values())), 1.02)
    axes.set_xlabel("tasks seen")
    axes.set_ylabel("AUROC, unseen tasks")
    axes.grid(color=FAINT, linewidth=0.6)
    tidy(axes)
    if len(found) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=SMALL)
    return figure


# --- words -----------------------------------------------------------------------------------------------------------


def _title(routing: Routing) -> str:
    return f": {routing.name}" if routing.name else ""


def _which(*found: Routing) -> str:
    names = ", ".join(routing.trial.name for routing in found)
    first = "the first finished repetition of each configuration" if len(found) > 1 else "the first finished repetition"
    return (
        f"Trial{'s' if len(found) > 1 else ''} {names} ({first}; trials that differ only in what the router does not "
        "read are routed alike), after the last task."
    )


def _count(probabilities: Sequence[Array]) -> str:
    least, most = min(map(len, probabilities)), max(map(len, probabilities))
    return f"{least:,} of each" if least == most else f"{least:,} to {most:,} of each"


def _where_from(routing: Routing) -> str:
    if routing.recomputed:
        return "Posteriors are computed again from the stored embeddings and router records; none is pruned."
    threshold = routing.settings.prune_below
    if not threshold:
        return "Posteriors are the weights that answered."
    return f"Posteriors are the weights that answered, where those below {threshold:g} were set to zero."


def _in_lines(name: str, width: int = 26) -> str:
    """Break a label between its settings where it would be too long for a panel."""
    lines: list[str] = []
    for word in name.split():
        word = word if len(word) <= width else word[: width - 1] + "…"
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return plain("\n".join(lines))
