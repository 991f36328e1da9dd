"""What running a sweep would take, what the store already has, and why: the text of `latent-sweep plan`. Without torch.

Two kinds of work are shared. A *stage*, one task learned in one trial, is learned once for all trials with its lineage.
A *pass*, the test rows of one task answered at one stage, is answered once for all stages that answer it with the same
snapshots in the same mixture. How far a router spreads its weights is known only once it runs, so with one the number
of passes is a range: at least those of a router that is always sure of the right task, at most one for each history.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from latent_sweep.backbones.registry import describe
from latent_sweep.data.loaders import count_examples, load_examples
from latent_sweep.data.prompts import prompt_parts
from latent_sweep.data.schema import stop_of
from latent_sweep.errors import MissingData, StorageError
from latent_sweep.labels import label, short_names
from latent_sweep.memo import memo_scope, memoized
from latent_sweep.routing.gaussian import ROUTED
from latent_sweep.settings import canonical_json, content_hash
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.predictions import cached_stages
from latent_sweep.storage.snapshots import SnapshotStorage
from latent_sweep.storage.storage import Storage
from latent_sweep.storage.trial_files import recorded_rows
from latent_sweep.sweep.config import Sweep
from latent_sweep.sweep.data_checks import Reader, reader_of
from latent_sweep.sweep.memory import GIB, RESERVE, Memory, cards, predict, shape_of, with_checkpointing
from latent_sweep.sweep.plan import Pack, Run, Trial, count_points, router_identity
from latent_sweep.sweep.planning import Plan
from latent_sweep.sweep.prices import Item, Writing, bucket_items, hours_of, items_text
from latent_sweep.sweep.profile import Profile, profile_path, read_profile
from latent_sweep.sweep.schema import RunSettings
from latent_sweep.sweep.tuning import Selection, selection_names, tuning_lines

CHARACTERS_PER_TOKEN = 4.0
"""Where a tokenizer is not at hand: of T5 and SmolLM2 on both published benchmarks, within a tenth on average."""


class Span(NamedTuple):
    """A number, as far as it is known beforehand."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class Reuse:
    """The part of a sweep's work that is left once equal work is done once, and nothing twice."""

    distinct: int
    """Snapshots that differ."""
    stored: int
    """Of those, already in the store."""
    to_learn: int
    """Of the others, those that a trial needs that has not come to its end."""
    steps: int
    """Optimizer steps of these."""
    adding: tuple[str, ...]
    """Methods among these that may learn from more rows than the tasks have: the steps leave those out."""
    answers: int
    """Rows to answer if every trial answered every task it has seen, at every stage."""
    passes: Span
    """Passes that differ."""
    open_passes: Span
    """Of those, without the ones in recorded rows of the score matrices, and those whose answers are in the cache."""
    open_answers: Span
    """Their rows."""
    writing: Writing
    """What the work that is left would write."""


@dataclass(frozen=True)
class Estimate:
    """The cost of running a sweep."""

    trials: int
    trainings: int
    stages: int
    """Tasks to learn if every trial learned its own."""
    passes: int
    """Tasks to answer, stage by stage, if every trial answered its own."""
    reuse: Reuse | None
    """None where the data is not at hand."""
    missing_data: str | None
    """Why reuse is unknown."""


@memo_scope()
def estimate(trials: Sequence[Trial], folder: SweepFolder) -> Estimate:
    """Count what a sweep would learn and answer, with what is already there.

    Args:
        folder: the sweep's, where its trials' rows are recorded, in the storage with the snapshots.
    """
    reuse, missing = None, None
    try:
        reuse = _reuse(trials, folder)
    except MissingData as error:
        missing = str(error)
    lengths = [len(trial.tasks) for trial in trials]
    return Estimate(
        trials=len(trials),
        trainings=len({trial.training_id for trial in trials}),
        stages=sum(lengths),
        passes=sum(n * (n + 1) // 2 for n in lengths),
        reuse=reuse,
        missing_data=missing,
    )


def _reuse(trials: Sequence[Trial], folder: SweepFolder) -> Reuse:
    lineages = {trial.training_id: trial.lineages() for trial in _trainings(trials)}
    rows_of = [_recorded_rows(trial, folder) for trial in trials]
    unfinished = [trial for trial, rows in zip(trials, rows_of, strict=True) if rows < len(trial.tasks)]
    distinct = frozenset().union(*lineages.values())
    stored = folder.snapshots.lineages()
    missing = _missing_stages(unfinished, lineages, stored)
    by_method = {trial.settings.method.name: trial for trial, _ in missing.values()}
    answers = 0
    least, most, known = _Passes(), _Passes(), _Passes()
    generated = cached_stages(folder.storage.folder)
    written: Counter[str] = Counter()
    for trial, recorded in zip(trials, rows_of, strict=True):
        found = _StagePasses.of(trial, lineages[trial.training_id])
        answers += sum(found.seen)
        if recorded < len(trial.tasks):
            written["trials"] += 1
            written["rows"] += len(trial.tasks) - recorded
            written["files"] += sum(range(recorded + 1, len(trial.tasks) + 1))
            written["answers"] += sum(found.seen[recorded:])
            written["predictions"] += found.seen[-1]
        keys = trial.answer_keys() if generated and recorded < len(trial.tasks) else ()
        at_hand = {stage for stage, key in enumerate(keys) if key in generated} | set(range(recorded))
        for passes, told in ((least, found.least), (most, found.most)):
            for stage, snapshots, tests in told:
                passes.add(snapshots, tests)
                if stage in at_hand:
                    known.add(snapshots, tests)
    return Reuse(
        distinct=len(distinct),
        stored=len(distinct & stored),
        to_learn=len(missing),
        steps=sum(trial.steps(position) for trial, position in missing.values()),
        adding=tuple(name for name, trial in by_method.items() if trial.method().replays),
        answers=answers,
        passes=Span(least.count(), most.count()),
        open_passes=Span(least.count(known), most.count(known)),
        open_answers=Span(least.answers(known), most.answers(known)),
        writing=Writing(
            trainings=len(_trainings(unfinished)),
            stages=len(missing),
            numbers=sum(_numbers(trial) for trial, position in missing.values() if trial.rows_learned(position)),
            checkpoints=sum(  # none after the last step
                max(0, trial.steps(position) - 1) // trial.settings.training.checkpoint_every
                for trial, position in missing.values()
            ),
            **{name: written[name] for name in ("trials", "rows", "files", "answers", "predictions")},
        ),
    )


def _numbers(trial: Trial) -> int:
    """Count the numbers that a stage trains; 0 where the shapes of its backbone are not known here."""

    def count() -> int:
        shape = shape_of(trial.settings.backbone)
        return 0 if shape is None else trial.method().parameter_count(shape.targets, shape.width)

    return memoized("numbers", (trial.settings.method, trial.settings.backbone), count)


# --- stages ----------------------------------------------------------------------------------------------------------


def _trainings(trials: Sequence[Trial]) -> list[Trial]:
    """One trial of each training: the others have the same lineages."""
    return list({trial.training_id: trial for trial in trials}.values())


def _missing_stages(
    trials: Sequence[Trial], lineages: Mapping[str, Sequence[str]], stored: Collection[str]
) -> dict[str, tuple[Trial, int]]:
    """The lineages to learn, each with a trial and a position that learn it."""
    places = {
        lineage: (trial, position)
        for trial in _trainings(trials)
        for position, lineage in reversed(list(enumerate(lineages[trial.training_id])))
    }
    return {lineage: place for lineage, place in places.items() if lineage not in stored}


# --- passes ----------------------------------------------------------------------------------------------------------


Tests = Mapping[str, int]
"""Test rows that are answered in one way: how many, by what identifies their answers beside the snapshots."""


class _Passes:
    """Passes that differ: which tests are answered by which snapshots."""

    def __init__(self) -> None:
        self._tests: dict[str, dict[str, int]] = {}

    def add(self, snapshots: str, tests: Tests) -> None:
        """Have these snapshots answer these tests, if they do not yet."""
        known = self._tests.get(snapshots)
        if known is None:
            self._tests[snapshots] = dict(tests)
        else:
            known.update(tests)

    def count(self, without: _Passes | None = None) -> int:
        """Count them."""
        return sum(len(tests) for tests in self._open(without))

    def answers(self, without: _Passes | None = None) -> int:
        """Count their rows."""
        return sum(sum(tests.values()) for tests in self._open(without))

    def _open(self, without: _Passes | None) -> Iterator[Tests]:
        for snapshots, tests in self._tests.items():
            known = {} if without is None else without._tests.get(snapshots, {})
            yield {test: rows for test, rows in tests.items() if test not in known} if known else tests


class _StagePasses(NamedTuple):
    """The passes of one trial: the stage at which each is first made, the snapshots that answer, and what."""

    seen: Sequence[int]
    """Rows of each stage, if it answered all tasks that it has seen."""
    least: Sequence[tuple[int, str, Tests]]
    """Where the router is sure of the right task."""
    most: Sequence[tuple[int, str, Tests]]
    """Where it spreads its weights over the whole history."""

    @classmethod
    def of(cls, trial: Trial, lineages: Sequence[str]) -> _StagePasses:
        s, mode = trial.settings, trial.settings.router.combine
        parts = s.benchmark, s.evaluation, s.method, trial.spec, trial.tasks, trial.sources
        tests = memoized("passes", parts, lambda: _tests(trial))
        seen = memoized("seen", (tests,), lambda: [dict(tests[: stage + 1]) for stage in range(len(tests))])
        rows = memoized("rows seen", (tests,), lambda: list(itertools.accumulate(count for _, count in tests)))
        if mode == "last":
            stages = [(stage, newest, seen[stage]) for stage, newest in enumerate(lineages)]
            return cls(rows, stages, stages)
        alone = memoized("alone", (tests,), lambda: [{test: rows} for test, rows in tests])
        sure = [(stage, snapshot, alone[stage]) for stage, snapshot in enumerate(lineages)]
        if mode == "oracle":
            return cls(rows, sure, sure)
        blend = _blend(trial, lineages)
        spread = [
            (stage, f"{blend} {' '.join(lineages[: stage + 1])}", answered) for stage, answered in enumerate(seen)
        ]
        if mode != "gates":  # one snapshot has weight one
            spread[0] = 0, lineages[0], seen[0]
        return cls(rows, sure if mode in (*ROUTED, "ngram") else spread, spread)


def _tests(trial: Trial) -> list[tuple[str, int]]:
    """Return what identifies the answers to each task's test rows, beside the snapshots, and how many there are."""
    s = trial.settings
    decoding = [s.evaluation.identity(), s.benchmark.max_target_length, s.method.inference_identity()]
    digests = [[trial.data_digest_of(task, "test"), stop_of(trial.spec, task)] for task in trial.tasks]
    rows = [count_examples(trial.spec, task, "test", s.benchmark) for task in trial.tasks]
    return [(content_hash([*digest, *decoding]), count) for digest, count in zip(digests, rows, strict=True)]


def _blend(trial: Trial, lineages: Sequence[str]) -> str:
    """Return a key for what decides the weights of several snapshots, beside the snapshots."""
    s = trial.settings
    if s.router.combine not in ROUTED:
        return s.router.combine
    # a covariance of all tasks reads those that are still to come (A16)
    tasks = tuple(lineages) if s.router.cov.refresh == "final" else None
    return memoized(("blend", s.seed, tasks), (s.router,), lambda: content_hash([router_identity(s), s.seed, tasks]))


def _recorded_rows(trial: Trial, folder: SweepFolder) -> int:
    """Count the rows of the trial's score matrix that a run would keep; its journal is read once for a plan."""

    def count() -> int:
        try:
            events = folder.journal(trial.trial_id).read()
        except StorageError:  # a run says why
            return 0
        return len(recorded_rows(events, trial.row_keys())) if events else 0

    return memoized("recorded rows", (trial, folder), count)


# --- the text --------------------------------------------------------------------------------------------------------


@memo_scope()
def describe_plan(plan: Plan, storage: Storage) -> str:
    """Write the plan of a sweep, with its warnings at the end."""
    sweep, trials, packs = plan.sweep, plan.trials, plan.packs
    warnings = _warnings(plan)
    folder = SweepFolder(storage, sweep.name)
    found = estimate(trials, folder)
    work = _work(trials, folder, found)
    backbones = {f"{t.settings.backbone.name} ({t.settings.backbone.dtype})": None for t in trials}
    sequences = {f"{t.spec.name}, order {t.settings.benchmark.order}": t.tasks for t in trials}
    lines = [f"sweep {sweep.name}  ({sweep.source})", f"  backbone   {', '.join(backbones)}"]
    for name, tasks in sequences.items():
        lines.append(f"  benchmark  {name}, {len(tasks)} tasks: {' '.join(task.name for task in tasks)}")
    lines += [
        f"  varies     {_axes_text(sweep)}",
        "",
        f"  {found.trials:,} trials, {found.trainings:,} distinct trainings in {len(packs):,} packs",
        *_collapsed_lines(sweep, len(trials)),
        *_reuse_lines(found),
        *(one.line() for profiled in work for one in profiled),
        *_cost_lines(_costs(found, work, sweep.run, storage)),
        f"  each pack asks for {_resources_text(sweep.run)}",
        *_memory_lines(packs, sweep.run),
        "",
        "  training          trials",
    ]
    for pack in packs:
        # the members of a pack stand together, with a bar beside them
        bar = "|" if len(pack.runs) > 1 else " "
        lines += [f" {bar}{member.training_id}  {_run_text(member)}" for member in pack.runs]
    return "\n".join([*lines, *([""] if warnings else []), *warnings])


@memo_scope()
def describe_whole_plan(plan: Plan, storage: Storage) -> str:
    """Write the text of `latent-sweep plan`: the plan of the tuning trials, if there are any, and of the sweep."""
    if plan.tuning is None:
        return describe_plan(plan, storage)
    selected = tuning_lines(plan.results or ()) or ["nothing yet: below, the first tuning trials stand in for it"]
    lines = [*describe_tuning(plan), describe_plan(plan.tuning, storage), "", "chosen"]
    return "\n".join([*lines, *(f"  {line}" for line in selected), "", describe_plan(plan, storage)])


def _warnings(plan: Plan) -> list[str]:
    return plan.warnings + [f"`latent_sweep.run` will refuse this. {plan.conflict}"] * (plan.conflict is not None)


@memo_scope()
def plan_record(plan: Plan, storage: Storage) -> dict[str, Any]:
    """Return the plan as plain values: every trial with its pack and snapshots, and the work left to do."""
    sweep, trials, packs = plan.sweep, plan.trials, plan.packs
    folder = SweepFolder(storage, sweep.name)
    found = estimate(trials, folder)
    costs = _costs(found, _work(trials, folder, found), sweep.run, storage)
    reuse = None
    if found.reuse is not None:
        spans = {name: value._asdict() for name, value in vars(found.reuse).items() if isinstance(value, Span)}
        reuse = {**asdict(found.reuse), **spans}
    pack_of = {trial.trial_id: number for number, pack in enumerate(packs) for trial in pack.trials}
    tuning = {}
    if plan.tuning is not None:
        selected = tuning_lines(plan.results or ()) or None
        tuning["tuning"] = {"chosen": selected, "candidates": plan_record(plan.tuning, storage)}
    return {
        "sweep": folder.name,
        "trials": [
            {
                "trial_id": trial.trial_id,
                "training_id": trial.training_id,
                "pack": pack_of[trial.trial_id],
                "values": dict(trial.values),
                "tasks": [task.name for task in trial.tasks],
                "lineages": None if found.reuse is None else trial.lineages(),
            }
            for trial in trials
        ],
        "estimate": {**asdict(found), "reuse": reuse},
        "costs": [item.record() for item in costs],
        "warnings": _warnings(plan),
        **tuning,
    }


def describe_tuning(plan: Plan) -> list[str]:
    """Write the selections of a plan, the values tried for each, and the rows they are made on."""
    tune, tuning, selections = plan.sweep.tune, plan.tuning, plan.selections
    assert tune is not None and tuning is not None
    made = sum(bool(selection.tuning_trials) for selection in selections)
    streams = {f"{t.spec.name}: {' '.join(task.name for task in t.tasks)}": None for t in tuning.trials}
    names = selection_names([selection.shared for selection in selections])
    return [
        f"tuning of {plan.sweep.name}: {made} {'selection' if made == 1 else 'selections'} among "
        f"{len(tuning.trials):,} tuning trials, the sweep {tuning.sweep.name}",
        f"  on         {'; '.join(streams)}; scored on {tune.validation_fraction:.0%} of the training rows, held out; "
        "test rows are not read",
        *(f"  {name}: {_tried_text(selection)}" for name, selection in zip(names, selections, strict=True)),
        f"  {_shared_stages(tuning.trials, plan.trials)}",
        "",
    ]


def _tried_text(selection: Selection) -> str:
    if not selection.tuning_trials:
        return "learns nothing, so there is nothing to select"
    values: dict[str, dict[str, None]] = {}
    for tuning_trial in selection.tuning_trials:
        for path, value in tuning_trial.values.items():
            values.setdefault(path, {})[canonical_json(value)] = None
    tried = "; ".join(f"{path} [{', '.join(distinct)}]" for path, distinct in values.items())
    return f"{len(selection.tuning_trials)} tuning trials, {tried}"


def _shared_stages(tuning_trials: Sequence[Trial], trials: Sequence[Trial]) -> str:
    """Say how many stages tuning trials have in common with trials."""
    try:
        tried, judged = ({x for t in _trainings(some) for x in t.lineages()} for some in (tuning_trials, trials))
    except MissingData:
        return "stages shared with the trials: unknown, the data is not on this machine"
    return f"{len(tried & judged)} of {len(tried)} stages are shared with the trials, which train on all rows"


def _reuse_lines(found: Estimate) -> list[str]:
    alone = f"  {found.stages:,} tasks to learn if every trial trained for itself"
    passes = f"  {found.passes:,} test passes"
    if found.reuse is None:
        return [alone, passes, f"  reuse unknown, the data is not at hand: {found.missing_data}"]
    r = found.reuse
    to_learn = f"{r.to_learn:,} to learn: {r.steps:,} optimizer steps"
    if r.adding:
        to_learn += f", without the rows that {' and '.join(r.adding)} {'adds' if len(r.adding) == 1 else 'add'}"
    lines = [
        alone,
        f"  {r.distinct:,} distinct stages, {r.stored:,} in the store, {to_learn}",
        f"{passes} if every trial answered for itself: {r.answers:,} answers",
        f"  {r.passes} distinct passes, {r.open_passes} to answer: {r.open_answers} answers",
    ]
    if r.passes.least < r.passes.most:
        lines.append("    at least with a router that is always sure of the right task, at most with one that never is")
    return lines


def _axes_text(sweep: Sweep) -> str:
    axes = [f"{axis} {canonical_json(values)}" for axis, values in sweep.grid.items()]
    axes += [f"{axis} {draw.kind}{list(draw.values)}" for axis, draw in sweep.draws.items()]
    if sweep.tune is not None:
        tuned = dict.fromkeys([*sweep.tune.search, *(p for found in sweep.tune.by_method.values() for p in found)])
        axes.append(f"{', '.join(tuned)} as tuned")
    return "; ".join(axes) or "nothing"


def _collapsed_lines(sweep: Sweep, trials: int) -> list[str]:
    """Say where points of the search are one trial: an axis may leave no mark on any result."""
    points = count_points(sweep)
    if points <= trials:  # fewer where the trials are candidates
        return []
    return [
        f"  the search has {points:,} points: those that differ only in settings on which no result of theirs depends "
        "are one trial"
    ]


def _resources_text(run: RunSettings) -> str:
    r = run.resources
    accelerator = f" of type {r.accelerator}" if r.accelerator else ""
    each = f"{r.cpus:g} CPU, {r.gpus:g} GPU{accelerator}"
    return each if r.workers == 1 else f"{r.workers} workers at once, each with {each}"


def _run_text(member: Run) -> str:
    """Name what the trials of a training have in common, and what tells them apart."""
    names = short_names(path for trial in member.trials for path in trial.values)
    common = common_values(member.trials)
    text = f"{len(member.trials)}: {label({names[path]: value for path, value in common.items()})}"
    variants = [label({names[p]: v for p, v in trial.values.items() if p not in common}) for trial in member.trials]
    if len(variants) == 1:
        return text
    shown = variants if len(variants) <= 4 else [*variants[:3], f"{len(variants) - 3} more"]
    return f"{text} | {', '.join(shown)}"


def common_values(trials: Sequence[Trial]) -> dict[str, Any]:
    """The values that all these trials share, of the settings that vary in the sweep."""
    first = trials[0].values
    return {path: value for path, value in first.items() if all(t.values.get(path) == value for t in trials)}


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory_lines(packs: Sequence[Pack], run: RunSettings) -> list[str]:
    """Tell how much a worker needs at most on every backbone; warn where its accelerator does not have that."""
    found: dict[str, list[tuple[Memory, int]]] = {}
    untold: dict[str, None] = {}
    for pack in packs:
        members = 1 if run.pack == "auto" else len(pack.runs)  # how many it takes together is measured first
        for member in pack.runs:
            s = member.trials[0].settings
            memory, prompt = _predicted(member.trials[0], run, members), s.benchmark.max_source_length
            if memory is not None and prompt is not None:
                found.setdefault(f"{s.backbone.name} ({s.backbone.dtype})", []).append((memory, prompt))
            elif (known := describe(s.backbone)) is not None:
                reason = f"what blocks of the family {known.family} keep is not known here"
                untold[f"  memory is not forecast on {s.backbone.name}: {reason}"] = None
    lines = list(untold)
    for name, needs in found.items():
        memory, prompt = max(needs, key=lambda need: need[0].peak)
        backbone = f", on {name}" if len(found) > 1 else ""
        lines.append(f"  {_memory_text(memory)} with prompts of {prompt:,} tokens{backbone}{_engine_text(memory, run)}")
        lines += _memory_warning(memory, run)
    return lines


def _predicted(trial: Trial, run: RunSettings, members: int) -> Memory | None:
    """Predict a worker's memory; where checkpointing is `auto`, as it will be on the smallest card of that name."""
    s = trial.settings
    parts = s.method, s.backbone, s.benchmark, s.training, s.evaluation, trial.tasks, run
    return memoized(("memory", members), parts, lambda: _newly_predicted(trial, run, members))


def _newly_predicted(trial: Trial, run: RunSettings, members: int) -> Memory | None:
    memory, room = predict(trial, run, members), min(cards(run.resources).values(), default=math.inf)
    automatic = trial.settings.training.gradient_checkpointing == "auto"
    if automatic and memory is not None and memory.learning + RESERVE > room:
        return predict(with_checkpointing(trial, True), run, members)
    return memory


def _memory_text(memory: Memory) -> str:
    parts = {
        "weights": memory.weights,
        "gathered weights": memory.gathered,
        "factors": memory.factors,
        "earlier adapters": memory.history,
        "activations": memory.activations + memory.working,
        "logits": memory.logits,
        "adapter and optimizer": memory.adapter + memory.optimizer,
    }
    learning = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    measured = "its inputs" if memory.moments else "its Fisher information"
    measuring = f"{_gib(memory.measuring)} to measure {measured}, " if memory.measuring else ""
    answering = f"{measuring}{_gib(memory.answering)} to answer"
    return f"up to {_gib(memory.learning)} GiB a worker to learn ({learning}), {answering}"


def _engine_text(memory: Memory, run: RunSettings) -> str:
    workers = run.resources.workers
    over = f" over {workers} workers" if workers > 1 else ""
    parts = [f"ZeRO-{run.engine.zero_stage}{over}"] if run.engine.name == "deepspeed" else []
    parts += [f"{_gib(memory.host)} GiB more in host memory"] if memory.host else []
    parts += (
        [] if run.resources.gpus else [f"on a CPU the process itself takes some {_gib(memory.besides)} GiB besides"]
    )
    return "".join(f"; {part}" for part in parts)


def _memory_warning(memory: Memory, run: RunSettings) -> list[str]:
    """Warn which cards of the accelerator's name are too small, and tell what to do."""
    room = cards(run.resources)
    small = [gb for gb, size in room.items() if memory.peak + RESERVE > size]
    if not small:
        return []
    least = room[small[0]]
    remedies = ["training.micro_batch_size, training.gradient_checkpointing"] * (memory.learning + RESERVE > least)
    remedies += ["evaluation.batch_size"] * (memory.answering + RESERVE > least)
    fits = "".join(f", though it fits {gb} GB" for gb in room if gb not in small)
    which = " or ".join(f"{gb} GB" for gb in small)
    return [
        f"  warning: with about {_gib(RESERVE)} GiB for CUDA itself that is more than {run.resources.accelerator} has "
        f"with {which}{fits}; see {', '.join(remedies)} and run.engine"
    ]


def _gib(size: int) -> str:
    """Write bytes in GiB, with two digits where it is little."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2g}"


# --- time ------------------------------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """What a worker has to do on one backbone, in seconds by a machine of which there is a profile."""

    profile: Profile
    reader: Reader
    learning: float
    answering: tuple[float, float]
    """At least and at most."""

    def line(self) -> str:
        """Tell it."""
        answering = " to ".join(dict.fromkeys(map(_hours, self.answering)))
        p = self.profile
        return (
            f"  about {_hours(self.learning)} of learning and {answering} of answering with one worker: {p.backbone} "
            f"({p.dtype}) on {p.device}, measured {p.measured_at[:10]}"
            + ("" if self.reader.tokenizer else f"; taking {CHARACTERS_PER_TOKEN:g} characters for a token")
        )


def _work(trials: Sequence[Trial], folder: SweepFolder, found: Estimate) -> list[list[_Work]]:
    """Estimate the work on every backbone by each of its profiles (`latent-sweep doctor --profile`); there may be none.

    Args:
        found: the estimate of these trials.
    """
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.settings.backbone.name, trial.settings.backbone.dtype), []).append(trial)
    work = []
    for (backbone, dtype), members in groups.items():
        places = (profile_path(folder.storage.folder, backbone, dtype, device) for device in ("cuda", "cpu"))
        profiles = [profile for profile in map(read_profile, places) if profile is not None]
        own = found if len(groups) == 1 or not profiles else estimate(members, folder)
        work.append([_work_by(profile, members, folder, own.reuse) for profile in profiles if own.reuse is not None])
    return work


def _work_by(profile: Profile, trials: Sequence[Trial], folder: SweepFolder, reuse: Reuse) -> _Work:
    reader = reader_of(trials[0].settings.backbone)
    least, most = (rows / profile.rows_per_second_generate for rows in reuse.open_answers)
    unfinished = [trial for trial in trials if _recorded_rows(trial, folder) < len(trial.tasks)]
    learning = training_tokens(unfinished, folder.snapshots, reader) / profile.tokens_per_second_train
    return _Work(profile, reader, learning, (least, most))


def _costs(found: Estimate, work: Sequence[Sequence[_Work]], run: RunSettings, storage: Storage) -> list[Item]:
    """Estimate what is paid for: hours where each backbone has a profile of the device asked for, and requests and
    gigabytes where the storage is an object store.
    """
    device = "cuda" if run.resources.gpus else "cpu"
    fitting = [next((one for one in profiled if one.profile.device == device), None) for profiled in work]
    known = [one for one in fitting if one is not None]
    hours = None
    if known and len(known) == len(fitting):
        learning = sum(one.learning for one in known)
        hours = (
            (learning + sum(one.answering[0] for one in known)) / 3600,
            (learning + sum(one.answering[1] for one in known)) / 3600,
        )
    items = [hours_of(*hours, run.resources, run.prices)] if hours else []
    if storage.is_remote and found.reuse is not None:
        items += bucket_items(found.reuse.writing, run, hours)
    return items


def _cost_lines(items: Sequence[Item]) -> list[str]:
    if not items:
        return []
    untimed = items[0].name == "PUTs"
    left_out = "; without what goes by the hour, as no profile of this machine was measured" if untimed else ""
    return [f"  estimate: {items_text(items)}{left_out}"]


def training_tokens(trials: Sequence[Trial], store: SnapshotStorage, reader: Reader) -> float:
    """Count tokens, padding left out, that are still to be trained on: in characters, of which `reader` knows how
    many make a token.

    Raises:
        MissingData: the benchmark's training data is not at hand.
    """
    lineages = {trial.training_id: trial.lineages() for trial in _trainings(trials)}
    lengths: dict[Any, float] = {}
    tokens = 0.0
    for trial, position in _missing_stages(trials, lineages, store.lineages()).values():
        batch_size, rows = trial.settings.training.batch_size, trial.rows_learned(position)
        for i in rows:
            key = trial.tasks[i].name, trial.settings.benchmark
            lengths[key] = lengths.get(key) or _tokens_per_row(trial, i, reader)
            epochs = trial.steps(position) / math.ceil(sum(rows.values()) / batch_size)
            tokens += epochs * rows[i] * lengths[key]
    return tokens


def _tokens_per_row(trial: Trial, position: int, reader: Reader) -> float:
    """Mean length of a task's training rows, prompts cut where they are too long."""
    b, task = trial.settings.benchmark, trial.tasks[position]
    rows = load_examples(trial.spec, task, "train", b)
    prompts = ["".join(prompt_parts(trial.spec, task, row.input)) for row in rows]
    each = reader.characters_per_token(prompts) if reader.tokenizer else CHARACTERS_PER_TOKEN
    tokens = (min(len(prompt) / each, b.max_source_length) for prompt in prompts)
    return (sum(tokens) + sum(len(row.target) for row in rows) / each) / len(rows)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"
