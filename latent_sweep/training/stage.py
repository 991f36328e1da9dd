"""One stage: a task's snapshots are learned where nobody has, and the tasks seen are scored where a row is missing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from latent_sweep.data.prompts import definitions
from latent_sweep.data.schema import scoring_metric, stop_of, target_length
from latent_sweep.methods import checked
from latent_sweep.metrics import takes_input
from latent_sweep.storage.failures import during
from latent_sweep.storage.predictions import GENERATED, mark_stage_cached
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.training.evaluation import AnswerEnd, AtHand, Evaluator
from latent_sweep.training.events import Emit, Step
from latent_sweep.training.journaling import say_stage
from latent_sweep.training.loop import train_pack
from latent_sweep.training.memory_housekeeping import give_back_memory
from latent_sweep.training.run import ActiveRun, ActiveRuns, ActiveTrial
from latent_sweep.training.trainer import Progress, Trainer, TrainingSummary

log = logging.getLogger(__name__)

Learned = Mapping[str, TrainingSummary]
"""What learning was like, by lineage, of the snapshots that were learned here and now."""


# --- learning --------------------------------------------------------------------------------------------------------


def learn_missing(members: ActiveRuns, position: int, emit: Emit) -> Learned:
    """Put the task's snapshot at the end of each member's history: found in the store, or learned here and now."""
    store, learned = members.context.store, {}
    _recall(members, position)  # nobody holds a lease, or waits for one, to read what is there
    while wanting := list(dict.fromkeys(member.lineages[position] for member in _wanting(members, position))):
        with store.leases(wanting, _say_waiting) as mine:
            _recall(members, position)
            wanted = {member.lineages[position] for member in _wanting(members, position)}
            missing = [lineage for lineage in mine if lineage in wanted]
            if missing:
                members.context.order("learn", position, missing)
            for lineage, (snapshot, summary) in learn_together(members, position, missing, emit).items():
                sharing = [member for member in _wanting(members, position) if member.lineages[position] == lineage]
                kept = store.append(snapshot)
                for member in sharing:
                    member.snapshots.append(kept)
                if (checkpoint := store.checkpoint(lineage)).path.exists():  # loaded or saved here, if there was one
                    checkpoint.remove()
                learned[lineage] = summary
    return learned


def _wanting(members: ActiveRuns, position: int) -> list[ActiveRun]:
    """The members that go on to this task and lack its snapshot."""
    return [member for member in members.going(position) if len(member.snapshots) == position]


def _recall(members: ActiveRuns, position: int) -> None:
    """Give members the task's snapshot where the store has it by now."""
    store = members.context.store
    wanting: dict[str, list[ActiveRun]] = {}
    for member in _wanting(members, position):
        wanting.setdefault(member.lineages[position], []).append(member)
    for lineage, sharing in wanting.items():
        if (snapshot := store.recall(lineage)) is None:
            continue
        if not all(member.told(position) for member in sharing):  # else it had gone before that
            store.checkpoint(lineage).remove()  # whoever learned it may have been killed before doing so
        for member in sharing:
            member.snapshots.append(snapshot)


def learn_together(
    members: ActiveRuns, position: int, lineages: Sequence[str], emit: Emit
) -> dict[str, tuple[Snapshot, TrainingSummary]]:
    """Learn these snapshots side by side, each for all members that share it; all workers of a group do so at once."""
    going = members.going(position)
    sharers = {lineage: [m for m in going if m.lineages[position] == lineage] for lineage in lineages}
    trainings: dict[str, Trainer] = {}
    learned = {}
    for lineage, sharing in sharers.items():
        with members.leaving(sharing, position), during("statistics"):
            trainings[lineage] = sharing[0].trainer(position, _reporter(sharing, position, emit))
    with members.leaving([member for lineage in trainings for member in sharers[lineage]], position):
        with during("learning"):
            outcomes = _outcomes(members, trainings)
        for lineage, outcome in outcomes.items():
            with members.leaving(sharers[lineage], position):
                if isinstance(outcome, Exception):
                    with during("learning"):
                        raise outcome
                with during("statistics"):
                    snapshot = sharers[lineage][0].snapshot(position, trainings[lineage], outcome)
                    members.context.engine.check_frozen()
                learned[lineage] = snapshot, outcome
    return learned


def _outcomes(members: ActiveRuns, trainings: Mapping[str, Trainer]) -> dict[str, TrainingSummary | Exception]:
    """Train side by side what has rows to learn from."""
    context = members.context
    with_rows = {lineage: training for lineage, training in trainings.items() if training.examples}
    outcomes = train_pack(list(with_rows.values()), context.engine, context.bank) if with_rows else []
    nothing = dict.fromkeys(trainings, TrainingSummary(0, {}, {}, 0.0, 0))
    return nothing | dict(zip(with_rows, outcomes, strict=True))


def _reporter(members: Sequence[ActiveRun], position: int, emit: Emit) -> Progress:
    def on_step(step: int, steps: int, losses: Mapping[str, float]) -> None:
        for member in members:
            member.step = step
        emit(Step(position, "learning", step, steps, losses, members[0].member.training_id))

    return on_step


def _say_waiting(lineage: str) -> None:
    log.info("waiting for another worker to learn %s", lineage)


# --- scoring ---------------------------------------------------------------------------------------------------------


def score_missing(member: ActiveRun, position: int, learned: Learned, emit: Emit) -> None:
    """Score all tasks seen for those of a member's trials that lack the row, and tell their journals."""
    for run in member.trials:
        if len(run.files.rows) <= position < run.files.wanted:
            scoring = _score(run, member, position, emit)
            give_back_memory()
            summary = learned.get(member.lineages[position])
            say_stage(run.files, run.trial, member.snapshots[position], summary, scoring, member.context)


def _score(run: ActiveTrial, member: ActiveRun, position: int, emit: Emit) -> dict[str, float]:
    """Score all tasks seen for one trial and record the row; returns timings and shares for the journal."""
    began = time.monotonic()
    trial, context = run.trial, member.context
    s, method = trial.settings, member.method_of(trial)
    member.step = None
    context.check(member.snapshots[: position + 1])

    read = [AtHand(snapshot.tensors) for snapshot in member.snapshots]

    def gates(tasks_seen: int, prompts: Sequence[Sequence[int]]) -> Any:
        return checked.gates(method, read[:tasks_seen], prompts)

    combiner = context.combiner(trial, gates)
    with context.doing("fitting the router", position) if combiner.routes else nullcontext():
        combiner.known(position + 1)
    evidence = combiner.evidence(position + 1, [task.name for task in trial.tasks])
    evaluator = Evaluator(
        context.engine,
        context.bank,
        method,
        s.evaluation.batch_size,
        s.benchmark.max_target_length,
        trial.spec.stop,
        s.benchmark.references,
        context.storage.folder / GENERATED,
        lambda batches: context.order("answer", member.member.training_id, trial.trial_id, batches),
        trial.method_source,
        context.passes("answering"),
    )
    row, generated, total, rouge_1 = run.files.new_row(), 0, 0, {}
    with context.doing("answering", position):
        for j in range(position + 1):
            task = trial.tasks[j]
            rows = context.tokens(trial, j, "test")
            wordings = len(definitions(task, "test", s.benchmark))
            metric = scoring_metric(s.benchmark, task)
            inputs = context.inputs(trial, j) if takes_input(metric) else None
            weights, recent = combiner.weights_at(position + 1, j), context.recent(trial, j)
            evidence.add(j, weights)
            end = AnswerEnd(target_length(s.benchmark, task), stop_of(trial.spec, task))
            result = evaluator.score(member.snapshots, weights, rows, metric, wordings, inputs, recent, end)
            row.add(task.name, result.score, result.predictions)
            if result.rouge_1 is not None:
                rouge_1[f"rouge_1/{task.name}"] = result.rouge_1
            generated, total = generated + result.generated, total + len(rows)
            emit(Step(position, "scoring", j + 1, position + 1, {}, member.member.training_id))
        measured = evidence.measures()
    run.files.record(row, context.keep_answers)
    if context.passes("answering") == 1:  # a plan forecasts answers of whole batches
        mark_stage_cached(context.storage.folder, trial.answer_keys()[position])
    answers = {"answers_asked": float(total), "generated_share": generated / total}
    return {"seconds_eval": time.monotonic() - began} | answers | rouge_1 | measured
