"""run_pack: for each task, learn what is missing, score what is missing, say so.

A plain function that knows no Ray and no MLflow: a debugger, a test and a cluster call the same one. Disk is the truth:
whatever the store and the trials' folders already hold is read, the rest is done. With several workers the first of
them runs the pack, and the others follow it in what needs the backbone (`follow.py`).
"""

from __future__ import annotations

import torch

from latent_sweep.errors import StorageError
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.storage.failures import during, failure_kind
from latent_sweep.storage.folders import SweepFolder, writing
from latent_sweep.storage.predictions import KeepAnswers
from latent_sweep.sweep.data_checks import check_pack
from latent_sweep.sweep.plan import Pack
from latent_sweep.sweep.reader import Reader
from latent_sweep.training.context import Context
from latent_sweep.training.engine import Engine, forget_backbone
from latent_sweep.training.events import Emit, StageDone, say_nothing
from latent_sweep.training.journaling import say_finished, say_started
from latent_sweep.training.preflight import try_everything
from latent_sweep.training.run import ActiveRuns, unfinished
from latent_sweep.training.stage import learn_missing, score_missing
from latent_sweep.training.worker import follow


def run_pack(
    pack: Pack,
    sweep: SweepFolder,
    emit: Emit,
    threads: int | None = None,
    engine: Engine | None = None,
    keep_answers: KeepAnswers = "all",
) -> None:
    """Run what is missing of a pack's trials: learn each task once, score it for every trial.

    A member that fails leaves the pack; the others go on to their end. With several workers only a loss that is not
    finite is the member's own end, because all workers see it alike: anything else ends the pack.

    Args:
        sweep: the trials' sweep; what it shares with others lies in its storage.
        emit: told of what takes a while when it begins, every optimizer step and every finished stage.
        threads: CPU threads; None leaves torch's own choice.
        engine: what computes; None is plain torch in this process. Every worker of its group calls this function with
            the same pack.
        keep_answers: whose answers trials keep: those of every stage, or of the last one.

    Raises:
        Exception: whatever stopped the first member that failed, after a `failed` event in the journal of each of its
            unfinished trials and after the end of the others. Where a worker of a group fails or is lost, or this
            process has lost its device: at once, and the journals are the caller's.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    leads = engine is None or engine.group.leads
    context = Context(pack.trials[0], sweep.storage, engine, pack.halved, keep_answers, emit if leads else say_nothing)
    try:
        _run(pack, sweep, emit, context)
    except BaseException:
        forget_backbone()
        raise
    finally:
        context.close()


def _run(pack: Pack, sweep: SweepFolder, emit: Emit, context: Context) -> None:
    """Do this worker's part of the pack."""
    if not context.engine.group.leads:
        follow(pack, context)
        return
    with writing(sweep, {m.training_id: [trial.trial_id for trial in m.trials] for m in pack.runs}):
        members = unfinished(pack, sweep, context)
        if members.all:
            _lead(pack, members, emit)
    context.engine.group.order("end")
    if failures := [failure for member in members.all for failure in member.failures]:
        raise failures[0]


def _lead(pack: Pack, members: ActiveRuns, emit: Emit) -> None:
    """Run members to their end, or to that of the pack."""
    context = members.context
    runs = [run for member in members.all for run in member.trials]
    for run in runs:
        run.files.repair()
        say_started(run.files, run.trial, context)
    try:
        if any(len(run.files.rows) < len(pack.tasks) for run in runs):
            backbone = context.backbone
            reader = Reader(backbone.traits.protocol, backbone.tokenizer.backend_tokenizer, context.chat)
            check_pack(pack, reader, context.storage.folder)
            try_everything(members)
        _learn_and_score(members, emit)
    except Exception as error:  # of all members, such as a backbone that cannot be loaded
        # a fault of the storage cannot be journaled, and may pass; a lost device is no fault of the trials; who has
        # started a group learns which worker failed first, or was lost, and what this one says may only follow from it
        may_pass = isinstance(error, StorageError) or failure_kind(error) == "device_lost"
        if context.engine.group.size == 1 and not may_pass:
            for member in members.all:
                if member.failure is None:
                    member.fail(error, None)
        raise


def _learn_and_score(members: ActiveRuns, emit: Emit) -> None:
    """Learn and score what is missing of each task in turn, and report it."""
    n_tasks = len(members.context.tasks)
    for position in range(n_tasks):
        learned = learn_missing(members, position, emit)
        for member in members.going(position):
            with members.leaving([member], position), during("answering"):
                score_missing(member, position, learned, emit)
        if matrices := _matrices(members, position):
            emit(StageDone(position + 1, n_tasks - position - 1, matrices))
    for member in members.going(0):
        with members.leaving([member], n_tasks - 1):
            for run in member.trials:
                say_finished(run.files, run.trial, member.lineages, members.context)


def _matrices(members: ActiveRuns, position: int) -> list[ScoreMatrix]:
    """The score matrices up to this task, of the trials that go as far."""
    runs = [run for member in members.going(position) for run in member.trials if position < run.files.wanted]
    return [run.files.matrix_after(position + 1) for run in runs]
