"""Probes of general ability: what a trial's snapshots, routed by a probe's prompt, do to texts of no task."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from latent_sweep.backbones.likelihood import Likelihood
from latent_sweep.data.probe_tokens import Columns, ProbeEncoder
from latent_sweep.data.probes import Probe, read_probes
from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import MethodSettings
from latent_sweep.metrics.probes import ProbeResult, probe_metrics, results_of
from latent_sweep.routing.combination import Array
from latent_sweep.storage.predictions import GENERATED
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.training.context import Context
from latent_sweep.training.evaluation import AnswerEnd, Evaluator
from latent_sweep.training.forward_transfer import Untouched
from latent_sweep.training.harness import harness_lines, load_tasks
from latent_sweep.training.journaling import Probed
from latent_sweep.training.run import ActiveRun, ActiveTrial
from latent_sweep.training.scoring import TaskScoring

LONGEST = 2048
"""Most tokens that a probe's row has on a backbone without a table of positions."""


def try_probes(context: Context) -> None:
    """Raise a LatentSweepError if a probe cannot be read here, before anything is learned."""
    for probe in read_probes(context.probes):
        if probe.kind == "lm_eval":
            load_tasks(probe)


class Prober:
    """Reads rows of no task with the snapshots of a trial's first tasks."""

    def __init__(self, run: ActiveRun, active: ActiveTrial):
        trial, context = active.trial, run.context
        self.trial, self.context, self._snapshots = trial, context, run.snapshots
        order = partial(context.order, "answer", run.training_id, trial.trial_id)
        cache = context.storage.folder / GENERATED
        self._own = context.evaluator(trial, run.method_of(trial), cache, order)
        untouched = Untouched(MethodSettings(name="untouched"))
        self._bare = replace(context.evaluator(trial, untouched, cache, order), method_source=None)
        self._combiner = TaskScoring(run, trial, self._own).combiner

    @cached_property
    def encoder(self) -> ProbeEncoder:
        backbone, traits = self.context.backbone, self.context.backbone.traits
        virtual = self.trial.method().virtual_tokens(len(self.trial.tasks))
        limit = int(min(backbone.positions - virtual, backbone.window, LONGEST))
        bos = self.trial.settings.benchmark.bos
        return ProbeEncoder(backbone.tokenizer, traits.protocol, bos, traits.encoder_decoder, limit)

    def likelihoods(self, tasks_seen: int, columns: Columns) -> tuple[list[Likelihood], Array]:
        """Return how likely the targets are, and the weights of the snapshots, (rows, tasks_seen)."""
        evaluator, history, weights = self._by(tasks_seen, columns)
        found = evaluator.likelihoods(history, weights, columns["prompt_ids"], columns["target_ids"])
        return found, weights

    def answers(self, tasks_seen: int, columns: Columns, end: AnswerEnd) -> list[str]:
        evaluator, history, weights = self._by(tasks_seen, columns)
        return evaluator.answers(history, weights, columns["prompt_ids"], end=end)[0]

    def _by(self, tasks_seen: int, columns: Columns) -> tuple[Evaluator, Sequence[Snapshot], Array]:
        weights = np.zeros((len(columns["prompt_ids"]), 0))
        if tasks_seen:
            weights = self._combiner.weights_for(tasks_seen, self._routed(columns))
        if not weights.any():
            return self._bare, [], weights[:, :0]
        return self._own, self._snapshots[:tasks_seen], weights

    def _routed(self, columns: Columns) -> Columns:
        first, last = self.encoder.first, self.encoder.last
        return {**columns, "prompt_ids": [[*first, *ids, *last] for ids in columns["input_ids"]]}


def measure_probes(run: ActiveRun, active: ActiveTrial) -> Probed:
    """Probe the untouched backbone and a trial's stages. Raises ConfigError if a probe cannot be read here."""
    began = time.monotonic()
    context, n_tasks = run.context, len(active.trial.tasks)
    run.step = None
    context.check(run.snapshots)
    prober, stages = Prober(run, active), context.probes.stages(n_tasks)
    results: list[ProbeResult] = []
    files: dict[str, bytes] = {}
    for probe in read_probes(context.probes):
        lines: list[dict[str, Any]] = []
        for seen in (0, *stages):
            context.limit.check("scoring")
            with context.doing("answering", max(seen - 1, 0)):
                lines += [{"tasks_seen": seen, **line} for line in _LINES[probe.kind](prober, probe, seen)]
        results += results_of(probe.name, lines)
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        files[probe.file(stages)] = content.encode()
    if odd := [result.name for result in results if not np.isfinite(result.value)]:
        raise ConfigError(
            f"run.probes: found a result that is not finite: {', '.join(odd)}. Use backbone.dtype: float32, or leave "
            "the probe out"
        )
    return Probed(probe_metrics(results), files, time.monotonic() - began)


def _text_lines(prober: Prober, probe: Probe, seen: int) -> list[dict[str, Any]]:
    columns = prober.encoder.chunks(probe.text)
    found, weights = prober.likelihoods(seen, columns)
    return [
        {"row": row, "tokens": len(target), "loss": -likelihood.log, "weights": _nonzero(own)}
        for row, (target, likelihood, own) in enumerate(zip(columns["target_ids"], found, weights, strict=True))
    ]


def _choice_lines(prober: Prober, probe: Probe, seen: int) -> list[dict[str, Any]]:
    encoder = prober.encoder
    pairs = [encoder.pair(question.context, choice) for question in probe.questions for choice in question.choices]
    found, weights = prober.likelihoods(seen, encoder.rows(pairs))
    lines, start = [], 0
    for row, question in enumerate(probe.questions):
        own = slice(start, start + len(question.choices))
        logs, start = [likelihood.log for likelihood in found[own]], own.stop
        line = {"row": row, "answer": question.answer, "log_likelihoods": logs}
        lines.append({**line, "weights": _nonzero(weights[own][0])})
    return lines


def _nonzero(weights: Array) -> dict[str, float]:
    return {str(position): float(weight) for position, weight in enumerate(weights) if weight}


_LINES = {"text": _text_lines, "choices": _choice_lines, "lm_eval": harness_lines}
