"""Expand a sweep into trials, and group trials into packs: without torch, in well under two seconds.

Identities are hashes of content, never of a position in a file:

    trial id      every setting, of the sweep file and of the benchmark's file, that can change a trial's scores
    training id   the part that training reads: trials that share it train once
    lineage       one snapshot: the settings, data and seed of its stage, and the earlier snapshots that it reads
    row key       one row of scores: its snapshots, the test data, and all that answering and scoring read

Data files, backbone folders and hub commits are identified once, when a trial is planned. Later reads check that they
have not changed.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from latent_sweep.backbones.families import sizes
from latent_sweep.backbones.folder_checks import folder_faults
from latent_sweep.backbones.identity import backbone_identity, resolved_backbone
from latent_sweep.backbones.registry import PACKAGES, REGISTRY, BackboneSettings, describe, family_of
from latent_sweep.data.loaders import count_examples, data_digest, source_digest, truncation_identity
from latent_sweep.data.probes import NO_PROBES, ProbeSettings, read_probes
from latent_sweep.data.prompts import CUE, cue_of, template_identity
from latent_sweep.data.schema import (
    BenchmarkSettings,
    BenchmarkSpec,
    Split,
    TaskSpec,
    load_benchmark,
    resolved_benchmark,
    scoring_metric,
    target_length,
    task_sequence,
)
from latent_sweep.errors import ConfigError, clause, fault_report
from latent_sweep.labels import label_paths
from latent_sweep.memo import memo_scope, memoized
from latent_sweep.methods import checked, method_class, source_of
from latent_sweep.methods.protocol import EarlierRows, Method, MethodSettings
from latent_sweep.metrics.answers import metric_source
from latent_sweep.routing.gaussian import ROUTED, RouterSettings, unread_settings
from latent_sweep.settings import (
    Settings,
    canonical_json,
    content_hash,
    filled,
    flatten,
    json_list,
    json_object,
    text_hash,
)
from latent_sweep.settings.faults import validation_faults
from latent_sweep.storage import versions
from latent_sweep.storage.failures import Phase
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.trial_files import AHEAD, TrialFiles
from latent_sweep.sweep.config import Draw, Sweep, trial_settings
from latent_sweep.sweep.matching import Matching
from latent_sweep.sweep.schema import TrainingSettings, TrialSettings, WrittenTrial

PROTOCOL: Mapping[str, Mapping[str, Any]] = {
    "t5": dict(learning_rate=3e-4, batch_size=8, epochs=30),
    "llama": dict(learning_rate=5e-5, batch_size=4, epochs=15),
    # the paper has no backbones of this size; a few dozen steps at this rate learn a task on a CPU
    **{name: dict(learning_rate=4e-3, batch_size=8, epochs=2) for name in PACKAGES},
}
"""Defaults of `training:` by backbone family, from the paper's appendix "Training" (A29, A30)."""

SOURCE_LENGTHS: Mapping[str, int] = {"t5": 512, "llama": 1024, **dict.fromkeys(PACKAGES, 512)}
"""Longest prompt in tokens, by backbone family (A27)."""

MOST_CORNERS = 500

SPLITS: tuple[Split, ...] = ("train", "test")
"""Splits with data files; validation examples are held out of the training examples."""


@dataclass(frozen=True)
class Trial:
    """One point of the search space with every setting resolved; nothing is looked up later."""

    trial_id: str
    training_id: str
    settings: TrialSettings
    values: Mapping[str, Any]
    """The settings that vary in the sweep and that this trial reads, by dotted path."""
    tasks: tuple[TaskSpec, ...]
    spec: BenchmarkSpec
    """The benchmark at planning time, as are all fields below."""
    backbone: Mapping[str, Any]
    method_source: str | None
    metric_sources: Mapping[str, str]
    sources: Mapping[tuple[str, str], str | None]
    """`source_digest` of the data by task and split (`train` or `test`); None if it is not on this machine."""

    @property
    def name(self) -> str:
        values = label_paths(self.values)
        return f"{values} [{self.trial_id}]" if values else self.trial_id

    def method(self) -> Method:
        """Return the method without a backbone: it can plan, as with `learns_from`, but not train."""
        return method_class(self.settings.method.name)(self.settings.method)

    @property
    def _method_source(self) -> dict[str, str]:
        return {} if self.method_source is None else {"source": self.method_source}

    def rows_learned(self, position: int) -> dict[int, int]:
        """Count the training examples of a stage, for each of its tasks by position."""
        s, learned = self.settings, self._learned[position]
        return _count_learned(self.spec, self.tasks, s.benchmark, s.training.select == "best_validation", learned)

    def steps(self, position: int) -> int:
        rows = self.rows_learned(position)
        return self.settings.training.step_count(sum(rows.values()) + self.rows_replayed(position), len(rows))

    def rows_replayed(self, position: int) -> int:
        return self.method().replayed_rows(position, sum(self.rows_learned(position).values()))

    @property
    def _learned(self) -> list[Sequence[int]]:
        return _learned_from(self.settings.method, len(self.tasks))

    def earlier_rows(self) -> EarlierRows:
        return _earlier_rows(self.settings.method, len(self.tasks))

    def lineages(self) -> tuple[str, ...]:
        """Return the lineage of each task's snapshot; MissingData without its training data."""
        return self._lineages

    @cached_property
    def _lineages(self) -> tuple[str, ...]:
        return _lineages(self)

    def stage_contents(self) -> list[dict[str, Any]]:
        """Return all that can change each task's snapshot, with the lineages of its parents."""
        return [{name: json.loads(text) for name, text in content.items()} for content in self._stage_contents()]

    def _stage_contents(self) -> list[dict[str, str]]:
        """Return `stage_contents` with each part as JSON text, so that parts that trials share are serialized once."""
        s, method = self.settings, self.method()
        carve = s.training.select == "best_validation"
        names = [canonical_json(task.name) for task in self.tasks]
        data = [canonical_json(self.data_digest_of(task, "train", carve)) for task in self.tasks]
        common = _common_to_stages(self) | {"seed": canonical_json(s.seed)}
        settings = _stage_settings(s.method, len(self.tasks))
        contents: list[dict[str, str]] = []
        lineages: list[str] = []
        changes_rows = method.replays or method.virtual_tokens(len(self.tasks)) > 0
        for position, learned in enumerate(self._learned):
            stage = {
                "tasks": json_list(names[i] for i in learned),
                "data": json_list(data[i] for i in learned),
                "settings": settings[position],
                "parents": json_list(lineages[:position] if method.reads_history(position) else []),
                # a plugin method may read its position; built-in methods that do report it in `stage_identity`
                **({} if self.method_source is None else {"position": str(position)}),
                **({"max_steps": '"for each task"'} if len(learned) > 1 and s.training.max_steps else {}),
                **({"held_out": '"as they are asked"'} if changes_rows and carve else {}),
            }
            # a stage that learns nothing keeps the snapshot before it
            contents.append(common | stage if learned or not contents else contents[-1])
            lineages.append(f'"{text_hash(json_object(contents[-1]))}"')
        return contents

    def row_keys(self) -> tuple[str, ...]:
        """Return a key for each row of the score matrix, of all that its scores depend on."""
        return self._row_keys

    @cached_property
    def _row_keys(self) -> tuple[str, ...]:
        return self._keys(_test_contents(self), {"scoring": canonical_json(versions.SCORING)})

    def answer_keys(self) -> tuple[str, ...]:
        """Return a key for the answers of each row, independent of the metric."""
        return self._keys(_test_digests(self), {})

    def _keys(self, tests: Sequence[str], scoring: Mapping[str, str]) -> tuple[str, ...]:
        """Hash, for each stage, its snapshots, how they answer, and the entries in `tests` of the tasks seen."""
        s = self.settings
        lineages = [f'"{lineage}"' for lineage in self.lineages()]
        common = _common_to_rows(self) | {"seed": canonical_json(s.seed), **scoring}
        # a covariance of all tasks reads later snapshots too (A16)
        of_all = s.router.combine in ROUTED and s.router.cov.refresh == "final"
        common["tasks"] = json_list(lineages) if of_all else "null"
        seen = [(json_list(lineages[:n]), json_list(tests[:n])) for n in range(1, len(tests) + 1)]
        return tuple(text_hash(json_object(common | {"snapshots": own, "tests": t})) for own, t in seen)

    def files(self, sweep: SweepFolder) -> TrialFiles:
        return TrialFiles(sweep, self.trial_id, [task.name for task in self.tasks], self.row_keys())

    def is_complete(self, files: TrialFiles, forward_transfer: bool, probes: ProbeSettings = NO_PROBES) -> bool:
        """Return whether nothing is left to run: with forward transfer, also the answers to tasks to come."""
        ahead = forward_transfer and learns_in_turn(self.lineages())
        also = [AHEAD] * ahead + (self.probe_files(probes) if probes else [])
        return files.complete and files.has(also)

    def probe_files(self, probes: ProbeSettings) -> list[str]:
        stages = probes.stages(len(self.tasks))
        return [probe.file(stages) for probe in _probes(probes)]

    def source(self, task: TaskSpec, split: Split) -> str | None:
        of_test = split == "test" and self.settings.benchmark.score_on == "test"
        return self.sources[task.name, "test" if of_test else "train"]

    def data_digest_of(self, task: TaskSpec, split: Split, carve_validation: bool = False) -> str:
        s = self.settings.benchmark
        source = self.source(task, split)
        return _data_digest(self.spec, task, split, s, carve_validation, source)


_probes = memoized(lambda settings: settings)(read_probes)


_data_digest = memoized(lambda *parts: parts)(data_digest)


@memoized(lambda *parts: parts)
def _learned_from(settings: MethodSettings, count: int) -> list[Sequence[int]]:
    method = method_class(settings.name)(settings)
    return [method.learns_from(position, count) for position in range(count)]


@memoized(lambda *parts: parts)
def _earlier_rows(settings: MethodSettings, count: int) -> EarlierRows:
    return checked.earlier_rows(method_class(settings.name)(settings), count)


@memoized(lambda *parts: parts)
def _count_learned(
    spec: BenchmarkSpec, tasks: Sequence[TaskSpec], b: BenchmarkSettings, carve: bool, learned: Sequence[int]
) -> dict[int, int]:
    return {i: count_examples(spec, tasks[i], "train", b, carve) for i in learned}


def _stage_parts(trial: Trial) -> tuple[Any, ...]:
    """Return what the lineages of a trial's stages depend on, apart from its seed and data."""
    s = trial.settings
    return s.method, s.training, s.benchmark, trial.backbone, trial.method_source


@memoized(lambda trial: (trial.settings.seed, trial.spec, trial.tasks, trial.sources, *_stage_parts(trial)))
def _lineages(trial: Trial) -> tuple[str, ...]:
    return tuple(text_hash(json_object(content)) for content in trial._stage_contents())


@memoized(_stage_parts)
def _common_to_stages(trial: Trial) -> dict[str, str]:
    s = trial.settings
    common = {
        "engine": versions.TRAINING,
        "tokens": versions.TOKENS,
        "method": {"name": s.method.name, "version": trial.method().version} | trial._method_source,
        "backbone": trial.backbone,
        "training": s.training.training_identity(),
        "max_source_length": s.benchmark.max_source_length,
        "max_target_length": s.benchmark.max_target_length,
        "truncation": truncation_identity(s.benchmark),
        "bos": s.benchmark.bos,
        **({"chat": True} if s.benchmark.chat else {}),  # the template is the tokenizer's
    }
    return {name: canonical_json(part) for name, part in common.items()}


@memoized(lambda *parts: parts)
def _stage_settings(settings: MethodSettings, count: int) -> list[str]:
    method = method_class(settings.name)(settings)
    try:
        return [canonical_json(method.stage_identity(position)) for position in range(count)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"method {settings.name}: stage_identity gave what cannot be written as JSON: {clause(error)}. "
            "Expected numbers that are finite, texts, booleans, None, and lists and dicts of them"
        ) from error


def _row_parts(trial: Trial) -> tuple[Any, ...]:
    s = trial.settings
    return s.router, s.method, s.evaluation, trial.spec, trial.method_source


@memoized(_row_parts)
def _common_to_rows(trial: Trial) -> dict[str, str]:
    s = trial.settings
    common = {
        "decoding": versions.DECODING,
        "router": router_identity(s.router),
        "routing": _routing_versions(s.router.combine),
        "method": s.method.answer_identity(trial.method_source) | trial._method_source,
        "evaluation": s.evaluation.identity(),
        "stop": list(trial.spec.stop),
    }
    return {name: canonical_json(part) for name, part in common.items()}


def _test_parts(trial: Trial) -> tuple[Any, ...]:
    return trial.settings.benchmark, trial.spec, trial.tasks, trial.sources, trial.metric_sources


@memoized(_test_parts)
def _test_digests(trial: Trial) -> list[str]:
    return [canonical_json(trial.data_digest_of(task, "test")) for task in trial.tasks]


@memoized(_test_parts)
def _test_contents(trial: Trial) -> list[str]:
    b, tests = trial.settings.benchmark, []
    for task in trial.tasks:
        metric = scoring_metric(b, task)
        code = [trial.metric_sources[metric]] if metric in trial.metric_sources else []
        stop = [] if task.stop in (None, trial.spec.stop) else [{"stop": task.stop}]
        tests.append(canonical_json([trial.data_digest_of(task, "test"), metric, b.references, *code, *stop]))
    return tests


def learns_in_turn(lineages: Sequence[str]) -> bool:
    """Return whether every stage after the first learns a task, and there is one."""
    return len(lineages) > 1 and all(a != b for a, b in itertools.pairwise(lineages))


@dataclass(frozen=True)
class Run:
    """One training, with the trials that share it: they differ only in inference settings."""

    trials: tuple[Trial, ...]
    largest_rank: int
    """Of any trial that adapts the same projections; they share factors of this rank."""

    @property
    def training_id(self) -> str:
        return self.trials[0].training_id


@dataclass(frozen=True)
class Pack:
    """The work of one worker: runs that learn side by side, in one forward pass of a shared backbone."""

    runs: tuple[Run, ...]
    halved: frozenset[Phase] = frozenset()
    """Phases that use half the examples per pass after running out of memory."""

    @property
    def pack_id(self) -> str:
        ids = [run.training_id for run in self.runs]
        return ids[0] if len(ids) == 1 else content_hash(ids)

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(trial for run in self.runs for trial in run.trials)

    @property
    def tasks(self) -> tuple[TaskSpec, ...]:
        return self.trials[0].tasks


def router_identity(router: RouterSettings) -> dict[str, Any]:
    """Return the router settings that inference reads: only `combine` unless it uses the posterior."""
    return router.identity() if router.combine in ROUTED else {"combine": router.combine}


def _routing_versions(mode: str) -> list[int] | None:
    if mode in ROUTED:
        return [versions.POOLING, versions.RECORDS]
    return [versions.RECORDS] if mode == "ngram" else None


@memo_scope()
def expand(
    sweep: Sweep,
    selected: Callable[[WrittenTrial], Mapping[str, Any]] | None = None,
    at: Sequence[Mapping[str, Any]] | None = None,
) -> list[Trial]:
    """Return the distinct trials of a sweep: grid x random draws, with defaults resolved.

    Args:
        selected: returns the settings that tuning selected for a trial, by dotted path; see `selected_values`.
        at: points to plan instead.

    Raises:
        ConfigError: lists the faults of all points.
    """
    trials: dict[str, Trial] = {}
    faults: list[str] = []
    places: dict[str, str] = {}
    matching = Matching() if sweep.match is not None else None
    extremes = dict(sweep.grid) | {axis: draw.extremes for axis, draw in sweep.draws.items()}
    leaves = (flatten(axis, value).items() for axis, values in extremes.items() for value in values)
    numbers = {path for path, value in itertools.chain.from_iterable(leaves) if type(value) in (int, float)}
    for point in points(sweep) if at is None else at:
        try:
            written = trial_settings(sweep, point)
            if selected is not None:
                point = {**point, **selected(written)}
                written = trial_settings(sweep, point)
            if matching is not None and (values := _matched(matching, written)):
                point = {**point, **values}
                written = trial_settings(sweep, point)
            trial = plan_trial(written, point, sorted(numbers - point.keys()))
        except ConfigError as error:
            faults.append(str(error))
            continue
        first = trials.setdefault(trial.trial_id, trial)
        if first is not trial and first.sources != trial.sources:
            folders = " and ".join(str(one.settings.benchmark.data_dir) for one in (first, trial))
            faults.append(
                f"benchmark.data_dir: {folders} have different data of one benchmark, {trial.spec.name!r}, but "
                "trials do not differ by folder; give each benchmark its own name, or use another sweep"
            )
        name, place = trial.spec.name, trial.settings.benchmark.name
        if places.setdefault(name, place) != place:  # benchmarks are identified by name
            faults.append(f"benchmark.name: {places[name]} and {place} both have the name {name!r}; rename one")
        faults += trial_faults(trial)
    if faults:
        raise fault_report(sweep.source, faults)
    return list(trials.values())


def _matched(matching: Matching, written: WrittenTrial) -> dict[str, int]:
    settings = resolve(written)
    return matching.values(method_class(written.method.name), settings.method, written.method, settings.backbone)


def count_points(sweep: Sweep) -> int:
    return len(points(sweep))


def pack(trials: Sequence[Trial], together: int | Sequence[str] | Literal["auto"] = 1) -> list[Pack]:
    """Group trials by training, and trainings into packs.

    Args:
        together: `run.pack`: a number of trainings, or the axes whose values learn side by side. `auto` packs all that
            can; `latent_sweep.training.packing` splits them later. Trainings that cannot share a forward pass (with
            another method, backbone or task sequence, or dropout) never share a pack.
    """
    ranks: dict[Any, int] = {}
    for trial in trials:
        adapted = _adapted(trial)
        ranks[adapted] = max(ranks.get(adapted, 0), trial.method().rank())
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.training_id, []).append(trial)
    runs = [Run(tuple(group), ranks[_adapted(group[0])]) for group in groups.values()]
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(_pack_key(run, together), []).append(run)
    size = together if isinstance(together, int) else max(1, len(runs))
    return [Pack(tuple(group[i : i + size])) for group in alike.values() for i in range(0, len(group), size)]


def _adapted(trial: Trial) -> tuple[str, Any]:
    return trial.settings.backbone.name, trial.settings.backbone.targets


def _pack_key(run: Run, together: int | Sequence[str]) -> str:
    trial = run.trials[0]
    s = trial.settings
    if not trial.method().packable or s.training.backbone_dropout:  # dropout masks are drawn for a whole batch
        return trial.training_id
    shared = {
        "method": s.method.name,
        "backbone": s.backbone.identity(),
        "benchmark": s.benchmark.training_identity(),
        "tasks": [task.name for task in trial.tasks],
        "gradient_checkpointing": s.training.gradient_checkpointing,
    }
    if isinstance(together, int) or together == "auto":
        return content_hash(shared)
    own = {"seed": s.seed}
    own |= flatten("method", s.method.training_identity()) | flatten("training", s.training.training_identity())
    return content_hash(shared | {path: value for path, value in own.items() if path not in together})


def resolve(written: WrittenTrial) -> TrialSettings:
    kind, name = method_class(written.method.name), written.backbone.name
    family = name if name in PROTOCOL else family_of(name)
    backbone = resolved_backbone(written.backbone)
    spec = load_benchmark(written.benchmark.name)
    benchmark = resolved_benchmark(written.benchmark, spec, SOURCE_LENGTHS[family])
    group: tuple[str, type[Settings]] = "method", kind.settings_class
    try:
        method = kind.resolve(written.method, name, spec.name)
        group = "training", TrainingSettings
        own = kind.training_defaults(method, name, spec.name)
        training = filled(written.training, TrainingSettings, own, PROTOCOL[family])
    except ValidationError as error:  # a written setting conflicts with a default
        faults = validation_faults(error, group[1])
        named = [f"{group[0]}.{fault}".replace(".the file: ", ": ", 1) for fault in faults]
        raise ConfigError("; ".join(named)) from error
    return TrialSettings(
        method=method,
        router=filled(
            written.router,
            RouterSettings,
            kind.router_defaults(method, name, spec.name),
            {"combine": kind(method).combinations[0]},
        ).as_read(),
        backbone=backbone,
        benchmark=benchmark,
        training=training,
        evaluation=written.evaluation,
        seed=written.seed,
    )


def points(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the points of the search space, by dotted path; random ones stand in for a searcher's."""
    source = random.Random(sweep.run.search.seed)
    if not sweep.drawn:
        return points_at(sweep, {})
    draws = (
        {axis: _draw(draw, source) for axis, draw in sweep.drawn.items()} for _ in range(sweep.run.search.num_samples)
    )
    return list(itertools.chain.from_iterable(points_at(sweep, values) for values in draws))


def points_at(sweep: Sweep, drawn: Mapping[str, Any]) -> list[dict[str, Any]]:
    return combinations({**sweep.crossed, **{axis: (value,) for axis, value in drawn.items()}})


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the values of these axes, each by dotted path."""
    return [
        {path: leaf for axis, value in zip(axes, values, strict=True) for path, leaf in flatten(axis, value).items()}
        for values in itertools.product(*axes.values())
    ]


def corners(sweep: Sweep) -> list[dict[str, Any]]:
    """Return points that try the extremes of a searcher's axes: all combinations or, if they are many, each value."""
    extremes = {axis: draw.extremes for axis, draw in sweep.drawn.items()}
    if math.prod(map(len, extremes.values())) <= MOST_CORNERS:
        drawn = [dict(zip(extremes, values, strict=True)) for values in itertools.product(*extremes.values())]
    else:
        first = {axis: values[0] for axis, values in extremes.items()}
        drawn = [first | {axis: value} for axis, values in extremes.items() for value in values]
    return list(itertools.chain.from_iterable(points_at(sweep, values) for values in drawn))


def _draw(draw: Draw, source: random.Random) -> Any:
    values = draw.values
    if draw.kind == "choice":
        return source.choice(values)
    if draw.kind == "randint":
        return source.randint(values[0], values[1])
    if draw.kind == "loguniform":
        return math.exp(source.uniform(math.log(values[0]), math.log(values[1])))
    return draw.snapped(source.uniform(values[0], values[1]))


def plan_trial(written: WrittenTrial, point: Iterable[str], elsewhere: Iterable[str] = ()) -> Trial:
    """Resolve the defaults of one trial, and look up its backbone, data and code.

    Args:
        point: paths of the settings that vary.
        elsewhere: paths of numbers that vary only in other trials; `values` includes those that this trial reads.
    """
    s = resolve(written)
    stream = _stream(s.benchmark)
    backbone, backbone_text = _backbone(s.backbone)
    source = _source_of(s.method.name)
    training = json_object(
        {
            "method": _method_text(s.method, source),
            "backbone": backbone_text,
            "benchmark": stream.training,
            "training": _text(s.training, Settings.training_identity),
            "seed": canonical_json(s.seed),
        }
    )
    inference = json_object(
        {
            "method": _text(s.method, Settings.inference_identity),
            "router": _text(s.router, router_identity),
            "benchmark": stream.inference,
            "evaluation": _text(s.evaluation, Settings.identity),
        }
    )
    # `values` leaves out router settings that the trial does not read
    reported = [*point, *(path for path in elsewhere if has_setting(s, path) and setting(s, path) is not None)]
    params = router_params(s)
    read = [path for path in reported if is_read(path, params)]
    return Trial(
        trial_id=text_hash(json_list([training, inference])),
        training_id=text_hash(training),
        settings=s,
        values={path: setting(s, path) for path in read},
        tasks=stream.tasks,
        spec=stream.spec,
        backbone=backbone,
        method_source=source,
        metric_sources=stream.metric_sources,
        sources=stream.sources,
    )


_source_of = memoized(lambda name: (name,))(source_of)


class _Stream(NamedTuple):
    """The parts of a trial that follow from `benchmark:`; see `Trial`."""

    spec: BenchmarkSpec
    tasks: tuple[TaskSpec, ...]
    metric_sources: Mapping[str, str]
    sources: Mapping[tuple[str, str], str | None]
    training: str
    inference: str


@memoized(lambda settings: (settings,))
def _backbone(settings: BackboneSettings) -> tuple[dict[str, Any], str]:
    identity = backbone_identity(settings)
    return identity, canonical_json(identity)


@memoized(lambda settings, source: (settings, source))
def _method_text(settings: MethodSettings, source: str | None) -> str:
    return canonical_json(settings.training_identity() | ({} if source is None else {"source": source}))


@memoized(lambda settings, identity: (settings, identity))
def _text(settings: Any, identity: Callable[[Any], dict[str, Any]]) -> str:
    return canonical_json(identity(settings))


@memoized(lambda settings: (settings,))
def _stream(settings: BenchmarkSettings) -> _Stream:
    spec = load_benchmark(settings.name)
    tasks = task_sequence(settings, spec)
    # the benchmark's file is part of the identity, not the path of its folder
    named = {"name": spec.name, "version": spec.version, "prompt": spec.prompt}
    named |= {"tasks": [[task.name, task.instruction] for task in tasks]}
    if decisive := {task.name: decides for task in tasks if task.source and (decides := task.source.decides())}:
        named["sources"] = decisive
    if cues := {task.name: cue for task in tasks if (cue := cue_of(spec, task)) != CUE}:
        named["cues"] = cues
    if templates := {task.name: template for task in tasks if (template := template_identity(spec, task))}:
        named["templates"] = templates
    lengths = {task.name: target_length(settings, task) for task in tasks}
    if shorter := {name: length for name, length in lengths.items() if length < settings.max_target_length}:
        named["target_lengths"] = shorter
    sources = {(t.name, split): source_digest(spec, t, split, settings) for t in tasks for split in SPLITS}
    scored: dict[str, Any] = {"stop": list(spec.stop)}
    if stops := {task.name: task.stop for task in tasks if task.stop not in (None, spec.stop)}:
        scored["stops"] = stops
    metrics = [scoring_metric(settings, task) for task in tasks]
    scored["metrics"] = metrics
    metric_sources = {metric: digest for metric in metrics if (digest := metric_source(metric))}
    if metric_sources:
        scored["metric_sources"] = metric_sources
    if settings.prompts.definition == "paraphrase":
        scored["paraphrases"] = [list(task.paraphrases) for task in tasks]
    return _Stream(
        spec=spec,
        tasks=tasks,
        metric_sources=metric_sources,
        sources=sources,
        training=canonical_json(settings.training_identity() | named),
        inference=canonical_json(settings.identity() | named | scored),
    )


def router_params(settings: TrialSettings) -> dict[str, Any]:
    """Return the settings that decide which settings of the router are read, by dotted path."""
    return {f"router.{name}": getattr(settings.router, name) for name in ("combine", "head", "shrinkage")}


def is_read(path: str, params: Mapping[str, Any]) -> bool:
    """Return whether a trial with these settings reads a setting: the router's head and combination decide."""
    if not path.startswith("router.") or path == "router.combine":
        return True
    if params.get("router.combine") not in ROUTED:
        return False
    unread = unread_settings(params.get("router.head") or "gaussian", params.get("router.shrinkage") or "epsilon")
    return not f"{path}.".startswith(tuple(f"router.{name}." for name in unread))


def values_read(trial: TrialFolder) -> dict[str, Any]:
    """Return a trial's values of the settings that vary, by dotted path; omitted settings have their defaults.

    None stands for a setting that it does not read, and for null. Planning has filled in the numbers that it reads.
    """
    values = dict(trial.values)
    for path, value in trial.values.items():
        resolved = trial.params.get(path)
        # `benchmark.tasks: null` means all tasks of the order and stays null
        if (
            value is None
            and type(resolved) not in (int, float)
            and path != "benchmark.tasks"
            and is_read(path, trial.params)
        ):
            values[path] = resolved
    return values


def has_setting(settings: TrialSettings, path: str) -> bool:
    try:
        setting(settings, path)
    except AttributeError:
        return False
    return True


def setting(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = getattr(settings, name)
    return list(settings) if isinstance(settings, tuple) else settings


def trial_faults(trial: Trial) -> list[str]:
    s = trial.settings
    faults = _backbone_faults(trial) + _definition_faults(trial)
    if s.router.combine not in trial.method().combinations:
        possible = ", ".join(trial.method().combinations)
        faults.append(f"router.combine: found {s.router.combine!r}; snapshots of {s.method.name} answer as {possible}")
    if s.benchmark.score_on == "validation" and s.training.select == "best_validation":
        faults.append(
            "training.select: found best_validation, but benchmark.score_on: validation (as in tune:) scores the same "
            "held-out examples that it would select epochs by; use last"
        )
    if s.router.combine in ROUTED:
        faults += _router_faults(trial) + _head_faults(trial)
    _row_counts(trial, "test")  # raises if test examples cannot be read
    return faults


@memoized(lambda trial, split: (trial.settings.benchmark, split))
def _row_counts(trial: Trial, split: Split) -> list[int]:
    return [count_examples(trial.spec, task, split, trial.settings.benchmark) for task in trial.tasks]


@memoized(lambda trial: (trial.settings.backbone, trial.settings.method, trial.settings.training))
def _backbone_faults(trial: Trial) -> list[str]:
    s, faults = trial.settings, []
    described = describe(s.backbone)
    if described is None and "/" not in s.backbone.name:
        near = difflib.get_close_matches(s.backbone.name, REGISTRY, n=1, cutoff=0.8)
        faults += [f"backbone.name: found {s.backbone.name!r}; did you mean {near[0]!r}?"] if near else []
    faults += folder_faults(s.backbone)
    if described is not None:
        shapes = described.adapted(s.backbone)
        name, shape = min(shapes.items(), key=lambda item: min(item[1]))
        if trial.method().rank() > min(shape):
            faults.append(
                f"method.rank: found {trial.method().rank()}; {s.backbone.name}'s {name} is {shape[0]} x {shape[1]}, "
                f"so at most {min(shape)} is possible"
            )
        faults += trial.method().shape_faults(shapes)
        if s.training.backbone_dropout and not described.traits.dropout:
            faults.append(
                f"training.backbone_dropout: found {s.training.backbone_dropout:g}, but {s.backbone.name} has no "
                "dropout; leave it out"
            )
    return faults


@memoized(lambda trial: (trial.settings.router, trial.settings.benchmark))
def _router_faults(trial: Trial) -> list[str]:
    s, counts = trial.settings, _row_counts(trial, "train")
    rows, position = min((rows, position) for position, rows in enumerate(counts))
    wanted, task = s.router.components, trial.tasks[position]
    if wanted <= rows:
        return _scatter_faults(s.router, counts)
    advice = f"use at most {rows:,}"
    if s.benchmark.train_per_task is not None:
        whole = s.benchmark.model_copy(update={"train_per_task": None})
        enough = all(count_examples(trial.spec, task, "train", whole) >= wanted for task in trial.tasks)
        advice += f", or raise benchmark.train_per_task to {wanted:,}" if enough else ""
    return [f"router.components: found {wanted:,}, but task {task.name} has {rows:,} training examples; {advice}"]


def _head_faults(trial: Trial) -> list[str]:
    """List settings of the router that do not fit together, the method or the backbone."""
    router, faults = trial.settings.router, []
    if router.head == "klda" and router.projection is None:
        faults.append("router.projection: found none; router.head: klda needs a number of random features, e.g. 1000")
    if router.shrinkage == "ledoit_wolf":
        if router.cov.center == "component":
            faults.append("router.cov.center: found component; with router.shrinkage: ledoit_wolf use task")
        if router.gmm.whiten_first or router.gmm.em_iters:
            faults.append(
                "router.shrinkage: found ledoit_wolf; router.gmm.whiten_first and router.gmm.em_iters need epsilon"
            )
    if router.abstain is not None:
        if router.head == "ridge":
            faults.append("router.abstain: found a quantile, but router.head: ridge has no distances; leave it out")
        if router.cov.center == "component":
            faults.append("router.cov.center: found component; with router.abstain use task")
        if trial.method().virtual_tokens(len(trial.tasks)):
            faults.append(
                f"router.abstain: found a quantile, but {trial.settings.method.name} adds tokens to every prompt, "
                "which the bare backbone cannot read; leave it out"
            )
    return faults if router.features == "embeddings" else faults + _layer_faults(trial, router.features)


def _layer_faults(trial: Trial, layer: int) -> list[str]:
    router, faults = trial.settings.router, []
    described = describe(trial.settings.backbone)
    if described is not None and described.traits.stacks:
        blocks = sizes(described.traits, described.config)["blocks"]
        if layer > blocks:
            faults.append(f"router.features: found layer {layer}; expected 0 to {blocks}, or -1 for the last")
    if not router.pool.mask_pad:
        faults.append("router.pool.mask_pad: found false; hidden states are read without padding, so use true")
    if not router.pool.truncate:
        faults.append("router.pool.truncate: found false; hidden states are those of what the model reads, so use true")
    return faults


def _scatter_faults(router: RouterSettings, counts: Sequence[int]) -> list[str]:
    """List why the first stage would have no covariance: too few examples for `ddof`, or each equals its own mean."""
    pooled = counts[: router.cov.pooled_tasks(1, len(counts))]
    alone = router.cov.center == "component" and not router.gmm.em_iters  # every example may be its own component
    most = router.components if alone else 1
    if router.cov.ddof == "tasks" and sum(pooled) <= len(pooled):
        return [
            f"router.cov.ddof: found tasks, but {len(pooled)} tasks with {sum(pooled)} training examples leave no "
            "degree of freedom; use none, or raise benchmark.train_per_task"
        ]
    relative = router.epsilon_mode == "relative" and router.head != "ridge"  # the ridge's also has tasks apart
    if (relative or router.shrinkage == "ledoit_wolf") and max(pooled) <= most:
        of = "" if most == 1 else f" and router.components = {most}"
        return [
            f"router.epsilon_mode: found relative, but with {most} training examples per task{of} each example is its "
            "own mean, so the covariance is zero; use absolute, or raise benchmark.train_per_task"
        ]
    return []


@memoized(lambda trial: (trial.settings.benchmark,))
def _definition_faults(trial: Trial) -> list[str]:
    wanted, name = trial.settings.benchmark.prompts.definition, trial.settings.benchmark.name
    instructed = [task for task in trial.tasks if task.instruction.strip()]
    if wanted == "verbatim":
        return []
    if trial.settings.benchmark.score_on == "validation":
        return [
            f"benchmark.prompts.definition: found {wanted!r} with benchmark.score_on: validation, but held-out "
            "examples keep the definition that is trained with; use verbatim, or score_on: test"
        ]
    if not instructed:
        return [
            f"benchmark.prompts.definition: found {wanted!r}, but no task of {trial.spec.name} has an instruction; "
            "use verbatim"
        ]
    lacking = [task.name for task in instructed if wanted == "paraphrase" and not task.paraphrases]
    if not lacking:
        return []
    return [
        f"benchmark.prompts.definition: found 'paraphrase', but {', '.join(lacking)} of benchmark {name} have none. "
        "Add `paraphrases: [...]` to each such task in the benchmark's file: three or more texts that rephrase its "
        "`instruction` and name the same labels. Or use verbatim or none"
    ]
