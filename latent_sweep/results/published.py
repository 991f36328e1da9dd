"""The paper's numbers, to stand beside those of a configuration that is the same cell of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from latent_sweep.settings import parse_yaml

TASKS = 15
"""Every cell of the paper is a stream of so many tasks."""

NONZERO = "nonzero"


@dataclass(frozen=True)
class Published:
    """One cell of a table: scores are fractions, means of three seeds."""

    table: int
    average_performance: float
    forgetting: float
    protocol: Mapping[str, Any]
    """Settings that it was trained with, by dotted path."""


def find_published(settings: Mapping[str, Any], n_tasks: int) -> Published | None:
    """Find the paper's numbers for a configuration; None where it has none.

    Args:
        settings: what all trials of the configuration have in common, by dotted path.
        n_tasks: how many tasks its stream has.
    """
    order, told = str(settings.get("benchmark.order")), content()
    streams = {str(number): name for number, name in told["benchmarks"].items()}
    own = n_tasks != TASKS or settings.get("benchmark.name") != streams.get(order)
    for row in () if own else told["rows"]:
        named = (row["method"], row["backbone"]) == (settings.get("method.name"), settings.get("backbone.name"))
        numbers = {str(number): found for number, found in row["orders"].items()}.get(order)
        wanted = told["of_all"] | row.get("settings", told["settings"])
        if named and numbers and all(_is_one_of(settings.get(path), values) for path, values in wanted.items()):
            return Published(row["table"], numbers[0] / 100, numbers[1] / 100, told["protocol"][row["backbone"]])
    return None


@cache
def content() -> Mapping[str, Any]:
    """Read the paper's tables, as `published.yaml` has them."""
    text = resources.files("latent_sweep.results").joinpath("published.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = parse_yaml(text, "published.yaml")
    return found


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    return value in values or (NONZERO in values and type(value) in (int, float) and value != 0)
