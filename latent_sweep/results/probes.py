"""Probes of general ability of finished trials, and their changes from the untouched backbone with intervals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from latent_sweep.metrics.probes import LOSS, SHARE, ProbeResult, results_of
from latent_sweep.results.comparison import Difference, paired_difference
from latent_sweep.results.outcomes import Outcome
from latent_sweep.results.trial import TrialResults
from latent_sweep.storage.trial_files import RowScores, probe_contents


@dataclass(frozen=True)
class ProbeSummary:
    """A measure of a probe over the finished trials of a configuration."""

    measure: str
    untouched: float
    values: tuple[float, ...]
    change: Difference

    @property
    def unit(self) -> str:
        """Its unit in tables: nats per token, percent, or none for a metric of lm-evaluation-harness."""
        return {LOSS: "nats", SHARE: "%"}.get(self.measure, "")


def probe_lines(trial: TrialResults) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each probe of a trial, by its name; without files that do not match the journal."""
    contents = probe_contents(trial.folder.path, trial.events)
    return {name: [json.loads(line) for line in content.splitlines()] for name, content in contents.items()}


def probe_results(trial: TrialResults) -> list[ProbeResult]:
    return [result for name, lines in probe_lines(trial).items() for result in results_of(name, lines)]


def at_both_ends(results: Iterable[ProbeResult]) -> dict[str, tuple[ProbeResult, ProbeResult]]:
    """Return by probe the results of the untouched backbone and after the last task."""
    by_name: dict[str, list[ProbeResult]] = {}
    for result in results:
        by_name.setdefault(result.name, []).append(result)
    ordered = {name: sorted(own, key=lambda result: result.tasks_seen) for name, own in by_name.items()}
    return {name: (own[0], own[-1]) for name, own in ordered.items() if own[0].tasks_seen == 0 < own[-1].tasks_seen}


def summarize_probes(trials: Sequence[dict[str, tuple[ProbeResult, ProbeResult]]]) -> dict[str, ProbeSummary]:
    summaries = {}
    for name in dict.fromkeys(name for trial in trials for name in trial):
        own = [trial[name] for trial in trials if name in trial]
        change = paired_difference([(_outcome(last), _outcome(first)) for first, last in own])
        untouched = sum(first.value for first, _ in own) / len(own)
        summaries[name] = ProbeSummary(own[0][0].measure, untouched, tuple(last.value for _, last in own), change)
    return summaries


def _outcome(result: ProbeResult) -> Outcome:
    if result.rows is None:
        return Outcome(result.value, None)
    return Outcome(result.value, {result.name: RowScores(tuple(map(str, range(len(result.rows)))), result.rows)})
