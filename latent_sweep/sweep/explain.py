"""The text of `latent-sweep plan --explain`: for every stage, who shares it, and which settings prevent sharing.

A stage is compared with those of the trials that differ in a single axis of the search, and one that is not stored with
the most similar one in the storage. Stages with equal explanations are grouped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from latent_sweep.labels import format_value
from latent_sweep.settings import canonical_json, content_hash, flatten
from latent_sweep.storage.snapshots import SnapshotStorage
from latent_sweep.sweep.config import Sweep
from latent_sweep.sweep.plan_text import common_values, count_text
from latent_sweep.sweep.trial import Trial

SHOWN = 6

EARLIER = "the tasks before it"
"""Names a difference in the earlier snapshots alone."""

ROWS = "training rows"
STORE = "the storage"

_NAMES = {
    "engine": "version of the training loop",
    "data": ROWS,
    "settings": "method",  # next to its name, version and a plugin's digest
    **{name: f"benchmark.{name}" for name in ("max_source_length", "max_target_length", "truncation", "bos")},
}
"""Parts of a stage's content whose path differs from that in a sweep file."""


@dataclass(frozen=True)
class Stage:
    """The identity of one snapshot, and its parts."""

    lineage: str
    tasks: tuple[str, ...]
    fields: Mapping[str, str]
    """JSON of everything else that it reads, by dotted path, as in a sweep file if possible."""
    parents: tuple[str, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Stage:
        named = [(_NAMES.get(key, key), part) for key, part in content.items() if key not in ("tasks", "parents")]
        leaves = chain.from_iterable(flatten(name, part).items() for name, part in named)
        fields = {path: canonical_json(value) for path, value in leaves}
        return cls(content_hash(content), tuple(content["tasks"]), fields, tuple(content["parents"]))


@dataclass(frozen=True)
class Comparison:
    """A stage and the stages of other points of one axis that learn the same tasks, or the most similar one stored."""

    axis: str
    stage: Stage
    others: tuple[Stage, ...]
    """One for each other point of the axis, with all else equal."""
    causes: tuple[str, ...]
    """Fields that differ between stages that are not equal."""

    @property
    def points(self) -> int:
        return 1 + len(self.others)

    @property
    def shared(self) -> int:
        return 1 + sum(other.lineage == self.stage.lineage for other in self.others)

    @property
    def reason(self) -> tuple[Any, ...]:
        return self.axis, self.shared, self.points, self.causes


class Stages:
    """The distinct stages of a sweep, and the stages each is compared with; MissingData without training data."""

    def __init__(self, sweep: Sweep, trials: Sequence[Trial], store: SnapshotStorage):
        # the settings of each axis; random draws vary together, so they are one axis
        self.axes = {axis: _paths(axis, values) for axis, values in sweep.crossed.items()}
        if sweep.drawn:
            drawn = [_paths(axis, draw.extremes) for axis, draw in sweep.drawn.items()]
            self.axes["the random draws"] = tuple(chain.from_iterable(drawn))
        trainings = {trial.training_id: trial for trial in trials}
        self._histories = {key: [Stage.of(c) for c in trial.stage_contents()] for key, trial in trainings.items()}
        self.users: dict[str, list[tuple[Trial, int]]] = {}
        """By lineage, the trials that learn or share the stage, with its position."""
        self._points: dict[tuple[str, str], list[Trial]] = {}
        for trial in trials:
            for position, stage in enumerate(self._histories[trial.training_id]):
                self.users.setdefault(stage.lineage, []).append((trial, position))
            for axis in self.axes:
                self._points.setdefault((axis, self._all_else(axis, trial)), []).append(trial)
        self.stored = store.lineages()
        self._remembered = _remembered(store)
        self._known = {s.lineage: s for s in chain(self._remembered, *self._histories.values())}

    def compare(self, lineage: str) -> list[Comparison]:
        stage, (trial, _) = self._known[lineage], self.users[lineage][0]
        comparisons = []
        for axis, paths in self.axes.items():
            if others := self._others(stage, axis, trial):
                comparisons.append(Comparison(axis, stage, others, self._causes(stage, others, paths)))
        alike = [other for other in self._remembered if other.tasks == stage.tasks]
        if lineage not in self.stored and alike:
            nearest = min(alike, key=lambda other: len(self._causes(stage, [other])))
            comparisons.append(Comparison(STORE, stage, (nearest,), self._causes(stage, [nearest])))
        return comparisons

    def reads_earlier(self, lineage: str) -> bool:
        return bool(self._known[lineage].parents)

    def _others(self, stage: Stage, axis: str, trial: Trial) -> tuple[Stage, ...]:
        points = [point for point in self._points[axis, self._all_else(axis, trial)] if point is not trial]
        alike = ([o for o in self._histories[point.training_id] if o.tasks == stage.tasks] for point in points)
        return tuple(stages[0] for stages in alike if stages)

    def _all_else(self, axis: str, trial: Trial) -> str:
        paths = self.axes[axis]
        return canonical_json({path: value for path, value in trial.values.items() if path not in paths})

    def _causes(self, stage: Stage, others: Iterable[Stage], paths: Sequence[str] = ()) -> tuple[str, ...]:
        apart = [other for other in others if other.lineage != stage.lineage]
        return tuple(dict.fromkeys(chain.from_iterable(self._differing(stage, other, paths) for other in apart)))

    def _differing(self, stage: Stage, other: Stage, paths: Sequence[str]) -> list[str]:
        """Return the fields that differ, or else those of the first earlier stage that differs.

        Fields that only one of the two reads are named only if the axis sets them, or nothing else differs: lambda = 0
        reads none of the penalty's settings, but the cause is lambda.
        """
        differing = [p for p in {**stage.fields, **other.fields} if stage.fields.get(p) != other.fields.get(p)]
        if paths and bool(stage.parents) != bool(other.parents) and not set(paths) & set(differing):
            return [EARLIER]  # one of them is a first task
        both = [p for p in differing if p in paths or (p in stage.fields and p in other.fields)]
        if both or differing:
            return both or differing
        for mine, theirs in zip(stage.parents, other.parents, strict=False):
            if mine != theirs:
                return self._earlier(mine, theirs, paths)
        return [EARLIER]

    def _earlier(self, mine: str, theirs: str, paths: Sequence[str]) -> list[str]:
        first, second = self._known.get(mine), self._known.get(theirs)
        if first is None or second is None or first.tasks != second.tasks:
            return [EARLIER]
        causes = self._differing(first, second, paths)
        return causes if EARLIER in causes else [f"{cause} of {EARLIER}" for cause in causes]


def _paths(axis: str, values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for value in values for path in flatten(axis, value)))


def _remembered(store: SnapshotStorage) -> list[Stage]:
    stages = []
    for path in sorted(store.folder.glob("*.json")):
        try:
            stages.append(Stage.of(json.loads(path.read_text(encoding="utf-8"))["facts"]["stage"]))
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ):  # a run quarantines and reports corrupt ones
            continue
    return stages


# --- the text --------------------------------------------------------------------------------------------------------


def explain_plan(sweep: Sweep, trials: Sequence[Trial], store: SnapshotStorage) -> str:
    stages = Stages(sweep, trials, store)
    compared = {lineage: stages.compare(lineage) for lineage in stages.users}
    by_axis = {axis: [c for each in compared.values() for c in each if c.axis == axis] for axis in stages.axes}
    free = [axis for axis, each in by_axis.items() if each and all(c.shared == c.points for c in each)]
    groups: dict[Any, list[str]] = {}
    for lineage, comparisons in compared.items():
        compared[lineage] = [c for c in comparisons if c.axis not in free]
        group = _state(stages, lineage), *(c.reason for c in compared[lineage])
        groups.setdefault(group, []).append(lineage)

    width = max(map(len, [*stages.axes, STORE]))
    lines = ["which stages are shared"]
    for axis in free:
        lines.append(f"  {axis:<{width}}  {max(c.points for c in by_axis[axis])} values cost no training")
    for lineages in groups.values():
        lines += ["", f"  {_title(stages, lineages, trials)}, {_state(stages, lineages[0])}"]
        columns = zip(*(compared[lineage] for lineage in lineages), strict=True)
        lines += [f"    {column[0].axis:<{width}}  {_verdict(column)}" for column in columns]
    return "\n".join(lines)


def _title(stages: Stages, lineages: Sequence[str], trials: Sequence[Trial]) -> str:
    users = [user for lineage in lineages for user in stages.users[lineage]]
    concerned = list({trial.trial_id: trial for trial, _ in users}.values())
    everywhere = common_values(trials)
    common = {path: value for path, value in common_values(concerned).items() if path not in everywhere}
    where = "".join(f", {path}={format_value(value)}" for path, value in common.items())
    places = _ranges(sorted({position + 1 for _, position in users}))
    return f"{places}{where}: {count_text(len(lineages), 'stage')} for {count_text(len(concerned), 'trial')}"


def _state(stages: Stages, lineage: str) -> str:
    state = "stored" if lineage in stages.stored else "to train"
    if all(position == 0 for _, position in stages.users[lineage]):
        return state
    return f"{state}, reads {'the' if stages.reads_earlier(lineage) else 'no'} earlier tasks"


def _verdict(column: Sequence[Comparison]) -> str:
    first = column[0]
    if first.shared == first.points:
        return f"shared by all {first.points} values, not read"
    causes = _listed([_cause(cause, column) for cause in first.causes], "; ")
    if first.axis == STORE:
        return f"has the task with other settings: {causes}"
    shared = f"shared by {first.shared} of {first.points} values, " if first.shared > 1 else ""
    return f"{shared}not shared: {causes}"


def _cause(cause: str, column: Sequence[Comparison]) -> str:
    name = "" if cause == column[0].axis else cause
    if cause == ROWS or not any(cause in stage.fields for c in column for stage in (c.stage, *c.others)):
        return name  # a digest means nothing to a reader
    mine = list(dict.fromkeys(_value(c.stage, cause) for c in column))
    others = dict.fromkeys(_value(other, cause) for c in column for other in c.others)
    elsewhere = _listed([value for value in others if value not in mine])
    return f"{name} {_listed(mine)}{f' (others {elsewhere})' if elsewhere else ''}".strip()


def _value(stage: Stage, path: str) -> str:
    return format_value(json.loads(stage.fields[path])) if path in stage.fields else "not read"


def _listed(texts: Sequence[str], separator: str = ", ") -> str:
    more = [f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return separator.join([*texts[:SHOWN], *more])


def _ranges(numbers: Sequence[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"task{'s' if len(numbers) > 1 else ''} {', '.join(spans)}"
