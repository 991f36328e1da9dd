"""A sweep file becomes a `Sweep`: strict, frozen, every fault reported with its path and what to do about it.

name: lambda
trial:    one trial, group by group: method, router, backbone, benchmark, training, evaluation, seed
search:   dotted paths below `trial`; a list is a grid axis, {loguniform: [a, b]} is drawn at random.
          A value may be a mapping: {name: superni, order: 1} sets two settings of a group together, and below the
          axis `trial` {method: {name: seq_lora}, router: {combine: last}} sets settings of several groups
tune:     settings that are chosen before the trials run, by trials of their own on other rows
run:      how to run it; no part of any result's identity
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from latent_sweep.data.faults import close_name, group_advice, shown, validation_faults
from latent_sweep.data.schema import BenchmarkSettings
from latent_sweep.errors import ConfigError
from latent_sweep.memo import memo_scope, memoized
from latent_sweep.methods import DEFAULT, METHODS, method_class
from latent_sweep.methods.protocol import MethodSettings
from latent_sweep.security import quoted, redact
from latent_sweep.settings import Settings, as_written, flatten, local_path, parse_yaml, read_yaml, yaml_text
from latent_sweep.storage.storage import NODE_LOCAL
from latent_sweep.sweep.places import placed
from latent_sweep.sweep.schema import GROUPS, RunSettings, TuneSettings, WrittenTrial, every_setting

MOST_TRIALS = 10_000
"""Most points of a search: planning them takes five to ten seconds, and nobody compares more."""

EXAMPLES: Mapping[str, str] = {
    "trial": "e.g. {method: {name: latent_lora}, benchmark: {name: builtin}}",
    "search": "e.g. {seed: [0, 1]}",
    "run": "e.g. {storage: runs}",
}
"""What the blocks of a sweep file look like."""

BLOCKS = ("name", "trial", "search", "tune", "run")
"""What a sweep file consists of."""

STORAGE_FOLDERS = NODE_LOCAL | {"checkpoints", "snapshots"}
"""What all sweeps share lies in these folders of a storage, beside the folders of the sweeps."""


class Draw(Settings):
    """A random axis: how a value is drawn, in the words of Ray Tune."""

    kind: Literal["choice", "uniform", "loguniform", "randint"]
    values: tuple[Any, ...]
    """The choices, or the two bounds; both are included for randint, whose upper bound in the file is excluded."""

    def written(self) -> dict[str, list[Any]]:
        """The axis as a sweep file says it."""
        values = list(self.values)
        return {self.kind: [values[0], values[1] + 1] if self.kind == "randint" else values}


class Sweep(Settings):
    """A sweep file, read."""

    name: str
    source: str
    """Path of the file, for messages."""
    trial: Mapping[str, Any]
    """The trial template as written; `trial_settings` validates it with one point of the search space applied."""
    grid: Mapping[str, tuple[Any, ...]]
    draws: Mapping[str, Draw]
    run: RunSettings
    tune: TuneSettings | None = None
    tuning_of: str | None = None
    """Name of the sweep whose candidates this one's trials are."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Dotted paths of every setting that varies."""
        values = [(axis, value) for axis, values in self.grid.items() for value in values]
        values += [(axis, value) for axis, draw in self.draws.items() for value in draw.values]
        return tuple(dict.fromkeys(path for axis, value in values for path in flatten(axis, value)))


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file, apply `--set path=value` overrides, and find its storage and tracker (`places.py`).

    Raises:
        ConfigError: listing every fault found, each with file, path, what was found and what is allowed.
    """
    try:
        content = read_yaml(local_path(path))
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError) or local_path(path).is_absolute():
            raise
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        raise ConfigError(
            f"{error}; the working directory is {'that of the cluster, ' * in_job}{Path.cwd()}. Correct the path"
            f"{', or submit the job with --working-dir .' * in_job}"
        ) from error
    sweep = parse_sweep(content, str(path), overrides)
    given: dict[str, Any] = {}
    for override in overrides:
        _apply_override(given, override)
    run, faults = placed(sweep.run, _mapping(given, "run")[0])
    if faults:
        raise fault_report(sweep.source, faults)
    return sweep.model_copy(update={"run": run})


@memo_scope()
def parse_sweep(content: Any, source: str, overrides: Sequence[str] = ()) -> Sweep:
    """A sweep from YAML content; see `load_sweep`."""
    content = copy.deepcopy(content)
    if not isinstance(content, dict):
        found = "an empty file" if content is None else shown(content)
        raise ConfigError(
            f"{source}: found {found}; expected a sweep file, a mapping with {', '.join(BLOCKS)}. "
            "`latent-sweep init NAME` writes a first one"
        )
    faults: list[str] = []
    for override in overrides:
        faults += _apply_override(content, override)
    faults += [_unknown_key(str(key), BLOCKS) for key in content if key not in BLOCKS]
    name = content.get("name")
    faults += _name_faults(name)
    template, template_faults = _mapping(content, "trial")
    search, search_faults = _mapping(content, "search")
    run_content, run_faults = _mapping(content, "run")
    faults += template_faults + search_faults + run_faults
    _, trial_faults = _trial(template)
    faults += [] if template_faults else [f"trial.{fault}" for fault in trial_faults]
    run, run_faults = _group(RunSettings, run_content, "run")
    faults += run_faults
    grid: dict[str, tuple[Any, ...]] = {}
    draws: dict[str, Draw] = {}
    of_axes = {
        str(axis): _axis(str(axis), values, template, set(trial_faults), grid, draws) for axis, values in search.items()
    }
    of_axes |= _lacking(template, grid, draws)  # which say more than that a key is unknown
    faults += [fault for found in of_axes.values() for fault in found]
    faults += _overlaps("search", _paths(grid, draws))
    tune = None
    if content.get("tune") is not None:
        tune, tune_faults = _tune(content["tune"], template, grid, draws)
        faults += tune_faults
    if isinstance(run, RunSettings):
        faults += _size_faults(grid, run.num_samples if draws else 1)
        faults += _sample_faults(search, run.num_samples)
        if isinstance(run.pack, tuple):
            faults += [fault for axis in run.pack for fault in _pack_axis(axis, [*grid, *draws])]
    if faults:
        raise fault_report(source, faults)
    assert isinstance(run, RunSettings) and isinstance(name, str)
    return Sweep(name=name, source=source, trial=template, grid=grid, draws=draws, run=run, tune=tune)


def _name_faults(name: Any) -> list[str]:
    """List what is wrong with a sweep's name, which becomes a folder's and an experiment's."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        usable = re.sub("[^A-Za-z0-9_.-]+", "_", str(name)).strip("_.-")[:100] if name is not None else ""
        advice = f". Write {usable}" if usable and usable != str(name) and redact(str(name)) == str(name) else ""
        return [
            f"name: {'missing' if name is None else f'found {shown(name)}'}; expected letters, digits, '_', '-' and "
            f"'.', not beginning with a sign, at most 100 in all{advice}"
        ]
    if name.lower() in STORAGE_FOLDERS:
        return [f"name: found {name!r}, the name of a folder that all sweeps of a storage share; choose another"]
    return []


def _size_faults(grid: Mapping[str, Sequence[Any]], samples: int) -> list[str]:
    """List what is wrong with a search of this many points."""
    points = samples * math.prod(map(len, grid.values()))
    if points <= MOST_TRIALS:
        return []
    drawn = "draw fewer" if samples > 1 else "draw some of them at random"
    return [
        f"search: {points:,} points; at most {MOST_TRIALS:,} are possible. Leave values out, spread them over several "
        f"sweep files, or {drawn} (run.num_samples)"
    ]


def _sample_faults(search: Mapping[str, Any], samples: int) -> list[str]:
    """List what is wrong with the number of draws: without a random axis it would have no effect."""
    if samples == 1 or any(isinstance(values, dict) for values in search.values()):
        return []
    return [
        f"run.num_samples: found {samples}, but no axis of search is random, so it would have no effect. Leave it out, "
        "or draw an axis, e.g. training.learning_rate: {loguniform: [1.0e-4, 1.0e-2]}"
    ]


def _pack_axis(axis: str, searched: Sequence[str]) -> list[str]:
    """List what is wrong with an axis of `run.pack`."""
    if axis not in searched:
        return [f"run.pack: found {axis!r}, which search does not vary; its axes are {', '.join(searched) or 'none'}"]
    shared = axis in ("method.name", "training.gradient_checkpointing")
    if axis == "seed" or (axis.startswith(("method.", "training.")) and not shared):
        return []
    return [
        f"run.pack: found {axis!r}; what learns side by side may differ in seed, method.* (not its name) and "
        "training.* only"
    ]


def fault_report(source: str, faults: Sequence[str]) -> ConfigError:
    """One error that lists all faults of one file, each once."""
    unique = list(dict.fromkeys(faults))
    lines = "".join(f"\n  - {fault}" for fault in unique)
    return ConfigError(f"{source}: {len(unique)} fault{'s' if len(unique) > 1 else ''}{lines}")


def trial_settings(sweep: Sweep, point: Mapping[str, Any]) -> WrittenTrial:
    """The template with one point of the search space applied.

    Raises:
        ConfigError: the combination is not valid although each value is.
    """
    template = _copied(sweep.trial)
    for path, value in point.items():
        _put(template, path.split("."), value)
    settings, faults = _trial(template)
    if settings is None:
        raise fault_report(sweep.source, [f"trial.{fault}" for fault in faults])
    return settings


# --- pieces ----------------------------------------------------------------------------------------------------------


def _mapping(content: Mapping[str, Any], key: str) -> tuple[dict[str, Any], list[str]]:
    value = content.get(key)
    if value is None:
        return {}, []
    if not isinstance(value, dict):
        return {}, [f"{key}: found {shown(value)}; expected a mapping, {EXAMPLES[key]}"]
    return value, []


def _group(kind: type[Settings], content: Any, path: str) -> tuple[Settings | None, list[str]]:
    if content is None:
        content = {}
    if not isinstance(content, dict):
        return None, [f"{path}: found {shown(content)}; expected a mapping{_advised(group_advice(content, kind))}"]
    return memoized(("group", kind, path, repr(content)), (), lambda: _validated(kind, content, path))


def _validated(kind: type[Settings], content: Mapping[str, Any], path: str) -> tuple[Settings | None, list[str]]:
    try:
        return as_written(kind).model_validate(content), []
    except ValidationError as error:
        group = path if path in ("method", *GROUPS) else ""
        elsewhere = partial(_elsewhere, method=content.get("name") if path == "method" else None)
        faults = validation_faults(error, kind, group, elsewhere)
        return None, [f"{path}.{fault}".replace(".the file: ", ": ", 1) for fault in faults]


def _trial(template: Mapping[str, Any]) -> tuple[WrittenTrial | None, list[str]]:
    """A trial, or every fault of its groups with paths below `trial`."""
    known = ("method", *GROUPS, "seed")
    faults = [_unknown_key(str(key), known, "trial") for key in template if key not in known]
    method, method_faults = _method(template.get("method"))
    faults += method_faults
    groups: dict[str, Any] = {"method": method}
    for name, kind in GROUPS.items():
        groups[name], group_faults = _group(kind, template.get(name), name)
        faults += group_faults
    seed = template.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        advice = ". To try several values, list them under search.seed" if isinstance(seed, list) else ""
        faults.append(f"seed: found {shown(seed)}; expected a whole number of at least 0{advice}")
    if faults:
        return None, faults
    return WrittenTrial(**groups, seed=seed), []


def _method(content: Any) -> tuple[Settings | None, list[str]]:
    if content is None:
        content = {}
    if not isinstance(content, dict):
        return None, [
            f"method: found {shown(content)}; expected a mapping{_advised(group_advice(content, MethodSettings))}"
        ]
    name = content.get("name", DEFAULT)
    if not isinstance(name, str):
        return None, [f"method.name: found {shown(name)}; expected one of {', '.join(METHODS)}"]
    try:
        kind = method_class(name).settings_class
    except ConfigError as error:
        return None, [f"method.name: {error}"]
    return _group(kind, {**content, "name": name}, "method")


def _axis(
    axis: str,
    values: Any,
    template: Mapping[str, Any],
    template_faults: set[str],
    grid: dict[str, tuple[Any, ...]],
    draws: dict[str, Draw],
    block: str = "search",
) -> list[str]:
    """Read one line of `search:`; every value is tried on the template, so that its faults carry its own path."""
    where = f"{block}.{axis}"
    if not all(axis.split(".")):
        return [f"{where}: expected a dotted path below `trial`, e.g. method.rank"]
    if axis.startswith("trial."):
        return [f"{where}: paths of an axis begin below `trial`; write {axis.removeprefix('trial.')}"]
    if isinstance(values, dict):
        draw, faults = _draw(values, where)
        if draw is None:
            return faults
        draws[axis] = draw
        tried: Sequence[Any] = draw.values
    elif isinstance(values, list) and values:
        if len(values) > MOST_TRIALS:
            return [f"{where}: found {len(values):,} values; at most {MOST_TRIALS:,} are possible"]
        grid[axis] = tuple(values)
        tried = values
    else:
        advice = "list the values to try" if values in (None, []) else f"write [{values}], or set it under trial"
        return [
            f"{where}: found {shown(values)}; expected a list of values, or a mapping with choice, uniform, loguniform "
            f"or randint. For an axis, {redact(advice)[:120]}"
        ]
    faults = []
    by_value: list[list[str]] = []
    for value in tried:
        candidate = _copied(template)
        if not all(_put(candidate, path.split("."), leaf) for path, leaf in flatten(axis, value).items()):
            return [
                f"{where}: a plain value stands where the path has a group; write paths below `trial`, e.g. method.rank"
            ]
        _, new_faults = _trial(candidate)
        by_value.append([fault for fault in new_faults if fault not in template_faults])
    if any(by_value) and isinstance(values, dict) and (advice := _whole_numbers(axis, draws[axis], template)):
        return [f"{where}.{draws[axis].kind}: draws fractions, but {axis} takes whole numbers. {advice}"]
    if len(tried) > 1 and all(found == by_value[0] for found in by_value):  # as where the axis itself is misspelled
        faults += [f"{where}: {fault}" for fault in by_value[0]]
    else:
        faults += [f"{where}[{index}]: {fault}" for index, found in enumerate(by_value) for fault in found]
    repeated = _repeated(tried) if axis in grid and not faults else []
    if repeated:
        return [f"{where}: {repeated[0]!r} appears twice; equal trials would collapse into one"]
    return faults


def _whole_numbers(axis: str, draw: Draw, template: Mapping[str, Any]) -> str:
    """Say how to draw whole numbers, if the axis takes them and these bounds; empty where another fault is meant."""
    if draw.kind not in ("uniform", "loguniform") or not all(float(bound).is_integer() for bound in draw.values):
        return ""
    lower, upper = map(int, draw.values)
    candidate = _copied(template)
    _put(candidate, axis.split("."), lower)
    return "" if _trial(candidate)[1] else f"Write randint: [{lower}, {upper + 1}]"


def _lacking(
    template: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], draws: Mapping[str, Draw]
) -> dict[str, list[str]]:
    """Say by axis which methods of the search lack its setting, where others of them have it."""
    axes = dict(grid) | {axis: draw.values for axis, draw in draws.items()}
    by_setting = {path: axis for axis, path in _paths(grid, draws)}
    if (owner := by_setting.get("method.name")) is None:
        return {}
    method = template.get("method")
    own = method.get("name", DEFAULT) if isinstance(method, dict) else DEFAULT
    names = dict.fromkeys(str(flatten(owner, value).get("method.name", own)) for value in axes[owner])
    known = {}
    for name in names:
        with contextlib.suppress(ConfigError):  # which the owner's faults tell
            known[name] = method_class(name).settings_class.model_fields
    advice = f"write it into the entries of `search.{owner}` whose method has it"
    if owner == "method.name":
        advice = "search `method` in place of `method.name`, and write it into the entries whose method has it"
    found = {}
    for axis in axes:
        group, _, rest = axis.partition(".")
        setting = rest.partition(".")[0]
        lack = [name for name, fields in known.items() if setting not in fields]
        if group == "method" and setting and 0 < len(lack) < len(known):
            verb = "has" if len(lack) == 1 else "have"
            found[axis] = [f"search.{axis}: {', '.join(lack)} {verb} no setting {setting}; {advice}"]
    return found


def _repeated(values: Sequence[Any]) -> list[Any]:
    """Return the values that are equal to an earlier one; mappings and lists have no hash and are compared in turn."""
    found: list[Any] = []
    plain: set[Any] = set()
    others: list[Any] = []
    for value in values:
        is_plain = not isinstance(value, (dict, list))
        if value in (plain if is_plain else others):
            found.append(value)
        elif is_plain:
            plain.add(value)
        else:
            others.append(value)
    return found


def _overlaps(block: str, paths: Iterable[tuple[str, str]]) -> list[str]:
    """List settings that two axes set: one of the two would silently have no effect."""
    owners: dict[str, str] = {}
    faults = []
    for axis, path in paths:
        if path in owners:
            faults.append(f"{block}.{axis}: {path} is also set by the axis {owners[path]}; vary it in one of them")
        owners[path] = axis
    return faults


def _paths(grid: Mapping[str, Sequence[Any]], draws: Mapping[str, Draw]) -> Iterator[tuple[str, str]]:
    """Yield every axis with each setting that it sets."""
    for axis, values in (dict(grid) | {axis: draw.values for axis, draw in draws.items()}).items():
        for path in dict.fromkeys(path for value in values for path in flatten(axis, value)):
            yield axis, path


def _tune(
    content: Any, template: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], draws: Mapping[str, Draw]
) -> tuple[TuneSettings | None, list[str]]:
    """Read the `tune:` block; values are tried on the template, those for one method on it with that method."""
    tune, faults = _group(TuneSettings, content, "tune")
    if not isinstance(tune, TuneSettings):
        return None, faults
    if isinstance(tune.on, Mapping):
        faults += _group(BenchmarkSettings, tune.on, "tune.on")[1]
        faults += [f"tune.on.{key}: has no effect; {_HELD_OUT[key]}" for key in tune.on if key in _HELD_OUT]
    taken = {path: f"search.{axis}" for axis, path in _paths(grid, draws)}
    written = {name: group for name, group in template.items() if group is not None}  # a group of null is empty
    taken |= {path: f"trial.{path}" for path in flatten("trial", written)}
    faults += _tuned_axes("tune.search", tune.search, template, taken)
    faults += _overlaps("tune.search", _paths(tune.search, {}))
    for name, axes in tune.by_method.items():
        block = f"tune.by_method.{name}"
        try:
            method_class(name)
        except ConfigError as error:
            faults.append(f"{block}: {error}")
        else:
            faults += _tuned_axes(block, axes, {**template, "method": {"name": name}}, taken)
            faults += _overlaps(block, _paths(tune.tried(name), {}))
    return tune, faults


_HELD_OUT = {
    "score_on": "candidates are scored on rows held out of the training rows",
    "validation_fraction": "set tune.validation_fraction",
    "prompts": "candidates read definitions as they are",
}
"""Settings of another benchmark that choosing decides itself, and why or where."""


def _tuned_axes(
    block: str, axes: Mapping[str, Sequence[Any]], template: Mapping[str, Any], taken: Mapping[str, str]
) -> list[str]:
    """List what is wrong with values to try.

    Args:
        taken: by setting, what else sets it: one of the two would silently have no effect.
    """
    _, before = _trial(template)
    faults = []
    for axis, values in axes.items():
        where, group = f"{block}.{axis}", axis.partition(".")[0]
        leaves = dict.fromkeys(leaf for value in values for leaf in flatten(axis, value))
        if group not in ("method", "router", "training") or axis in (group, "method.name"):
            faults.append(f"{where}: expected a setting of method (not its name), router or training")
        elif setters := [setter for path, setter in taken.items() if any(_meet(path, leaf) for leaf in leaves)]:
            faults.append(f"{where}: {setters[0]} sets it too; leave one of them out")
        elif not (group == "method" and block == "tune.search"):  # which each method of the sweep reads by itself
            faults += _axis(axis, list(values), template, set(before), {}, {}, block)
    return faults


def _meet(path: str, other: str) -> bool:
    """Whether setting one path sets the other, or a part of it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def _draw(content: Mapping[str, Any], where: str) -> tuple[Draw | None, list[str]]:
    kinds = ("choice", "uniform", "loguniform", "randint")
    if len(content) != 1 or next(iter(content)) not in kinds:
        paths = "; ".join(f"{path}: {_short(value)}" for path, value in flatten(where, dict(content)).items())
        nested = not set(content) & set(kinds) and all(str(key).isidentifier() for key in content)
        advice = f". Write a dotted path for each axis: {paths.replace('search.', '')}" if nested and paths else ""
        return None, [
            f"{where}: found {quoted(dict(content))}; expected a single key out of {', '.join(kinds)}{advice}"
        ]
    kind, values = next(iter(content.items()))
    if not isinstance(values, list) or not values or (kind != "choice" and len(values) != 2):
        wanted = "a list of values" if kind == "choice" else "two bounds [lower, upper]"
        return None, [f"{where}.{kind}: found {quoted(values)}; expected {wanted}"]
    if kind != "choice":
        number = (int,) if kind == "randint" else (int, float)
        if not all(isinstance(v, number) and not isinstance(v, bool) for v in values) or not values[0] < values[1]:
            return None, [f"{where}.{kind}: found {quoted(values)}; expected two growing numbers"]
        if kind == "loguniform" and values[0] <= 0:
            return None, [f"{where}.loguniform: found {quoted(values)}; both bounds must be above 0"]
        values = [v if kind == "randint" else float(v) for v in values]
    if kind == "randint":
        values = [values[0], values[1] - 1]
    return Draw.model_validate({"kind": kind, "values": tuple(values)}), []


def _short(value: Any) -> str:
    """Write a value as a sweep file has it, without secrets."""
    return redact(yaml_text(value, one_line=True))[:60]


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a tree of groups, whose values are not changed in place."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in tree.items()}


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Set `value` at `path` below `tree`, making groups on the way; False where a plain value is in the way."""
    for key in path[:-1]:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            return False
    tree[path[-1]] = value
    return True


def _apply_override(content: dict[str, Any], override: str) -> list[str]:
    """Apply one `--set path=value`; the path begins with name, trial, search, tune or run."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return [f"--set {override}: expected path=value, e.g. --set trial.training.epochs=1"]
    value = parse_yaml(text, f"--set {override}")
    if value is None and text.strip().lower() not in ("null", "~"):  # an empty variable of the shell
        end = f"write {path.strip()}=null to remove an axis" if keys[0] == "search" else "leave it out for the file's"
        return [f"--set {override}: nothing stands behind the '='; write a value, or {end}"]
    keys = _joined(keys)
    if keys[0] == "search" and len(keys) == 2 and value is None:
        axes = content.get("search")
        if not isinstance(axes, dict) or keys[1] not in axes:
            return [f"--set {override}: search has no axis {keys[1]!r} to remove"]
        del axes[keys[1]]
        return []
    if not _put(content, keys, value):
        return [f"--set {override}: {'.'.join(keys[:-1])} is a plain value, not a group"]
    return []


def _joined(keys: list[str]) -> list[str]:
    """Join what is one key with dots in it: search.method.rank, tune.search.training.epochs, and so on."""
    for block in (["search"], ["tune", "search"], ["tune", "by_method"]):
        start = len(block) + (block[-1] == "by_method")
        if keys[: len(block)] == block and len(keys) > start:
            return [*keys[:start], ".".join(keys[start:])]
    return keys


def _advised(advice: str) -> str:
    return f". {advice}" if advice else ""


def _unknown_key(key: str, known: Sequence[str], block: str = "") -> str:
    """Say that a block has no such key, and what its writer may have meant: a setting elsewhere, or a close name."""
    near = close_name(key, known)
    hint = f"did you mean {near!r}?" if near else f"allowed: {', '.join(known)}"
    return f"{key}: unknown key; {_elsewhere(key, block) or hint}"


def _elsewhere(name: str, block: str = "", method: Any = None) -> str:
    """Say where in a sweep file a setting of this name is; empty where there is none.

    Args:
        block: where it was looked for, from which the paths count.
        method: the method whose settings lack it.
    """
    groups = {group: [facts.path for facts in found] for group, found in every_setting().items()}
    if method is not None:
        setting = f"trial.method.{name}"
        having = [
            group.partition(" of ")[2]
            for group, paths in groups.items()
            if any(f"{path}.".startswith(f"{setting}.") for path in paths)
        ]
        if having:
            return f"{method} has no such setting; it is one of {', '.join(dict.fromkeys(having))}"
    paths = [path for found in groups.values() for path in found]
    paths += [path.rpartition(".")[0] for path in paths]
    found = dict.fromkeys(path for path in paths if path.rpartition(".")[2] == name and path.startswith(block))
    shown = [path.removeprefix(f"{block}.") for path in found][:3]
    return f"did you mean {' or '.join(shown)}?" if shown else ""
