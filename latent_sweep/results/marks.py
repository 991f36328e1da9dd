"""Marks: what a trial gets beyond a task's own rows and its prompts."""

from __future__ import annotations

from typing import NamedTuple

from latent_sweep.errors import LatentSweepError
from latent_sweep.methods import METHODS, checked, method_class
from latent_sweep.methods.protocol import Method
from latent_sweep.storage.folders import TrialFolder

_WORDS = {"real": "earlier rows", "generated": "generated rows", "all": "all rows"}
UNKNOWN = "unknown"


class Marks(NamedTuple):
    """What tables say about a trial's information."""

    earlier_rows: str | None
    """As `EarlierRows`; None if it is not known."""
    knows_task: bool

    def __str__(self) -> str:
        rows = UNKNOWN if self.earlier_rows is None else _WORDS.get(self.earlier_rows)
        return ", ".join(filter(None, (rows, "task" if self.knows_task else None))) or "-"


def marks_of(trial: TrialFolder) -> Marks:
    """Return a trial's marks; a sweep that did not record them may know a plugin's no more."""
    return Marks(trial.earlier_rows or _derived(trial), trial.params.get("router.combine") == "oracle")


def answers_alone(trial: TrialFolder) -> bool:
    """Return whether each task, when new, is answered by training on its own rows alone; False for a plugin."""
    method, n = _method(trial), trial.n_tasks
    if method is None or trial.params.get("router.combine") not in ("oracle", "last"):
        return False
    alone = all(tuple(method.learns_from(p, n)) == (p,) and not method.reads_history(p) for p in range(n))
    return alone and method.earlier_rows() == "none"


def _derived(trial: TrialFolder) -> str | None:
    method = _method(trial)
    return None if method is None else checked.earlier_rows(method, trial.n_tasks)


def _method(trial: TrialFolder) -> Method | None:
    """Return a built-in method with a trial's settings, for planning; None for a plugin and unknown settings."""
    name = str(trial.params.get("method.name"))
    if name not in METHODS:
        return None
    kind = method_class(name)
    fields = kind.settings_class.model_fields
    try:
        known = {name: value for name, value in trial.settings["method"].items() if name in fields}
        return kind(kind.settings_class.model_validate(known))
    except (LatentSweepError, ValueError, LookupError):
        return None
