"""Pictures of interference: which tasks' snapshots overlap, and how far that is from what the paper's bound allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from latent_sweep.report.figures import Picture
from latent_sweep.report.style import (
    FAINT,
    GRAYS,
    INK,
    NORMAL,
    PAGE,
    SMALL,
    heat_map,
    matrix_height,
    new_figure,
    norm_of,
    numbered,
    plain,
    positions,
    short_number,
    tidy,
)
from latent_sweep.results.interference import Array, Interference, interference
from latent_sweep.storage.folders import SweepFolder

_MOST_MODES = 4
_SIDE_BY_SIDE = 6
"""Tasks up to which two matrices stand beside each other on a page."""


def interference_pictures(sweep: SweepFolder) -> tuple[list[Picture], list[str]]:
    """Draw how a sweep's snapshots overlap; nothing where no such trial has finished.

    Returns:
        The pictures, and which trials could not be measured, and why.
    """
    found, unread = interference(sweep)
    gaps = [f"interference of {gap}" for gap in unread]
    pictures = [overlap_picture(one, i) for i, one in enumerate(found, start=1)]
    if bounded := [one for one in found if one.bounds is not None]:
        pictures.append(bounds_picture(bounded))
    return pictures, gaps


def overlap_picture(found: Interference, number: int) -> Picture:
    """Draw the overlap of every pair of tasks, as the penalty measures it and between 0 and 1."""
    pairs = found.shares[np.tril_indices(len(found.shares), -1)]
    caption = (
        f"Trial {found.trial.name}. Overlap of the snapshots of every two tasks: {found.measure}, and that measure's "
        "root divided by the norms, so that 0 is nothing in common and 1 the most there can be. Mean over pairs "
        f"{np.nanmean(pairs) if np.isfinite(pairs).any() else np.nan:.3f}; matrices with independent entries have "
        f"{found.chance:.3f}. Numbers are places in the order of learning."
    )
    figure = overlap_figure(found.trial.tasks, found.overlaps, found.shares)
    return Picture(f"interference_{number}", f"Overlap of snapshots: {found.trial.name}", caption, figure)


def overlap_figure(tasks: Sequence[str], overlaps: Array, shares: Array) -> Figure:
    """Draw both matrices below their diagonals: one above the other where there are many tasks."""
    beside, height = len(tasks) <= _SIDE_BY_SIDE, matrix_height(len(tasks) - 1)
    figure = new_figure(PAGE, height if beside else 2 * height)
    panels = figure.subplots(1, 2, width_ratios=(1, 1)) if beside else figure.subplots(2, 1)
    below = np.tril(np.ones_like(overlaps), -1) > 0
    raw, share = (np.where(below, values, np.nan)[1:, :-1] for values in (overlaps, shares))
    power = int(np.floor(np.log10(np.nanmax(raw)))) if np.nanmax(raw) > 0 else 0
    raw = raw / 10.0**power
    unit = f"overlap (in 1e{power})" if power else "overlap"
    names, columns = numbered(tasks)[1:], positions(len(tasks))
    heat_map(panels[0], names, columns[:-1], raw, short_number, norm_of(raw), unit)
    names = columns[1:] if beside else names
    heat_map(panels[1], names, columns[:-1], share, "{:.2f}".format, Normalize(0, 1), "overlap, from 0 to 1")
    return figure


def bounds_picture(found: Sequence[Interference]) -> Picture:
    """Draw the paper's bound beside what interference can be and mostly is, for each trial."""
    bounded = [one.bounds for one in found if one.bounds is not None and one.bounds.bound.any()]
    known = [bounds.largest.mean() / bounds.bound.mean() for bounds in bounded]
    reached = f" The largest is {min(known):.0%} to {max(known):.0%} of the bound." if known else ""
    names = "; ".join(one.trial.name for one in found)
    caption = (
        "Interference of two tasks' adapters on one input, |delta_i' delta_j|, for ||psi|| = 1 and as the mean over "
        "projections; boxes over all pairs of tasks (quartiles, whiskers to the extremes). Bound: the paper's "
        "proposition, s^2 ||R~_i' R~_j||_2. Largest: what the worst direction psi reaches. Typical: root mean square "
        "over all directions alike; hidden states of real rows are not stored, and may prefer some directions."
        f"{reached} FM is the forgetting that was observed, by how the same snapshots were mixed (`router.combine`). "
        f"Trials: {names}."
    )
    return Picture("interference_bound", "Interference: bound, worst and typical", caption, bounds_figure(found))


def bounds_figure(found: Sequence[Interference]) -> Figure:
    """Draw three boxes over pairs of tasks for each trial, on a logarithmic scale."""
    figure = new_figure(PAGE, 2.3 + 0.13 * max(len(one.forgetting) for one in found))
    axes = figure.add_subplot()
    labels, every = [], []
    for place, one in enumerate(found):
        if one.bounds is None:
            continue
        for offset, shade, values in zip(
            (-0.26, 0, 0.26), GRAYS, (one.bounds.bound, one.bounds.largest, one.bounds.typical), strict=True
        ):
            every.append(values)
            low, first, middle, third, high = np.percentile(values, (0, 25, 50, 75, 100))
            stats = [dict(whislo=low, q1=first, med=middle, q3=third, whishi=high, fliers=[])]
            median = "white" if shade == GRAYS[-1] else "black"
            axes.bxp(
                stats,
                positions=[place + offset],
                widths=0.2,
                showfliers=False,
                patch_artist=True,
                boxprops=dict(facecolor=shade, edgecolor=INK, linewidth=0.8),
                medianprops=dict(color=median, linewidth=1.4),
            )
        lines = [] if one.penalty is None else [f"λ = {one.penalty:g}"]
        lines += [f"FM {mode} {100 * value:.2f} %" for mode, value in list(one.forgetting.items())[:_MOST_MODES]]
        labels.append("\n".join(lines))
    axes.set_xticks(range(len(labels)), [plain(label) for label in labels])
    axes.set_xlim(-0.6, len(labels) - 0.4)
    if (np.concatenate(every) > 0).all():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")  # an exponent would be smaller than other text
        axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("interference at ‖ψ‖ = 1")
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    tidy(axes)
    axes.tick_params(axis="x", length=0, labelsize=NORMAL)
    handles = [
        Patch(facecolor=shade, edgecolor=INK, label=name)
        for shade, name in zip(GRAYS, ("bound", "largest", "typical"), strict=True)
    ]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=SMALL)
    return figure
