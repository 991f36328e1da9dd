"""Searchers and schedulers of Ray Tune as a user writes them."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher


class InTurn(Searcher):
    """Goes through the corners of a space again and again, and remembers the reports that it gets."""

    reports: ClassVar[list[tuple[dict[str, Any], float | None]]] = []  # of all instances

    def __init__(self, finish_after: int = 0, waits: bool = False):
        super().__init__()
        self.finish_after, self.waits, self.configs = finish_after, waits, {}

    def set_search_properties(self, metric: str, mode: str, config: dict[str, Any], **spec: Any) -> bool:
        self._metric, self._mode = metric, mode
        values = [getattr(domain, "categories", None) or [domain.lower, domain.upper] for domain in config.values()]
        self.turns = itertools.cycle(dict(zip(config, point, strict=True)) for point in itertools.product(*values))
        return True

    def suggest(self, trial_id: str) -> Any:
        if self.finish_after and len(self.configs) >= self.finish_after:
            return None if self.waits else Searcher.FINISHED
        self.configs[trial_id] = next(self.turns)
        return self.configs[trial_id]

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.reports.append((self.configs[trial_id], None if error else result[self.metric]))


class Spaceless(InTurn):
    """Takes no search space."""

    def set_search_properties(self, metric: str, mode: str, config: dict[str, Any], **spec: Any) -> bool:
        return False


class StopsAtOnce(FIFOScheduler):
    """Stops every trial at its first report."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Any) -> str:
        return FIFOScheduler.STOP


class Pauses(FIFOScheduler):
    """Pauses every trial at its first report."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: Any) -> str:
        return FIFOScheduler.PAUSE
