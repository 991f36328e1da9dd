"""The fields of a group of settings, and other values for each of them."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from helpers.methods import OPTIONS
from helpers.sweeps import tiny
from latent_sweep.settings import Settings
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.plan import expand

TASKS = ["mood", "ticket"]


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
    return {bool: [not value], int: [0, int(number) + 1], float: [0.0, 0.5 + number / 3]}.get(annotation, [])


def variants(group: Settings) -> list[tuple[str, Settings]]:
    """The group with one field changed, by dotted path of the field: the allowed ones of all candidates."""
    found = []
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, Settings):
            others = [(f"{name}.{path}", inner) for path, inner in variants(value)]
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
    fields = {name: getattr(group, name) for name in type(group).model_fields}
    inner = {
        f"{name}.{path}" for name, value in fields.items() if isinstance(value, Settings) for path in leaves(value)
    }
    return inner | {name for name, value in fields.items() if not isinstance(value, Settings)}


def trial_of(method):
    """A trial on two tasks in which every setting is resolved."""
    changes = {
        "trial__method": {"name": method, **OPTIONS.get(method, {})},
        "trial__benchmark": {"name": "builtin", "tasks": TASKS},
        "trial__training": {"learning_rate": 0.05, "epochs": 1, "batch_size": 4},
    }
    (trial,) = expand(parse_sweep(tiny(**changes, search={}), "test"))
    return trial
