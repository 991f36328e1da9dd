"""What a benchmark finds, as rows of a table: medians over turns, quartiles as spread, and the target beside each."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

Contender = TypeVar("Contender", bound=Hashable)


@dataclass(frozen=True)
class Target:
    """The limit that a value should keep to."""

    limit: float
    at_most: bool = True

    def reached_by(self, value: float) -> bool:
        """Whether the value is on the right side, the limit included."""
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


@dataclass(frozen=True)
class Reading:
    """One line of the table."""

    name: str
    value: float
    """Median over the turns."""
    unit: str
    """`x` for a ratio, `share` for a part of a whole."""
    quartiles: tuple[float, float] | None = None
    """Of the turns; None for what was measured once, or is a count."""
    target: Target | None = None
    note: str = ""

    @classmethod
    def of(cls, name: str, turns: Sequence[float], unit: str, target: Target | None = None, note: str = "") -> Reading:
        """The row of a value that was measured in several turns."""
        if len(turns) == 1:
            return cls(name, turns[0], unit, None, target, note)
        low, median, high = statistics.quantiles(turns, n=4, method="inclusive")
        return cls(name, median, unit, (low, high), target, note)

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.target.reached_by(self.value)

    def content(self) -> dict[str, Any]:
        """The row as JSON values."""
        target = None if self.target is None else str(self.target)
        return asdict(self) | {"target": target, "reached": self.reached}


def ratio(
    name: str, numerator: Sequence[float], denominator: Sequence[float], target: Target | None = None, note: str = ""
) -> Reading:
    """Divide numerator by denominator, turn by turn: how many times the second the first takes."""
    return Reading.of(name, [a / b for a, b in zip(numerator, denominator, strict=True)], "x", target, note)


def take_turns(contenders: Mapping[Contender, Callable[[], float]], turns: int) -> dict[Contender, list[float]]:
    """Measure each contender in turns: A B C, C B A, A B C, ..., so that a drift of the machine favours none."""
    found: dict[Contender, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        order = list(contenders.items())
        for name, measure in order if turn % 2 == 0 else reversed(order):
            found[name].append(measure())
    return found


# --- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The rows that one part found at one type."""

    part: str
    dtype: str
    what: str
    rows: Sequence[Reading]
    failure: str = ""
    """What ended the part before its end."""


@dataclass(frozen=True)
class Report:
    """Everything that was measured, and on what."""

    backbone: str
    device: str
    benchmark: str
    benchmark_note: str
    """Why it is not SuperNI, where it is not."""
    measured_at: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    tables: Sequence[Table]
    quick: bool = False
    """Whether little of everything was measured, which shows that it runs, and no more."""
    interrupted: bool = False
    """Whether the user ended it before its last part."""
    terminated: bool = False
    """Whether SIGTERM did that."""

    def text(self) -> str:
        """Write the report as a table for people."""
        machine = " ".join(f"{name} {value}" for name, value in self.hardware.items() if value is not None)
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"{self.backbone} on {self.device}, {self.benchmark} rows, {self.measured_at}",
            *(["quick: little of everything was measured, which shows that it runs, and no more"] * self.quick),
            *([self.benchmark_note] if self.benchmark_note else []),
            machine,
            versions,
        ]
        for table in self.tables:
            lines += ["", f"{table.part} ({table.dtype}): {table.what}"]
            lines += [line_of(row) for row in table.rows]
            lines += [f"  FAILED: {table.failure}"] * bool(table.failure)
        lines += ["", "interrupted: the parts behind these were not measured"] * self.interrupted
        return "\n".join(lines)

    def json(self) -> str:
        """Write the report as JSON for programs."""
        tables = [asdict(table) | {"rows": [row.content() for row in table.rows]} for table in self.tables]
        return json.dumps(asdict(self) | {"tables": tables}, indent=1)


def line_of(row: Reading) -> str:
    """Write a row as a line for people."""
    spread = "" if row.quartiles is None else f"[{_number(row.quartiles[0])}, {_number(row.quartiles[1])}]"
    target = "" if row.target is None else f"{row.target}  {'reached' if row.reached else 'NOT reached'}"
    return f"  {row.name:<48} {_number(row.value):>9} {row.unit:<14} {spread:<20} {target}  {row.note}".rstrip()


def _number(value: float) -> str:
    """Write three digits, or all that stand before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
