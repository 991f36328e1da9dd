"""Read the `trial:` block group by group; each fault has its path below `trial`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ValidationError

from latent_sweep.errors import ConfigError
from latent_sweep.memo import memoized
from latent_sweep.methods import DEFAULT, METHODS, method_class
from latent_sweep.methods.protocol import MethodSettings
from latent_sweep.settings import Settings, as_written
from latent_sweep.settings.faults import close_name, shown, validation_faults
from latent_sweep.sweep.schema import GROUPS, WrittenTrial, every_setting


@memoized(lambda kind, content, path: (kind, repr(content), path))
def read_group(kind: type[Settings], content: Any, path: str) -> tuple[Settings | None, list[str]]:
    try:
        return as_written(kind).model_validate({} if content is None else content), []
    except ValidationError as error:
        group = path if path in ("method", *GROUPS) else ""
        method = content.get("name") if path == "method" and isinstance(content, dict) else None
        faults = validation_faults(error, kind, group, partial(_elsewhere, method=method))
        return None, [f"{path}.{fault}".replace(".the file: ", ": ", 1) for fault in faults]


def read_trial(template: Mapping[str, Any]) -> tuple[WrittenTrial | None, list[str]]:
    """Return a trial, or the faults of its groups with paths below `trial`."""
    allowed = ("method", *GROUPS, "seed")
    faults = [unknown_key(str(key), allowed, "trial") for key in template if key not in allowed]
    groups: dict[str, Any] = {}
    groups["method"], method_faults = _method(template.get("method"))
    faults += method_faults
    for name, kind in GROUPS.items():
        groups[name], group_faults = read_group(kind, template.get(name), name)
        faults += group_faults
    seed = template.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        advice = ". To try several values, list them under search.seed" if isinstance(seed, list) else ""
        faults.append(f"seed: found {shown(seed)}; expected a whole number of at least 0{advice}")
    return (None, faults) if faults else (WrittenTrial(**groups, seed=seed), [])


def _method(content: Any) -> tuple[Settings | None, list[str]]:
    if content is None:
        content = {}
    if not isinstance(content, dict):
        return read_group(MethodSettings, content, "method")
    name = content.get("name", DEFAULT)
    if not isinstance(name, str):
        return None, [f"method.name: found {shown(name)}; expected one of {', '.join(METHODS)}"]
    try:
        kind = method_class(name).settings_class
    except ConfigError as error:
        return None, [f"method.name: {error}"]
    return read_group(kind, {**content, "name": name}, "method")


def unknown_key(key: str, allowed: Sequence[str], block: str = "") -> str:
    near = close_name(key, allowed)
    hint = f"did you mean {near!r}?" if near else f"allowed: {', '.join(allowed)}"
    return f"{key}: unknown key; {_elsewhere(key, block) or hint}"


def _elsewhere(name: str, block: str = "", method: Any = None) -> str:
    """Return where in a sweep file a setting of this name is, relative to `block`; empty if nowhere."""
    groups = {group: [facts.path for facts in settings] for group, settings in every_setting().items()}
    if method is not None:
        start = f"trial.method.{name}."
        having = [
            group.partition(" of ")[2]
            for group, paths in groups.items()
            if any(f"{path}.".startswith(start) for path in paths)
        ]
        if having:
            return f"{method} has no such setting; it is one of {', '.join(dict.fromkeys(having))}"
    paths = [path for group in groups.values() for path in group]
    paths += [path.rpartition(".")[0] for path in paths]
    matches = dict.fromkeys(path for path in paths if path.rpartition(".")[2] == name and path.startswith(block))
    relative = [path.removeprefix(f"{block}.") for path in matches][:3]
    return f"did you mean {' or '.join(relative)}?" if relative else ""
