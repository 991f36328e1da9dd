"""A trial in which every setting is resolved."""

from __future__ import annotations

from helpers.methods import OPTIONS
from helpers.sweeps import tiny
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.plan import expand

TASKS = ["mood", "ticket"]


def method_group(method):
    """The `method:` group of a sweep file on the tiny backbones."""
    return {"name": method, **OPTIONS.get(method, {})}


def trial_of(method):
    """A trial on two tasks in which every setting is resolved."""
    changes = {
        "trial__method": method_group(method),
        "trial__benchmark": {"name": "builtin", "tasks": TASKS},
        "trial__training": {"learning_rate": 0.05, "epochs": 1, "batch_size": 4},
    }
    (trial,) = expand(parse_sweep(tiny(**changes, search={}), "test"))
    return trial
