"""The paper's numbers for configurations that are cells of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from latent_sweep.settings import parse_yaml

TASKS = 15
"""Number of tasks of every stream in the paper."""

NONZERO = "nonzero"


@dataclass(frozen=True)
class Published:
    """A cell of the paper's tables; scores are fractions, means of three seeds."""

    table: int
    average_performance: float
    forgetting: float
    protocol: Mapping[str, Any]
    """Training settings, by dotted path."""


def find_published(settings: Mapping[str, Any], n_tasks: int) -> Published | None:
    """Return the paper's numbers for a configuration's common settings by path; None if it is not in the paper."""
    order, tables = str(settings.get("benchmark.order")), content()
    streams = {str(number): name for number, name in tables["benchmarks"].items()}
    if n_tasks != TASKS or settings.get("benchmark.name") != streams.get(order):
        return None
    for row in tables["rows"]:
        named = (row["method"], row["backbone"]) == (settings.get("method.name"), settings.get("backbone.name"))
        numbers = {str(number): scores for number, scores in row["orders"].items()}.get(order)
        wanted = tables["of_all"] | row.get("settings", tables["settings"])
        if named and numbers and all(_is_one_of(settings.get(path), values) for path, values in wanted.items()):
            return Published(row["table"], numbers[0] / 100, numbers[1] / 100, tables["protocol"][row["backbone"]])
    return None


@cache
def content() -> Mapping[str, Any]:
    text = resources.files("latent_sweep.results").joinpath("published.yaml").read_text(encoding="utf-8")
    tables: Mapping[str, Any] = parse_yaml(text, "published.yaml")
    return tables


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    return value in values or (NONZERO in values and type(value) in (int, float) and value != 0)
