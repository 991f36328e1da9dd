"""The trials that pictures show for a sweep, and short names for their tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from latent_sweep.errors import LatentSweepError
from latent_sweep.results.trial import TrialResults
from latent_sweep.storage.folders import SweepFolder, TrialFolder

MOST_DRAWN = 3

_LONGEST_TASK_NAME = 24
UNREADABLE = (LatentSweepError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def reason(error: BaseException) -> str:
    if isinstance(error, (LatentSweepError, OSError)):
        return str(error)
    return f"its files have an unexpected content ({type(error).__name__}: {error})"


def finished_trials(sweep: SweepFolder) -> list[TrialResults]:
    try:
        folders = list(sweep)
    except UNREADABLE:
        return []
    return [trial for folder in folders if (trial := finished_trial(sweep, folder)) is not None]


def finished_trial(sweep: SweepFolder, folder: TrialFolder) -> TrialResults | None:
    """Return a trial; None if it has not finished or cannot be read."""
    trial = TrialResults(sweep, folder)
    try:
        return trial if trial.is_finished else None
    except UNREADABLE:
        return None


def first_of_each(
    trials: Sequence[TrialResults],
    key: Callable[[TrialResults], str] = lambda trial: trial.configuration,
    most: int = MOST_DRAWN,
) -> list[TrialResults]:
    """Return the first trial of each of the first `most` configurations, which `key` identifies."""
    first: dict[str, TrialResults] = {}
    for trial in trials:
        first.setdefault(key(trial), trial)
    return list(first.values())[:most]


def short_task_names(tasks: Sequence[str], longest: int = _LONGEST_TASK_NAME) -> list[str]:
    """Shorten names in the middle, keeping them different."""
    tail = longest // 3
    short = [t if len(t) <= longest else f"{t[: longest - tail - 1]}…{t[-tail:]}" for t in tasks]
    return [f"{name} ({i + 1})" if short.count(name) > 1 else name for i, name in enumerate(short)]
