"""Learns single stages on rows of random bytes, and finds what a stage reads and does not declare.

Equal lineages must mean equal snapshots, to the byte: a stored snapshot is taken for every trial of its lineage. Each
setting of a method is changed in turn. Where the lineage stays what it was, the stage declares that it does not read
the setting; it is learned with both values, and must leave the same bytes behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor

from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.backbones.identity import backbone_identity
from latent_sweep.backbones.loading import Backbone
from latent_sweep.backbones.outputs import Example
from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import Learner, MethodContext, TaskData
from latent_sweep.settings import Settings, as_written, flatten
from latent_sweep.storage.snapshots import TaskCheckpoint
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.plan import Trial
from latent_sweep.sweep.schema import TrainingSettings
from latent_sweep.training.engine import Engine
from latent_sweep.training.loop import train_pack
from latent_sweep.training.trainer import Trainer, TrainingSummary, derived_seed

Change = tuple[str, Settings, Trial]
"""Path of a changed setting of the method, the method's settings with it as they are written, and the trial with it."""


# --- one stage -------------------------------------------------------------------------------------------------------


def random_rows(count: int, seed: int = 0, shortest: int = 3, longest: int = 12, targets: int = 4) -> list[Example]:
    """Tokenised rows of random bytes with prompts and targets of different lengths; targets end with EOS."""
    source = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=source))

    rows: list[Example] = []
    for _ in range(count):
        prompt = [number(4, 259) for _ in range(number(shortest, longest))]
        target = [*(number(4, 259) for _ in range(number(1, targets))), 2]
        rows.append({"prompt_ids": prompt, "input_ids": prompt[1:], "target_ids": target})
    return rows


def task_data(
    rows: Sequence[Example] = (), position: int = 0, seed: int = 0, n_tasks: int = 3, name: str = "task"
) -> TaskData:
    """A task as a method sees it; what is drawn depends on seed, name and purpose."""

    def generator(purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(seed, name, purpose))

    return TaskData(name, position, n_tasks, rows, generator)


def learn(
    learner: Learner,
    rows: Sequence[Example],
    backbone: Backbone,
    bank: AdapterBank,
    settings: TrainingSettings,
    checkpoint: Path,
    seed_parts: Sequence[Any] = (0, "task"),
    **others: Any,
) -> TrainingSummary:
    """Train one learner alone.

    Args:
        checkpoint: the file of its checkpoints.
        others: of `Trainer`, e.g. `validation` and `on_step`.

    Raises:
        NonFiniteLoss: its loss or gradient became NaN or infinite.
        RuntimeError: no gradient reaches the first adapted projection.
    """
    at = TaskCheckpoint(Storage(checkpoint.parent), checkpoint)
    (outcome,) = train_pack(
        [Trainer(learner, rows, settings, seed_parts, at, **others)], Engine(backbone=backbone), bank
    )
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class Stages:
    """Learns single stages of trials on a backbone; the snapshots of earlier ones are learned once for each lineage."""

    def __init__(self, backbone: Backbone, bank: AdapterBank, folder: Path):
        self._backbone, self._bank, self._folder = backbone, bank, folder
        self._known: dict[str, Mapping[str, Tensor]] = {}
        self._number = itertools.count()

    def snapshot(
        self,
        trial: Trial,
        position: int,
        longer: int = 0,
        largest_rank: int = 16,
        validation: Sequence[Example] = (),
    ) -> Mapping[str, Tensor]:
        """Tensors that a stage leaves behind, of six rows in two batches.

        Args:
            longer: how many tasks more the trial has.
            largest_rank: of the sweep, as if it had trials of larger ranks.
            validation: held-out rows, by which the best epoch is chosen where there are some.
        """
        s, task = trial.settings, trial.tasks[position]
        method = type(trial.method())(s.method, MethodContext(self._backbone, self._bank, self._folder, largest_rank))
        reads = range(position if method.reads_history(position) else 0)
        history = [self.remembered(trial, earlier) for earlier in reads]
        rows = random_rows(6, seed=position)
        data = task_data(rows, position, s.seed, len(trial.tasks) + longer, task.name)
        learner = method.begin_task(data, history)
        checkpoint = self._folder / f"checkpoint-{next(self._number)}"
        seed_parts, held_out = (s.seed, task.name), {"validation": validation}
        learn(learner, rows, self._backbone, self._bank, s.training, checkpoint, seed_parts, **held_out)
        return learner.finish()

    def remembered(self, trial: Trial, position: int) -> Mapping[str, Tensor]:
        """The snapshot of a stage, learned once for each lineage."""
        lineage = trial.lineages()[position]
        if lineage not in self._known:
            self._known[lineage] = self.snapshot(trial, position)
        return self._known[lineage]

    def differs(self, base: Trial, position: int, trial: Trial, longer: int = 0, largest_rank: int = 16) -> bool:
        """Whether the same stage leaves other bytes behind in this trial, or under these circumstances."""
        try:
            snapshot = self.snapshot(trial, position, longer, largest_rank)
        except RuntimeError:  # with a scale of zero there is nothing to learn
            return True
        return save(dict(snapshot)) != save(dict(self.remembered(base, position)))


# --- other values ----------------------------------------------------------------------------------------------------


def candidates(annotation: Any, value: Any) -> list[Any]:
    """Values to try for a field of this type: every literal, and for numbers zero, which switches off, and another."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return candidates(arguments[0], value)
    if kind is Literal:
        return list(arguments)
    if kind in (Union, types.UnionType):
        return [candidate for argument in arguments for candidate in candidates(argument, value)]
    number = value if isinstance(value, (int, float)) else 1
    found: dict[Any, list[Any]] = {bool: [not value], int: [0, int(number) + 1], float: [0.0, 0.5 + number / 3]}
    return found.get(annotation, [])


def variants(group: Settings) -> list[tuple[str, Settings]]:
    """The group with one field changed, by dotted path of the field: the allowed ones of all candidates."""
    found = []
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, Settings):
            others: list[tuple[str, Any]] = [(f"{name}.{path}", inner) for path, inner in variants(value)]
        else:
            others = [(name, other) for other in candidates(field.annotation, value) if other != value]
        for path, other in others:
            try:
                found.append((path, type(group).model_validate(dict(group) | {name: other})))
            except ValidationError:
                continue
    return found


def leaves(group: Settings) -> set[str]:
    """Dotted paths of the fields of a group."""
    found = set()
    for name in type(group).model_fields:
        value = getattr(group, name)
        found |= {f"{name}.{path}" for path in leaves(value)} if isinstance(value, Settings) else {name}
    return found


def with_group(trial: Trial, name: str, group: Settings) -> Trial:
    """The trial with other settings in one group."""
    settings = trial.settings.model_copy(update={name: group})
    return dataclasses.replace(trial, settings=settings, backbone=backbone_identity(settings.backbone))


# --- what a stage declares -------------------------------------------------------------------------------------------


def undeclared(stages: Stages, trial: Trial, written: Mapping[str, Any], position: int) -> set[str]:
    """Find the settings of a method that change what a stage leaves behind and not its lineage, by dotted path.

    Args:
        written: the trial's `method:` group as a sweep file has it.
    """
    found: set[str] = set()
    for settings, start in _starts(trial, written, position):
        if not start.method().learns_from(position, len(start.tasks)):
            continue
        lineage = start.lineages()[position]
        same = [(path, other) for path, _, other in _changed(start, settings) if other.lineages()[position] == lineage]
        found |= {path for path, other in same if path not in found and stages.differs(start, position, other)}
    return found


def untried(trial: Trial, written: Mapping[str, Any]) -> set[str]:
    """Find the settings of a method that `undeclared` has no other value for, by dotted path; the name is one."""
    starts = _starts(trial, written, 1)
    groups = [group for settings, start in starts for group in (settings, start.settings.method)]
    tried = {path for group in groups for path, _ in variants(group)}
    return leaves(trial.settings.method) - tried - {"name"}


def _starts(trial: Trial, written: Mapping[str, Any], position: int) -> list[tuple[Settings, Trial]]:
    """Trials to change settings of, with their written settings, one for each set of settings that a stage declares.

    The settings as they are, and neighbours: without a penalty, say, how it is measured is left out.
    """
    settings = as_written(type(trial.settings.method)).model_validate(dict(written))
    found: dict[Any, tuple[Settings, Trial]] = {}
    for _, group, other in [("", settings, trial), *_changed(trial, settings)]:
        content = other.stage_contents()[position]
        declared = frozenset(flatten("", content["settings"])), bool(content["parents"])
        found.setdefault(declared, (group, other))
    return list(found.values())


def _changed(trial: Trial, written: Settings) -> list[Change]:
    """The trial with one setting of its method changed, as written or once resolved."""
    kind, s = type(trial.method()), trial.settings

    def resolved(group: Settings) -> Settings:
        return kind.resolve(group, s.backbone.name, s.benchmark.name)

    found = {}
    for path, group in [*variants(resolved(written)), *variants(written)]:
        with contextlib.suppress(ConfigError):  # the method has no such preset, say
            found[path, resolved(group)] = group
    changes = [(path, group, with_group(trial, "method", complete)) for (path, complete), group in found.items()]
    return [change for change in changes if change[2].settings != s]
