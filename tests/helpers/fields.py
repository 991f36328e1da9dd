"""A trial with all settings resolved."""

from __future__ import annotations

from helpers.methods import OPTIONS
from helpers.sweeps import tiny
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.plan import expand

TASKS = ["mood", "ticket"]


def method_group(method):
    """Return the `method:` group of a sweep file for the tiny backbones."""
    return {"name": method, **OPTIONS.get(method, {})}


def trial_of(method):
    """Return a trial on two tasks with all settings resolved."""
    changes = {
        "trial__method": method_group(method),
        "trial__benchmark": {"name": "builtin", "tasks": TASKS},
        "trial__training": {"learning_rate": 0.05, "epochs": 1, "batch_size": 4},
    }
    (trial,) = expand(parse_sweep(tiny(**changes, search={}), "test"))
    return trial
