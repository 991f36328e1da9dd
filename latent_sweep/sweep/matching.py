"""`match: parameters`: choose ranks with which all methods of a sweep train equally many parameters per task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from latent_sweep.backbones.families import sizes
from latent_sweep.backbones.registry import BackboneSettings, describe
from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import Method, MethodSettings

TOLERANCE = 0.05
"""Largest relative difference that counts as equal."""
_LONGEST_PROMPT = 10_000


def size_setting(settings: MethodSettings) -> str | None:
    """Return the setting that decides how much a method trains: `rank`, `prompt_length` or None."""
    return next((name for name in ("rank", "prompt_length") if name in type(settings).model_fields), None)


def target_key(settings: MethodSettings, backbone: BackboneSettings) -> tuple[str, ...]:
    """Return what trials of equal sizes have in common.

    Prompts are matched with each other: one with the parameters of a rank would be longer than most texts.
    """
    kind = "prompt" if size_setting(settings) == "prompt_length" else "adapter"
    return backbone.name, str(backbone.targets), kind


class Matching:
    """The targets: by `target_key`, what the first trial that trains anything trains per task."""

    def __init__(self) -> None:
        self._targets: dict[tuple[str, ...], tuple[int, str]] = {}

    def values(
        self, kind: type[Method], settings: Any, written: MethodSettings, backbone: BackboneSettings
    ) -> dict[str, int]:
        """Return the settings to change in a trial, by dotted path, without those that the sweep file has `written`.

        Raises ConfigError if no value comes within `TOLERANCE`, or the backbone's shapes are unknown.
        """
        described = describe(backbone)
        if described is None or not described.traits.stacks:
            raise ConfigError(
                f"match: the shapes of backbone {backbone.name} are not known on this machine; leave `match` out and "
                "write the ranks"
            )
        shapes, width = described.adapted(backbone), sizes(described.traits, described.config)["width"]

        def count(**changes: Any) -> int:
            return kind(settings.model_copy(update=changes)).parameter_count(shapes, width)

        own, key = count(), target_key(settings, backbone)
        if own == 0:  # a reference that trains nothing
            return {}
        target, first = self._targets.setdefault(key, (own, settings.name))
        name = size_setting(settings)
        if name is None or name in written.model_fields_set or own == target:
            if abs(own - target) > TOLERANCE * target:
                advice = "it has no rank to choose" if name is None else f"leave method.{name} out, and it is chosen"
                raise ConfigError(
                    f"match: {settings.name} trains {own:,} parameters per task, and {first}, the first of its kind on "
                    f"this backbone, {target:,}; {advice}"
                )
            return {}
        most = _LONGEST_PROMPT if name == "prompt_length" else min(min(shape) for shape in shapes.values())
        step = kind(settings).rank_multiple if name == "rank" else 1
        best = step * nearest(lambda value: count(**{name: step * value}), target, max(1, most // step))
        if abs(count(**{name: best}) - target) > TOLERANCE * target:
            raise ConfigError(
                f"match: with method.{name} = {best}, {settings.name} trains {count(**{name: best}):,} parameters per "
                f"task, which is nearest to the {target:,} of {first}, the first of its kind on this backbone, but "
                f"differs by more than {TOLERANCE:.0%}; change the first method's size, or leave {settings.name} out"
            )
        return {f"method.{name}": best}


def nearest(count: Callable[[int], int], target: int, most: int) -> int:
    """Return the value from 1 to `most` whose count is nearest to the target; counts grow with the value."""
    low, high = 1, most
    while low < high:  # the first value that reaches the target, or the largest
        middle = (low + high) // 2
        low, high = (low, middle) if count(middle) >= target else (middle + 1, high)
    return min((value for value in (low - 1, low) if value >= 1), key=lambda value: abs(count(value) - target))


def match_faults(content: Mapping[str, Any], searched: bool) -> list[str]:
    """Return what is wrong with the block `match` of a sweep file."""
    value = content.get("match")
    if value is None:
        return []
    if value != "parameters":
        return [f"match: found {value!r}; expected parameters"]
    if content.get("tune") is None and not searched:
        return []
    other = "run.search" if searched else "tune"
    return [f"match: found with {other}, which tries settings of its own; leave one of them out"]
