"""What can be known to fail is tried before a task is learned: hours of training must not end in a setting's fault.

The first worker of a group reads the rows of every task, scores one, fits the router of every stage (it reads frozen
embeddings alone) and looks at the storage. All workers generate an answer and let the method try its tasks. Rows,
embeddings and router records are cached by content, so the stages find them there.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from latent_sweep.adapters.bank import Adaptation
from latent_sweep.backbones.generation import answer_text, generate
from latent_sweep.data.schema import scoring_metric
from latent_sweep.errors import StorageError
from latent_sweep.methods.protocol import Method
from latent_sweep.metrics import score_rows, takes_input
from latent_sweep.routing.combination import Array
from latent_sweep.routing.gaussian import ROUTED
from latent_sweep.storage.failures import failure_kind
from latent_sweep.storage.files import write_file
from latent_sweep.sweep.plan import Trial
from latent_sweep.training.context import Context
from latent_sweep.training.run import ActiveRun, ActiveRuns, ActiveTrial

log = logging.getLogger(__name__)

GIB = 1 << 30

SNAPSHOT_BYTES = 4
"""Bytes of a snapshot per trainable parameter, at least: float32, without what methods remember besides."""
CHECKPOINT_BYTES = 2 * 12
"""Bytes of checkpoints per trainable parameter: values and two moments, the old file and the one that replaces it."""

Stages = Sequence[tuple[str, Sequence[int]]]
"""By training id, the positions of the tasks that are to be learned."""


def try_everything(members: ActiveRuns) -> None:
    """Try what the members' trials will do; trials that fail leave their member, and the others go on.

    Raises:
        StorageError: the storage cannot be written, or is too small for what will be written.
        Exception: the backbone cannot answer; or, in a group of workers, a method cannot learn one of its tasks.
    """
    context, began = members.context, time.monotonic()
    going = [member for member in members.all if any(_rows_missing(run) for run in member.trials)]
    if not going:
        return
    with context.doing("checking"):
        missing: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        stored, known = context.store.lineages(), set[str]()
        for member in going:
            with members.leaving([member], None):
                positions = missing[member.member.training_id] = _stages_missing(member, stored)
                sizes |= {member.lineages[position]: _trained(member) for position in positions}
        _try_storage(sizes, len(going), context)
        for member in _remaining(going):
            for run in filter(_rows_missing, tuple(member.trials)):
                with _leaving(member, run):
                    _try_trial(member, run, missing[member.member.training_id], known)
        if going := _remaining(going):
            stages = [(member.member.training_id, missing[member.member.training_id]) for member in going]
            prompt = _shortest_prompt(going[0].trials[0].trial, context)
            context.order("try", prompt, stages)
            try_backbone(members, prompt, stages)
    trials = sum(len(member.trials) for member in _remaining(going))
    log.info("tried what %d trials will do in %.1f s", trials, time.monotonic() - began)


def try_backbone(members: ActiveRuns, prompt: Sequence[int], stages: Stages) -> None:
    """Generate an answer, and let methods try the tasks that they will learn; every worker of a group does so at once.

    Raises:
        Exception: the backbone cannot answer; or, in a group of workers, a method cannot learn one of its tasks.
    """
    _try_answer(members.context, prompt)
    by_id = {member.member.training_id: member for member in members.all}
    for training_id, positions in stages:
        member = by_id[training_id]
        with members.leaving([member], None):
            if type(member.method).try_task is not Method.try_task:  # its rows are read for nothing else
                for position in positions:
                    member.method.try_task(member.task_data(position))


# --- what is missing -------------------------------------------------------------------------------------------------


def _remaining(members: Sequence[ActiveRun]) -> list[ActiveRun]:
    """Return the members that have not failed."""
    return [member for member in members if member.failure is None]


def _rows_missing(run: ActiveTrial) -> bool:
    return len(run.files.rows) < run.files.wanted


def _stages_missing(member: ActiveRun, stored: set[str]) -> list[int]:
    """Return the positions of the tasks that are to be learned: no snapshot is stored, and something is learned."""
    counts = (len(member.method.learns_from(position, len(member.tasks))) for position in range(member.wanted))
    lineages = zip(member.lineages, counts, strict=False)
    return [position for position, (lineage, count) in enumerate(lineages) if count and lineage not in stored]


@contextmanager
def _leaving(member: ActiveRun, run: ActiveTrial) -> Iterator[None]:
    """Have what goes wrong within the block be the end of this trial alone, unless another try may help all."""
    try:
        yield
    except Exception as error:
        if isinstance(error, StorageError) or failure_kind(error) == "device_lost":
            raise
        member.drop(run, error)


# --- the storage -----------------------------------------------------------------------------------------------------


def _try_storage(trained: Mapping[str, int], members: int, context: Context) -> None:
    """Write where snapshots and checkpoints go, and compare their sizes with what is free.

    Args:
        trained: trainable parameters of each snapshot that is to be learned, by lineage.
        members: that learn at the same time, and have a checkpoint each.

    Raises:
        StorageError: a folder cannot be written, or too little is free.
    """
    folder = context.storage.folder
    for place in (context.store.folder, folder / "checkpoints", folder / "predictions"):
        if place.is_dir():  # it may be another user's
            _try_folder(place)
    checkpoints = CHECKPOINT_BYTES * members * max(trained.values(), default=0)
    free, needed = shutil.disk_usage(folder).free, SNAPSHOT_BYTES * sum(trained.values()) + checkpoints
    if needed > free:
        raise StorageError(
            f"run.storage: {folder} has {free / GIB:.2g} GiB free, and {len(trained)} snapshots with their checkpoints "
            f"take at least {needed / GIB:.2g} GiB. Free disk space (`latent-sweep gc` deletes what no sweep needs), "
            "or use another run.storage, and run the same command again"
        )


def _try_folder(folder: Path) -> None:
    probe = folder / "probe"
    write_file(probe, b"", durable=False)
    probe.unlink(missing_ok=True)


def _trained(member: ActiveRun) -> int:
    """Count the trainable parameters of a task."""
    backbone = member.context.backbone
    shapes = {name: (target.out_features, target.in_features) for name, target in backbone.targets.items()}
    return member.method.parameter_count(shapes, backbone.embedding_width)


# --- a trial ---------------------------------------------------------------------------------------------------------


def _try_trial(member: ActiveRun, run: ActiveTrial, positions: Sequence[int], known: set[str]) -> None:
    """Read the rows that a trial needs, score one of each task, and fit its routers.

    Args:
        positions: of the tasks to be learned.
        known: names of what was tried before, for another trial of the pack; it is added to.
    """
    context, trial, method = member.context, run.trial, member.method_of(run.trial)
    carve = trial.settings.training.select == "best_validation"
    n_tasks = len(trial.tasks)
    for position in dict.fromkeys(i for at in positions for i in method.learns_from(at, n_tasks)):
        context.tokens(trial, position, "train", carve)
        if carve:
            context.tokens(trial, position, "validation", carve)
    for position in range(run.files.wanted):
        context.tokens(trial, position, "test")
        once = f"{trial.settings.benchmark.model_dump_json()} {trial.tasks[position].name}"
        if once not in known:
            _try_metric(context, trial, position)
            known.add(once)
    if trial.settings.router.combine in ROUTED:
        _try_router(context, run, known)


def _try_metric(context: Context, trial: Trial, position: int) -> None:
    """Score a right and an empty answer to a test row of a task."""
    b, task = trial.settings.benchmark, trial.tasks[position]
    metric = scoring_metric(b, task)
    references = context.tokens(trial, position, "test")["references"][0]
    inputs = 2 * context.inputs(trial, position)[:1] if takes_input(metric) else None
    score_rows(metric, [references[0], ""], 2 * [references], b.references, inputs)


def _try_router(context: Context, run: ActiveTrial, known: set[str]) -> None:
    """Pool the test rows, and fit the router of every stage that is to be scored."""
    combiner = context.combiner(run.trial, _no_gates)
    wanted, tasks = run.files.wanted, run.trial.tasks
    for position in range(wanted):
        with context.doing("fitting the router", position):
            combiner.embeddings(position, "test")
            components = len(combiner.gmm(position).shares)
            if components < combiner.settings.components and (name := combiner.gmm_name(position)) not in known:
                log.warning(
                    "router.components: found %d, but the training prompts of task %s have %d distinct embeddings; it "
                    "gets as many components",
                    *(combiner.settings.components, tasks[position].name, components),
                )
                known.add(name)
    for seen in range(len(run.files.rows) + 1, wanted + 1):
        if (name := combiner.covariance_name(seen)) not in known:
            with context.doing("fitting the router", seen - 1):
                combiner.known(seen)
            known.add(name)


def _no_gates(tasks_seen: int, prompts: Sequence[Sequence[int]]) -> Array:
    raise AssertionError("a routed trial asks no gates")


# --- the backbone ----------------------------------------------------------------------------------------------------


def _shortest_prompt(trial: Trial, context: Context) -> list[int]:
    """Return the token ids of the shortest test prompt of the first task."""
    prompts: list[list[int]] = context.tokens(trial, 0, "test")["prompt_ids"]
    return min(prompts, key=len)


def _try_answer(context: Context, prompt: Sequence[int]) -> None:
    """Generate two tokens without an adapter: the attention kernel, the cache and the tokenizer are there."""
    trial, engine = context.trial, context.engine
    engine.begin_answering()
    tokens, stop = min(2, trial.settings.benchmark.max_target_length), trial.spec.stop
    (ids,) = generate(context.backbone, context.bank, [prompt], Adaptation(), tokens, stop)
    answer_text(context.backbone, ids, stop)
