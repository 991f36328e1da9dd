"""The benchmark's rows, targets and report: medians over turns, with quartiles."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

Contender = TypeVar("Contender", bound=Hashable)


@dataclass(frozen=True)
class Target:
    """An upper or lower limit for a value."""

    limit: float
    at_most: bool = True

    def reached_by(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


@dataclass(frozen=True)
class Reading:
    """One row of a table."""

    name: str
    value: float
    unit: str
    """`x` for a ratio, `share` for a fraction."""
    quartiles: tuple[float, float] | None = None
    target: Target | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, turns: Sequence[float], unit: str, target: Target | None = None, note: str = "") -> Reading:
        if len(turns) == 1:
            return cls(name, turns[0], unit, None, target, note)
        low, median, high = statistics.quantiles(turns, n=4, method="inclusive")
        return cls(name, median, unit, (low, high), target, note)

    @property
    def reached(self) -> bool | None:
        return None if self.target is None else self.target.reached_by(self.value)

    def content(self) -> dict[str, Any]:
        target = None if self.target is None else str(self.target)
        return asdict(self) | {"target": target, "reached": self.reached}


def ratio(
    name: str, numerator: Sequence[float], denominator: Sequence[float], target: Target | None = None, note: str = ""
) -> Reading:
    return Reading.of(name, [a / b for a, b in zip(numerator, denominator, strict=True)], "x", target, note)


def take_turns(contenders: Mapping[Contender, Callable[[], float]], turns: int) -> dict[Contender, list[float]]:
    """Measure contenders alternately (A B C, C B A, ...), so that a drift of the machine favors none."""
    values: dict[Contender, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        order = list(contenders.items())
        for name, measure in order if turn % 2 == 0 else reversed(order):
            values[name].append(measure())
    return values


# --- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The rows of one part with one dtype."""

    part: str
    dtype: str
    what: str
    rows: Sequence[Reading]
    failure: str = ""
    """The error that ended the part."""


@dataclass(frozen=True)
class Report:
    """All tables, and what they were measured on."""

    backbone: str
    device: str
    benchmark: str
    benchmark_note: str
    """Why it is not SuperNI."""
    measured_at: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    tables: Sequence[Table]
    quick: bool = False
    """Whether sizes were tiny, so that the numbers mean nothing."""

    def text(self) -> str:
        machine = " ".join(f"{name} {value}" for name, value in self.hardware.items() if value is not None)
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"{self.backbone} on {self.device}, {self.benchmark} rows, {self.measured_at}",
            *(["quick: the numbers mean nothing"] * self.quick),
            *([self.benchmark_note] if self.benchmark_note else []),
            machine,
            versions,
        ]
        for table in self.tables:
            lines += ["", f"{table.part} ({table.dtype}): {table.what}"]
            lines += [line_of(row) for row in table.rows]
            lines += [f"  FAILED: {table.failure}"] * bool(table.failure)
        return "\n".join(lines)

    def json(self) -> str:
        tables = [asdict(table) | {"rows": [row.content() for row in table.rows]} for table in self.tables]
        return json.dumps(asdict(self) | {"tables": tables}, indent=1)


def line_of(row: Reading) -> str:
    spread = "" if row.quartiles is None else f"[{_number(row.quartiles[0])}, {_number(row.quartiles[1])}]"
    target = "" if row.target is None else f"{row.target}  {'reached' if row.reached else 'NOT reached'}"
    return f"  {row.name:<48} {_number(row.value):>9} {row.unit:<14} {spread:<20} {target}  {row.note}".rstrip()


def _number(value: float) -> str:
    """Format with three significant digits, or as an integer from 100."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
