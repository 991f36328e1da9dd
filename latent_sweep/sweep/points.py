"""The points of a search: a grid, random draws, or stand-ins for what a searcher will choose."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from latent_sweep.settings import flatten
from latent_sweep.sweep.axes import Draw
from latent_sweep.sweep.config import Sweep

MOST_CORNERS = 500


def count_points(sweep: Sweep) -> int:
    return len(points(sweep))


def points(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the points of the search space, by dotted path; random ones stand in for a searcher's."""
    source = random.Random(sweep.run.search.seed)
    if not sweep.drawn:
        return points_at(sweep, {})
    draws = (
        {axis: _draw(draw, source) for axis, draw in sweep.drawn.items()} for _ in range(sweep.run.search.num_samples)
    )
    return list(itertools.chain.from_iterable(points_at(sweep, values) for values in draws))


def points_at(sweep: Sweep, drawn: Mapping[str, Any]) -> list[dict[str, Any]]:
    return combinations({**sweep.crossed, **{axis: (value,) for axis, value in drawn.items()}})


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the values of these axes, each by dotted path."""
    return [
        {path: leaf for axis, value in zip(axes, values, strict=True) for path, leaf in flatten(axis, value).items()}
        for values in itertools.product(*axes.values())
    ]


def corners(sweep: Sweep) -> list[dict[str, Any]]:
    """Return points that try the extremes of a searcher's axes: all combinations or, if they are many, each value."""
    extremes = {axis: draw.extremes for axis, draw in sweep.drawn.items()}
    if math.prod(map(len, extremes.values())) <= MOST_CORNERS:
        drawn = [dict(zip(extremes, values, strict=True)) for values in itertools.product(*extremes.values())]
    else:
        first = {axis: values[0] for axis, values in extremes.items()}
        drawn = [first | {axis: value} for axis, values in extremes.items() for value in values]
    return list(itertools.chain.from_iterable(points_at(sweep, values) for values in drawn))


def _draw(draw: Draw, source: random.Random) -> Any:
    values = draw.values
    if draw.kind == "choice":
        return source.choice(values)
    if draw.kind == "randint":
        return source.randint(values[0], values[1])
    if draw.kind == "loguniform":
        return math.exp(source.uniform(math.log(values[0]), math.log(values[1])))
    return draw.snapped(source.uniform(values[0], values[1]))
