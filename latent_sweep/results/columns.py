"""Columns for the settings in which compared sweeps differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from latent_sweep.labels import format_value
from latent_sweep.settings import identity_fields
from latent_sweep.sweep.schema import GROUPS
from latent_sweep.sweep.settings_read import is_read

LOCATION_AND_SPEED = frozenset(
    f"{group}.{name}" for group, kind in GROUPS.items() for name in kind.model_fields.keys() - identity_fields(kind)
)
_ORDER = ("benchmark.name", "benchmark.order")


def differing(sweeps: Sequence[Sequence[Mapping[str, Any]]], axes: Sequence[Iterable[str]]) -> list[str]:
    """Return the paths of the settings in which sweeps differ: by their values, or as only some sweeps vary them.

    A setting that only some methods have is compared between these. `sweeps` are settings by path, of each
    configuration or trial of each sweep, and `axes` the paths that vary in each.
    """
    varied = [set(each) for each in axes]
    settings = [one for sweep in sweeps for one in sweep]
    paths = []
    for path in dict.fromkeys(path for one in settings for path in one):
        values = [{format_value(one.get(path)) for one in sweep if _has(one, path)} for sweep in sweeps]
        present = [each for each in values if each]
        differ = any(each != present[0] for each in present) or 0 < sum(path in each for each in varied) < len(varied)
        several = len(set().union(*values)) > 1
        if several and differ and path not in LOCATION_AND_SPEED and not all(path in each for each in varied):
            paths.append(path)
    if "benchmark.tasks" in paths and _count(settings, *_ORDER) == _count(settings, *_ORDER, "benchmark.tasks"):
        paths.remove("benchmark.tasks")
    return paths


def value_read(settings: Mapping[str, Any], path: str) -> Any:
    """Return a setting; None if the trial or configuration does not have or read it."""
    return settings.get(path) if is_read(path, settings) else None


def _has(settings: Mapping[str, Any], path: str) -> bool:
    """Return whether the setting applies, even if it is null: methods have different settings."""
    if path.startswith("method.") and path not in settings:
        return False
    return is_read(path, settings)


def _count(settings: Iterable[Mapping[str, Any]], *paths: str) -> int:
    return len({tuple(format_value(one.get(path)) for path in paths) for one in settings})
