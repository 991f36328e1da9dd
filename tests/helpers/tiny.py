"""Tiny backbones, rows, learners and packs. Random weights, nothing downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from helpers.sweeps import tiny
from latent_sweep import testing
from latent_sweep.learn.engine import Engine

FAMILIES = ("tiny-llama", "tiny-t5")


def load_tiny(name: str, dtype: str = "float32"):
    """A tiny backbone of its own, for a test that edits its weights."""
    from latent_sweep.backbones.known import BackboneSettings
    from latent_sweep.backbones.loading import load_backbone

    return load_backbone(BackboneSettings(name=name, dtype=dtype, device="cpu"))


def bank_of(backbone):
    """A bank of a backbone; `remove()` takes its hooks off again."""
    from latent_sweep.adapters.bank import AdapterBank

    return AdapterBank(backbone.targets, backbone.prompt_embedding)


def task_data(rows: Sequence = (), position: int = 0, seed: int = 0, n_tasks: int = 3, name: str = "task"):
    """A task as a method sees it; what is drawn depends on seed, name and purpose."""
    import torch

    from latent_sweep.learn.training import derived_seed
    from latent_sweep.methods.protocol import TaskData

    def generator(purpose: str):
        return torch.Generator().manual_seed(derived_seed(seed, name, purpose))

    return TaskData(name, position, n_tasks, rows, generator)


def learn(learner, rows, backbone, bank, settings, checkpoint, seed_parts=(0, "task"), validation=(), on_step=None):
    """Train one learner alone; returns its summary or raises what stopped it."""
    from latent_sweep.learn.training import TaskTraining, train_pack

    on_step = on_step or (lambda step, steps, losses: None)
    lesson = TaskTraining(learner, rows, settings, seed_parts, checkpoint_at(checkpoint), validation, on_step)
    (outcome,) = train_pack([lesson], Engine(backbone=backbone), bank)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def random_rows(count: int, seed: int = 0, shortest: int = 3, longest: int = 12, targets: int = 4) -> list[dict]:
    """Tokenised rows of random bytes with prompts and targets of different lengths; targets end with EOS."""
    import torch

    source = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=source))

    return [
        {
            "prompt_ids": [number(4, 259) for _ in range(number(shortest, longest))],
            "target_ids": [*(number(4, 259) for _ in range(number(1, targets))), 2],
        }
        for _ in range(count)
    ]


def learns(event) -> bool:
    """Whether an event of a run is an optimizer step."""
    return getattr(event, "doing", None) == "learning"


class Runs(testing.Runs):
    """Runs packs of tiny sweeps below one folder."""

    def packs(self, **changes):
        """The packs of `tiny(**changes)`."""
        return self.packs_of(tiny(**changes))


HALTING_STEPS = 24
"""Of sweeps on `two_cpus` whose tasks have so many steps, the first one halts in its second task."""


def checkpoint_at(path: Path):
    """A checkpoint inside a task, at this path of a plain folder."""
    from latent_sweep.store.snapshots import TaskCheckpoint
    from latent_sweep.store.storage import Storage

    return TaskCheckpoint(Storage(path.parent), path)


def journal_at(path: Path):
    """A journal at this path of a plain folder."""
    from latent_sweep.store.journal import Journal
    from latent_sweep.store.storage import Storage

    return Journal(Storage(path.parent), path)
