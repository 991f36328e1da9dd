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
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from latent_sweep.data.loaders import count_examples, load_examples
from latent_sweep.data.probes import NO_PROBES, ProbeSettings, read_probes
from latent_sweep.data.prompts import prompt_parts
from latent_sweep.data.schema import Split, stop_of
from latent_sweep.errors import MissingData, StorageError
from latent_sweep.memo import memo_scope, memoized
from latent_sweep.routing.gaussian import ROUTED, RouterSettings
from latent_sweep.settings import content_hash
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.predictions import cached_stages
from latent_sweep.storage.snapshots import SnapshotStorage
from latent_sweep.storage.storage import Storage
from latent_sweep.storage.trial_files import AHEAD, recorded_files, recorded_rows
from latent_sweep.sweep.plan import SPLITS
from latent_sweep.sweep.planning import Plan
from latent_sweep.sweep.prices import Item, Writing, bucket_items, hours_of
from latent_sweep.sweep.profile import Profile, profile_path, read_profile
from latent_sweep.sweep.reader import Reader, reader_of
from latent_sweep.sweep.shapes import shape_of
from latent_sweep.sweep.trial import Trial, learns_in_turn, router_identity
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
    trials: Sequence[Trial],
    folder: SweepFolder,
    forward_transfer: bool = False,
    probes: ProbeSettings = NO_PROBES,
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
    rows_of = [_recorded_rows(trial, folder) for trial in trials]
    unfinished = [trial for trial, rows in zip(trials, rows_of, strict=True) if rows < len(trial.tasks)]
    distinct = frozenset().union(*lineages.values())
    stored = folder.snapshots.lineages()
    missing = _missing_stages(unfinished, lineages, stored)
    by_method = {trial.settings.method.name: trial for trial, _ in missing.values()}
    answers = 0
    least, most, done = _Passes(), _Passes(), _Passes()
    generated = cached_stages(folder.storage.folder)
    written: Counter[str] = Counter()
    for trial, recorded in zip(trials, rows_of, strict=True):
        own = lineages[trial.training_id]
        passes = _StagePasses.of(trial, own)
        answers += sum(passes.seen)
        if forward_transfer and learns_in_turn(own):
            ahead = _passes_ahead(trial, own)
            answers += sum(sum(tests.values()) for _, tests in ahead.least)
            for total, before in ((least, ahead.least), (most, ahead.most)):
                for snapshots, tests in before:
                    total.add(snapshots, tests)
                    if AHEAD in _recorded_files(trial, folder):
                        done.add(snapshots, tests)
        if recorded < len(trial.tasks):
            written["trials"] += 1
            written["rows"] += len(trial.tasks) - recorded
            written["files"] += sum(range(recorded + 1, len(trial.tasks) + 1))
            written["answers"] += sum(passes.seen[recorded:])
            written["predictions"] += passes.seen[-1]
        keys = trial.answer_keys() if generated and recorded < len(trial.tasks) else ()
        answered = {stage for stage, key in enumerate(keys) if key in generated} | set(range(recorded))
        for total, of_trial in ((least, passes.least), (most, passes.most)):
            for stage, snapshots, tests in of_trial:
                total.add(snapshots, tests)
                if stage in answered:
                    done.add(snapshots, tests)
    feature_rows, feature_tokens = _features_read(unfinished)
    return Reuse(
        distinct=len(distinct),
        stored=len(distinct & stored),
        to_learn=len(missing),
        steps=sum(trial.steps(position) for trial, position in missing.values()),
        adding=tuple(name for name, trial in by_method.items() if trial.method().replays),
        answers=answers,
        passes=Span(least.count(), most.count()),
        open_passes=Span(least.count(done), most.count(done)),
        open_answers=Span(least.answers(done), most.answers(done)),
        feature_rows=feature_rows,
        feature_tokens=feature_tokens,
        writing=Writing(
            trainings=len(trainings_of(unfinished)),
            stages=len(missing),
            numbers=sum(
                _parameter_count(trial) for trial, position in missing.values() if trial.rows_learned(position)
            ),
            checkpoints=sum(  # none after the last step
                max(0, trial.steps(position) - 1) // trial.settings.training.checkpoint_every
                for trial, position in missing.values()
            ),
            **{name: written[name] for name in ("trials", "rows", "files", "answers", "predictions")},
        ),
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


# --- passes ----------------------------------------------------------------------------------------------------------


Tests = Mapping[str, int]
"""Numbers of test examples by a key for all that their answers depend on apart from the snapshots."""


class _Passes:
    """Distinct passes: which tests are answered by which snapshots."""

    def __init__(self) -> None:
        self._tests: dict[str, dict[str, int]] = {}

    def add(self, snapshots: str, tests: Tests) -> None:
        self._tests.setdefault(snapshots, {}).update(tests)

    def count(self, without: _Passes | None = None) -> int:
        return sum(len(tests) for tests in self._open(without))

    def answers(self, without: _Passes | None = None) -> int:
        return sum(sum(tests.values()) for tests in self._open(without))

    def _open(self, without: _Passes | None) -> Iterator[Tests]:
        for snapshots, tests in self._tests.items():
            done = {} if without is None else without._tests.get(snapshots, {})
            yield {test: count for test, count in tests.items() if test not in done} if done else tests


class _StagePasses(NamedTuple):
    """The passes of one trial: for each stage, the snapshots that answer and the tests."""

    seen: Sequence[int]
    """Test examples of each stage, if it answered all tasks seen."""
    least: Sequence[tuple[int, str, Tests]]
    """If the router always picks the right task."""
    most: Sequence[tuple[int, str, Tests]]
    """If it weights the whole history."""

    @classmethod
    def of(cls, trial: Trial, lineages: Sequence[str]) -> _StagePasses:
        mode = trial.settings.router.combine
        rows, seen, alone = _tests(trial)
        if mode == "last":
            stages = [(stage, newest, seen[stage]) for stage, newest in enumerate(lineages)]
            return cls(rows, stages, stages)
        sure = [(stage, snapshot, alone[stage]) for stage, snapshot in enumerate(lineages)]
        if mode == "oracle":
            return cls(rows, sure, sure)
        weights = _weights_key(trial, lineages)
        spread = [(stage, f"{weights} {' '.join(lineages[: stage + 1])}", tests) for stage, tests in enumerate(seen)]
        if mode != "gates":  # a single snapshot has weight one
            spread[0] = 0, lineages[0], seen[0]
        return cls(rows, sure if mode in (*ROUTED, "ngram") else spread, spread)


class _PassesAhead(NamedTuple):
    """The passes for the forward transfer of one trial: the snapshots that answer, and the tests."""

    least: Sequence[tuple[str, Tests]]
    most: Sequence[tuple[str, Tests]]


_UNTOUCHED = "untouched"


def _passes_ahead(trial: Trial, lineages: Sequence[str]) -> _PassesAhead:
    """Return each later task's pass by the snapshots before it, and by the backbone, whose answers all trials share."""
    _, _, alone = _tests(trial)
    bare = [(_UNTOUCHED, tests) for tests in alone[1:]]
    before = list(enumerate(alone[1:], start=1))
    mode = trial.settings.router.combine
    if mode == "oracle":
        return _PassesAhead(bare, bare)
    single = [(lineages[n - 1], tests) for n, tests in before]
    weights = _weights_key(trial, lineages)
    spread = [(f"{weights} {' '.join(lineages[:n])}", tests) for n, tests in before]
    least = single if mode in ("last", *ROUTED, "ngram") else spread
    return _PassesAhead(bare + least, bare + (single if mode == "last" else spread))


def _test_parts(trial: Trial) -> tuple[Any, ...]:
    s = trial.settings
    return s.benchmark, s.evaluation, s.method, trial.spec, trial.tasks, trial.sources


@memoized(_test_parts)
def _tests(trial: Trial) -> tuple[list[int], list[Tests], list[Tests]]:
    s = trial.settings
    decoding = [s.evaluation.identity(), s.benchmark.max_target_length, s.method.inference_identity()]
    digests = [[trial.data_digest_of(task, "test"), stop_of(trial.spec, task)] for task in trial.tasks]
    counts = [count_examples(trial.spec, task, "test", s.benchmark) for task in trial.tasks]
    tests = [(content_hash([*digest, *decoding]), count) for digest, count in zip(digests, counts, strict=True)]
    seen: list[Tests] = [dict(tests[: stage + 1]) for stage in range(len(tests))]
    return list(itertools.accumulate(counts)), seen, [{test: count} for test, count in tests]


def _weights_key(trial: Trial, lineages: Sequence[str]) -> str:
    router, seed = trial.settings.router, trial.settings.seed
    if router.combine not in ROUTED:
        return router.combine
    # a covariance of all tasks reads later snapshots too (A16)
    return _weights_hash(router, seed, tuple(lineages) if router.cov.refresh == "final" else None)


@memoized(lambda router, seed, lineages: (router, seed, repr(lineages)))
def _weights_hash(router: RouterSettings, seed: int, lineages: tuple[str, ...] | None) -> str:
    return content_hash([router_identity(router), seed, lineages])


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
