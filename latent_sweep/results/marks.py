"""Marks: what a trial gets beyond a task's own rows and its prompts."""

from __future__ import annotations

from typing import NamedTuple

from latent_sweep.errors import LatentSweepError
from latent_sweep.methods import METHODS, checked, method_class
from latent_sweep.storage.folders import TrialFolder

_WORDS = {"real": "earlier rows", "generated": "generated rows", "all": "all rows"}
UNKNOWN = "unknown"


class Marks(NamedTuple):
    """What tables say about a trial's information."""

    earlier_rows: str | None
    """As `EarlierRows`; None if it is not known."""
    knows_task: bool
    """Whether it is told the task of every test example."""

    def __str__(self) -> str:
        """Return the cell of a table: `-` if it gets nothing."""
        rows = UNKNOWN if self.earlier_rows is None else _WORDS.get(self.earlier_rows)
        return ", ".join(filter(None, (rows, "task" if self.knows_task else None))) or "-"


def marks_of(trial: TrialFolder) -> Marks:
    """Return a trial's marks; a sweep that did not record them may know a plugin's no more."""
    return Marks(trial.earlier_rows or _derived(trial), trial.params.get("router.combine") == "oracle")


def _derived(trial: TrialFolder) -> str | None:
    name = str(trial.params.get("method.name"))
    if name not in METHODS:  # a plugin's code is not run to read results
        return None
    kind = method_class(name)
    try:
        known = {
            name: value for name, value in trial.settings["method"].items() if name in kind.settings_class.model_fields
        }
        settings = kind.settings_class.model_validate(known)
        return checked.earlier_rows(kind(settings), trial.n_tasks)
    except (LatentSweepError, ValueError, LookupError):
        return None
