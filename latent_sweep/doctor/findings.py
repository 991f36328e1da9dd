"""What a check has found, and how checks are kept apart: what goes wrong in one of them hides nothing of another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from latent_sweep.errors import LatentSweepError
from latent_sweep.security import printable

Mark = Literal["ok", "warning", "fault"]

Check = Callable[[], Iterable["Finding"]]
"""Looks at one thing; may yield findings one after another, and those before an error stay."""

WIDTH = max(map(len, ("ok", "warning", "fault")))


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    mark: Mark
    what: str
    """What was looked at, in a word or two."""
    found: str
    expected: str = ""
    """Empty where it need not be said, as nothing was expected in particular."""
    advice: str = ""
    """What to do about it; empty where nothing is wrong."""
    node: str = ""
    """Where, if that is another machine."""

    def text(self) -> str:
        """Return a line, and below it what to do."""
        where = f"{self.node}: " if self.node else ""
        expected = f"; expected {self.expected}" if self.expected else ""
        lines = [f"{self.mark:{WIDTH}}  {where}{self.what}: {self.found}{expected}"]
        lines += [f"-> {self.advice}"] * bool(self.advice)
        indent = "\n" + " " * (WIDTH + 4)
        return "  " + printable(indent.join(line for part in lines for line in part.splitlines()))

    def on(self, node: str) -> Finding:
        """Return the same, found on this node."""
        return replace(self, node=node)


def ok(what: str, found: str, expected: str = "") -> Finding:
    """Return the finding that all is as it should be."""
    return Finding("ok", what, found, expected)


def warning(what: str, found: str, expected: str = "", advice: str = "") -> Finding:
    """Return the finding that something may be wrong, or keeps some sweeps from running."""
    return Finding("warning", what, found, expected, advice)


def fault(what: str, found: str, expected: str = "", advice: str = "") -> Finding:
    """Return the finding that no sweep, or not this one, may be trusted to this machine."""
    return Finding("fault", what, found, expected, advice)


def examined(what: str, check: Check) -> list[Finding]:
    """Return what a check finds; an error that ends it is a finding of its own, after those that it has made."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except LatentSweepError as error:  # says what was found, what was expected and what to do
        found.append(fault(what, str(error)))
    except Exception as error:
        said = f"the check itself failed with {type(error).__name__}: {error}"
        found.append(
            fault(what, said, advice="what it was to find out is not known; if the message is no help, report it")
        )
    return found


def counted(findings: Sequence[Finding]) -> str:
    """Say in a line how many faults and warnings there are."""
    numbers = {mark: sum(finding.mark == mark for finding in findings) for mark in ("fault", "warning", "ok")}
    words = {"fault": "faults", "warning": "warnings", "ok": "ok"}
    return ", ".join(f"{count} {mark if count == 1 else words[mark]}" for mark, count in numbers.items())
