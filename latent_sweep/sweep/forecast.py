"""Estimate the work, time and cost of a sweep, and how much of it earlier runs have done. Needs no torch.

Two kinds of work are shared. A *stage*, one task learned in one trial, is trained once for all trials with its lineage.
A *pass*, the test examples of one task answered at one stage, runs once for all stages that answer it with the same
snapshots and weights. A router's weights are known only once it runs, so the number of passes is then a range: fewest
if the router always picks the right task, most if every history has weights of its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from latent_sweep.data.loaders import count_examples, load_examples
from latent_sweep.data.probes import NO_PROBES, ProbeSettings, read_probes
from latent_sweep.data.prompts import prompt_parts
from latent_sweep.data.schema import Split
from latent_sweep.errors import MissingData, StorageError
from latent_sweep.memo import memo_scope, memoized
from latent_sweep.routing.settings import ROUTED
from latent_sweep.settings import content_hash
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.predictions import cached_stages
from latent_sweep.storage.snapshots import SnapshotStorage
from latent_sweep.storage.storage import Storage
from latent_sweep.storage.trial_files import AHEAD, recorded_files, recorded_rows
from latent_sweep.sweep.passes import Passes, StagePasses, passes_ahead, tests_of
from latent_sweep.sweep.plan import SPLITS
from latent_sweep.sweep.planning import Plan
from latent_sweep.sweep.prices import Item, Writing, bucket_items, hours_of
from latent_sweep.sweep.profile import Profile, profile_path, read_profile
from latent_sweep.sweep.reader import Reader, reader_of
from latent_sweep.sweep.shapes import shape_of
from latent_sweep.sweep.trial import Trial, learns_in_turn
from latent_sweep.sweep.tuning import tuning_lines

CHARACTERS_PER_TOKEN = 4.0
"""Used without a tokenizer: that of T5 and SmolLM2 on both published benchmarks, within 10 % on average."""


class Span(NamedTuple):
    """A number within a range."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class Reuse:
    """A sweep's work, with equal work counted once, and the part that is left."""

    distinct: int
    stored: int
    """Of those, already in the storage."""
    to_learn: int
    """Of the others, those that an unfinished trial needs."""
    steps: int
    adding: tuple[str, ...]
    """Methods among these that may train on more examples than the tasks have; `steps` leaves these out."""
    answers: int
    """Answers if every trial answered every task seen, at every stage."""
    passes: Span
    open_passes: Span
    """Of those, without recorded rows of score matrices and answers in the generation cache."""
    open_answers: Span
    feature_rows: int
    """Examples that the frozen backbone reads once for `router.features: {layer: N}`, if none is stored."""
    feature_tokens: float
    writing: Writing
    probe_tokens: float = 0.0
    """Tokens of probes that are left to read, about, without those of `unknown_probes`."""
    unknown_probes: tuple[str, ...] = ()
    """Names of the probes of lm-evaluation-harness that are left to read; only the harness knows their texts."""


@dataclass(frozen=True)
class Estimate:
    """The work of a sweep."""

    trials: int
    trainings: int
    stages: int
    """If every trial trained its own."""
    passes: int
    """If every trial answered its own, one for each stage and task seen."""
    reuse: Reuse | None
    """None if the data is not on this machine."""
    missing_data: str | None


@memo_scope()
def estimate(
    trials: Sequence[Trial], folder: SweepFolder, forward_transfer: bool = False, probes: ProbeSettings = NO_PROBES
) -> Estimate:
    """Estimate the work of trials under `run.forward_transfer` and `run.probes`; rows in the folder are done."""
    reuse, missing = None, None
    try:
        tokens, unknown = _probes_left(trials, folder, probes)
        reuse = replace(_reuse(trials, folder, forward_transfer), probe_tokens=tokens, unknown_probes=unknown)
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


def _reuse(trials: Sequence[Trial], folder: SweepFolder, forward_transfer: bool) -> Reuse:
    lineages = {trial.training_id: trial.lineages() for trial in trainings_of(trials)}
    recorded = [(trial, _recorded_rows(trial, folder)) for trial in trials]
    unfinished = [(trial, rows) for trial, rows in recorded if rows < len(trial.tasks)]
    distinct = frozenset().union(*lineages.values())
    stored = folder.snapshots.lineages()
    missing = _missing_stages([trial for trial, _ in unfinished], lineages, stored)
    by_method = {trial.settings.method.name: trial for trial, _ in missing.values()}
    work = _all_passes(recorded, lineages, folder, forward_transfer)
    feature_rows, feature_tokens = _features_read([trial for trial, _ in unfinished])
    return Reuse(
        distinct=len(distinct),
        stored=len(distinct & stored),
        to_learn=len(missing),
        steps=sum(trial.steps(position) for trial, position in missing.values()),
        adding=tuple(name for name, trial in by_method.items() if trial.method().replays),
        answers=work.answers,
        passes=Span(work.least.count(), work.most.count()),
        open_passes=Span(work.least.count(work.done), work.most.count(work.done)),
        open_answers=Span(work.least.answers(work.done), work.most.answers(work.done)),
        feature_rows=feature_rows,
        feature_tokens=feature_tokens,
        writing=_writing(unfinished, list(missing.values())),
    )


@dataclass
class _AllPasses:
    """The passes of all trials."""

    answers: int = 0
    """Answers if every trial answered every task seen, at every stage."""
    least: Passes = field(default_factory=Passes)
    most: Passes = field(default_factory=Passes)
    done: Passes = field(default_factory=Passes)
    """Those with recorded rows, or with answers in the generation cache."""


def _all_passes(
    recorded: Sequence[tuple[Trial, int]],
    lineages: Mapping[str, Sequence[str]],
    folder: SweepFolder,
    forward_transfer: bool,
) -> _AllPasses:
    every, generated = _AllPasses(), cached_stages(folder.storage.folder)
    for trial, rows in recorded:
        own = lineages[trial.training_id]
        passes = StagePasses.of(trial, own)
        every.answers += sum(passes.seen)
        if forward_transfer and learns_in_turn(own):
            ahead, is_done = passes_ahead(trial, own), AHEAD in _recorded_files(trial, folder)
            every.answers += sum(sum(tests.values()) for _, tests in ahead.least)
            for total, before in ((every.least, ahead.least), (every.most, ahead.most)):
                for snapshots, tests in before:
                    total.add(snapshots, tests)
                    if is_done:
                        every.done.add(snapshots, tests)
        keys = trial.answer_keys() if generated and rows < len(trial.tasks) else ()
        answered = {stage for stage, key in enumerate(keys) if key in generated} | set(range(rows))
        for total, of_trial in ((every.least, passes.least), (every.most, passes.most)):
            for stage, snapshots, tests in of_trial:
                total.add(snapshots, tests)
                if stage in answered:
                    every.done.add(snapshots, tests)
    return every


def _writing(unfinished: Sequence[tuple[Trial, int]], missing: Sequence[tuple[Trial, int]]) -> Writing:
    """Count what these trials, with their recorded rows, and these stages will write."""
    left = [tests_of(trial)[0][rows:] for trial, rows in unfinished]
    return Writing(
        trainings=len(trainings_of([trial for trial, _ in unfinished])),
        stages=len(missing),
        numbers=sum(_parameter_count(trial) for trial, position in missing if trial.rows_learned(position)),
        checkpoints=sum(  # none after the last step
            max(0, trial.steps(position) - 1) // trial.settings.training.checkpoint_every for trial, position in missing
        ),
        trials=len(unfinished),
        rows=sum(map(len, left)),
        files=sum(sum(range(rows + 1, len(trial.tasks) + 1)) for trial, rows in unfinished),
        answers=sum(map(sum, left)),
        predictions=sum(seen[-1] for seen in left),
    )


@memoized(lambda trial: (trial.settings.method, trial.settings.backbone))
def _parameter_count(trial: Trial) -> int:
    shape = shape_of(trial.settings.backbone)
    return 0 if shape is None else trial.method().parameter_count(shape.targets, shape["width"])


# --- stages ----------------------------------------------------------------------------------------------------------


def trainings_of(trials: Sequence[Trial]) -> list[Trial]:
    return list({trial.training_id: trial for trial in trials}.values())


def _missing_stages(
    trials: Sequence[Trial], lineages: Mapping[str, Sequence[str]], stored: Collection[str]
) -> dict[str, tuple[Trial, int]]:
    places = {
        lineage: (trial, position)
        for trial in trainings_of(trials)
        for position, lineage in reversed(list(enumerate(lineages[trial.training_id])))
    }
    return {lineage: place for lineage, place in places.items() if lineage not in stored}


def _features_read(trials: Sequence[Trial]) -> tuple[int, float]:
    """Count the distinct examples, and about their tokens, whose hidden states the routers of these trials read."""
    read: dict[str, tuple[int, float]] = {}
    for trial in trials:
        router = trial.settings.router
        if router.combine not in ROUTED or router.features == "embeddings":
            continue
        b, settings = trial.settings.benchmark, [router.features, router.pool.identity(), trial.backbone]
        for position, split in itertools.product(range(len(trial.tasks)), SPLITS):
            key = content_hash([*settings, trial.data_digest_of(trial.tasks[position], split), b.max_source_length])
            if key not in read:
                rows = count_examples(trial.spec, trial.tasks[position], split, b)
                read[key] = rows, rows * _prompt_tokens(trial, position, split)
    return sum(rows for rows, _ in read.values()), sum(tokens for _, tokens in read.values())


def _probes_left(trials: Sequence[Trial], folder: SweepFolder, probes: ProbeSettings) -> tuple[float, tuple[str, ...]]:
    """Return about the tokens of probes that are left to read, and the names of those whose tokens are not known.

    The backbone's own results are shared.
    """
    if not probes:
        return 0.0, ()
    left = [trial for trial in trials if not set(trial.probe_files(probes)) <= _recorded_files(trial, folder)]
    found = read_probes(probes) if left else []
    tokens = sum(probe.characters for probe in found) / CHARACTERS_PER_TOKEN
    backbones = {content_hash(dict(trial.backbone)) for trial in left}
    times = len(backbones) + sum(len(probes.stages(len(trial.tasks))) for trial in left)
    return tokens * times, tuple(probe.name for probe in found if probe.kind == "lm_eval")


@memoized(lambda trial, i, split: (trial.spec, trial.settings.benchmark, trial.settings.router.pool.scope, i, split))
def _prompt_tokens(trial: Trial, i: int, split: Split) -> float:
    b, task = trial.settings.benchmark, trial.tasks[i]
    examples = load_examples(trial.spec, task, split, b)
    if trial.settings.router.pool.scope == "input_only":
        texts = [example.input for example in examples]
    else:
        texts = ["".join(prompt_parts(trial.spec, task, example.input)) for example in examples]
    return sum(min(len(text) / CHARACTERS_PER_TOKEN, b.max_source_length) for text in texts) / max(1, len(texts))


@memoized(lambda trial, folder: (trial, folder))
def _recorded_rows(trial: Trial, folder: SweepFolder) -> int:
    try:
        events = folder.journal(trial.trial_id).read()
    except StorageError:  # a run reports it
        return 0
    return len(recorded_rows(events, trial.row_keys())) if events else 0


@memoized(lambda trial, folder: (trial, folder))
def _recorded_files(trial: Trial, folder: SweepFolder) -> frozenset[str]:
    try:
        return frozenset(recorded_files(folder.journal(trial.trial_id).read()))
    except StorageError:
        return frozenset()


# --- time and cost ---------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The work on one backbone in seconds of one worker, by the speed that a profile gives."""

    profile: Profile
    reader: Reader
    training: float
    evaluation: tuple[float, float]
    """With the router's pass over the examples, if it reads hidden states, and with probes."""


@memo_scope()
def work_of(
    trials: Sequence[Trial],
    folder: SweepFolder,
    estimated: Estimate,
    forward_transfer: bool = False,
    probes: ProbeSettings = NO_PROBES,
) -> dict[tuple[str, str], list[Work]]:
    """Estimate the time by every profile in the storage, by name and precision of each backbone."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.settings.backbone.name, trial.settings.backbone.dtype), []).append(trial)
    work: dict[tuple[str, str], list[Work]] = {}
    for (backbone, dtype), group in groups.items():
        paths = (profile_path(folder.storage.folder, backbone, dtype, device) for device in ("cuda", "cpu"))
        profiles = [profile for profile in map(read_profile, paths) if profile is not None]
        own = estimated if len(groups) == 1 or not profiles else estimate(group, folder, forward_transfer, probes)
        timed = [_work_by(profile, group, folder, own.reuse) for profile in profiles if own.reuse is not None]
        work[backbone, dtype] = timed
    return work


def _work_by(profile: Profile, trials: Sequence[Trial], folder: SweepFolder, reuse: Reuse) -> Work:
    reader = reader_of(trials[0].settings.backbone)
    least, most = (answers / profile.rows_per_second_generate for answers in reuse.open_answers)
    unfinished = [trial for trial in trials if _recorded_rows(trial, folder) < len(trial.tasks)]
    training = training_tokens(unfinished, folder.snapshots, reader) / profile.tokens_per_second_train
    # on a frozen backbone the backward pass costs about as much as the forward pass
    reading = (reuse.feature_tokens + reuse.probe_tokens) / (2 * profile.tokens_per_second_train)
    return Work(profile, reader, training, (least + reading, most + reading))


def costs_of(plan: Plan, estimated: Estimate, work: Mapping[Any, Sequence[Work]], storage: Storage) -> list[Item]:
    run = plan.sweep.run
    device = "cuda" if run.resources.gpus else "cpu"
    fitting = [next((w for w in timed if w.profile.device == device), None) for timed in work.values()]
    fitted = [w for w in fitting if w is not None]
    hours = None
    if fitted and len(fitted) == len(fitting):
        least, most = (sum(w.training + w.evaluation[end] for w in fitted) / 3600 for end in (0, 1))
        hours = least, most
    items = [hours_of(*hours, run.resources, run.prices)] if hours else []
    if storage.is_remote and estimated.reuse is not None:
        items += bucket_items(estimated.reuse.writing, run, hours)
    return items


def training_tokens(trials: Sequence[Trial], store: SnapshotStorage, reader: Reader) -> float:
    """Count the tokens, without padding, that are left to train on, from the lengths of texts in characters."""
    lineages = {trial.training_id: trial.lineages() for trial in trainings_of(trials)}
    lengths: dict[Any, float] = {}
    tokens = 0.0

    def length(trial: Trial, i: int) -> float:
        key = trial.tasks[i].name, trial.settings.benchmark
        lengths[key] = lengths.get(key) or _tokens_per_example(trial, i, reader)
        return lengths[key]

    for trial, position in _missing_stages(trials, lineages, store.lineages()).values():
        counts, steps = trial.rows_learned(position), trial.steps(position)
        own, replayed = sum(counts.values()), trial.rows_replayed(position)
        epochs = steps / math.ceil((own + replayed) / trial.settings.training.batch_size) if own else 0.0
        tokens += sum(epochs * count * length(trial, i) for i, count in counts.items())
        earlier = [trial.rows_learned(i).get(i, 0) for i in range(position)]
        if others := epochs * replayed + steps * trial.method().reference_rows(earlier):
            tokens += others * statistics.fmean(length(trial, i) for i in range(position))
    return tokens


def _tokens_per_example(trial: Trial, position: int, reader: Reader) -> float:
    b, task = trial.settings.benchmark, trial.tasks[position]
    examples = load_examples(trial.spec, task, "train", b)
    prompts = ["".join(prompt_parts(trial.spec, task, example.input)) for example in examples]
    per_token = reader.characters_per_token(prompts) if reader.tokenizer else CHARACTERS_PER_TOKEN
    tokens = (min(len(prompt) / per_token, b.max_source_length) for prompt in prompts)
    return (sum(tokens) + sum(len(example.target) for example in examples) / per_token) / len(examples)


# --- for programs ----------------------------------------------------------------------------------------------------


@memo_scope()
def plan_record(plan: Plan, storage: Storage) -> dict[str, Any]:
    folder = SweepFolder(storage, plan.sweep.name)
    also = plan.sweep.run.forward_transfer, plan.sweep.run.probes
    estimated = estimate(plan.trials, folder, *also)
    reuse = None
    if estimated.reuse is not None:
        spans = {name: value._asdict() for name, value in vars(estimated.reuse).items() if isinstance(value, Span)}
        reuse = {**asdict(estimated.reuse), **spans}
    pack_of = {trial.trial_id: number for number, pack in enumerate(plan.packs) for trial in pack.trials}
    more: dict[str, Any] = {}
    if plan.sweep.is_adaptive:  # random trials stand in for those that the searcher will choose
        more["search"] = plan.sweep.run.search.model_dump(mode="json")
    if plan.tuning is not None:
        selected = tuning_lines(plan.results or ()) or None
        more["tuning"] = {"chosen": selected, "candidates": plan_record(plan.tuning, storage)}
    return {
        "sweep": folder.name,
        "trials": [
            {
                "trial_id": trial.trial_id,
                "training_id": trial.training_id,
                "pack": pack_of[trial.trial_id],
                "values": dict(trial.values),
                "tasks": [task.name for task in trial.tasks],
                "lineages": None if estimated.reuse is None else trial.lineages(),
            }
            for trial in plan.trials
        ],
        "estimate": {**asdict(estimated), "reuse": reuse},
        "costs": [
            item.record() for item in costs_of(plan, estimated, work_of(plan.trials, folder, estimated, *also), storage)
        ],
        "warnings": plan.remarks,
        **more,
    }
