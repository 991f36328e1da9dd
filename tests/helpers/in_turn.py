"""Tiny tasks learned one after another by one method, as a trial does it, without a sweep around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.tiny import learn, random_rows, task_data
from latent_sweep.methods.protocol import MethodContext
from latent_sweep.sweep.schema import TrainingSettings

SMALL = {"rank": 4, "alpha": 8.0, "dropout": 0.0}
"""Settings of the pair for the tiny backbones."""
TRAINING = TrainingSettings(learning_rate=0.02, batch_size=3, epochs=3, checkpoint_every=2)


def method_at_work(kind, backbone, bank, **settings):
    """A method on this backbone; it uses no folder."""
    return kind(kind.settings_class(**SMALL | settings), MethodContext(backbone, bank, Path("unused"), 4))


def begin(method, history=(), rows=(), seed=0):
    """The learner of the task after these snapshots."""
    position = len(history)
    task = task_data(rows or random_rows(7, seed=position), position=position, seed=seed, name=f"task {position}")
    earlier = list(history) if method.reads_history(position) else []
    return method.begin_task(task, earlier)


def lesson(method, history, folder, training=TRAINING, learner=None, **others):
    """Learn the next task; returns its snapshot, the learner and the summary."""
    position, work = len(history), method.context
    learner = learner or begin(method, history)
    rows, checkpoint = random_rows(7, seed=position), folder / f"{position}.safetensors"
    parts = ("seed", position)
    summary = learn(learner, rows, work.backbone, work.bank, training, checkpoint, parts, **others)
    return learner.finish(), learner, summary


LEARNED = {}
"""Snapshots by the backbone, the method and its settings; with the backbone, so that no other one takes its place."""


def learned(method, folder, tasks=3):
    """Snapshots of tasks learned in turn, by the first who asks for them in this process; copies for everybody."""
    backbone = method.context.backbone
    key = id(backbone), type(method), method.settings.model_dump_json()
    _, history = LEARNED.setdefault(key, (backbone, []))
    while len(history) < tasks:
        history.append(lesson(method, history, folder)[0])
        for path in folder.glob("*.safetensors"):
            path.unlink()
    return [{name: tensor.clone() for name, tensor in snapshot.items()} for snapshot in history[:tasks]]


def equal(snapshot, other):
    """Whether two snapshots agree bit for bit."""
    return snapshot.keys() == other.keys() and all(torch.equal(snapshot[name], other[name]) for name in snapshot)


class Cut(BaseException):
    """The worker is lost."""


def check_cut_and_resumed(method, history, folder, step):
    """A lesson that is cut at this step, and begun again from its checkpoint, ends with the same bits."""
    whole, _, summary = lesson(method, history, folder / "whole")

    def lose(done, steps, losses):
        if done == step:
            raise Cut

    with pytest.raises(Cut):
        lesson(method, history, folder / "cut", on_step=lose)
    resumed = []
    again, _, resumed_summary = lesson(
        method, history, folder / "cut", on_step=lambda done, steps, losses: resumed.append(done)
    )
    assert resumed[0] > 1, "it goes on from a checkpoint"
    assert equal(whole, again) and summary == resumed_summary


def check_identity_is_what_training_reads(kind, backbone, bank, folder, change, base=None):
    """Over three tasks, what trains to something else is named otherwise, and what is named otherwise trains to it."""
    base = base or {}
    methods = [method_at_work(kind, backbone, bank, **base | settings) for settings in ({}, change)]
    before, after = (learned(method, folder) for method in methods)
    named_otherwise = False
    for position in range(3):
        one, other = (method.stage_identity(position) for method in methods)
        named_otherwise |= one != other
        assert (not equal(before[position], after[position])) == named_otherwise, f"task {position}"
    assert named_otherwise, "a setting must do something"
