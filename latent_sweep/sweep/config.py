"""Read a sweep file into a strict, frozen `Sweep`; every fault is reported with its path and a remedy.

name: lambda
trial:    one trial, group by group: method, router, backbone, benchmark, training, evaluation, seed
search:   dotted paths below `trial`; a list is a grid axis, {loguniform: [a, b]} is drawn at random.
          A value may be a mapping: {name: superni, order: 1} sets two settings of a group together, and below the
          axis `trial` {method: {name: seq_lora}, router: {combine: last}} sets settings of several groups
tune:     settings that trials of their own select on other examples, before the trials run
run:      how to run it, without effect on results
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import ValidationError

from latent_sweep.data.schema import BenchmarkSettings
from latent_sweep.errors import ConfigError, fault_report
from latent_sweep.memo import memo_scope, memoized
from latent_sweep.methods import DEFAULT, METHODS, method_class
from latent_sweep.methods.protocol import MethodSettings
from latent_sweep.security import quoted, redact
from latent_sweep.settings import Settings, as_written, canonical_json, flatten
from latent_sweep.settings.faults import close_name, shown, validation_faults
from latent_sweep.settings.paths import local_path
from latent_sweep.settings.strict_yaml import parse_yaml, read_yaml, yaml_text
from latent_sweep.storage.storage import NODE_LOCAL
from latent_sweep.sweep.matching import match_faults
from latent_sweep.sweep.places import placed
from latent_sweep.sweep.schema import GROUPS, RunSettings, TuneSettings, WrittenTrial, every_setting

MOST_TRIALS = 10_000
"""Maximum number of points of a search; planning them takes five to ten seconds."""

EXAMPLES: Mapping[str, str] = {
    "trial": "e.g. {method: {name: latent_lora}, benchmark: {name: builtin}}",
    "search": "e.g. {seed: [0, 1]}",
    "run": "e.g. {storage: runs}",
}

BLOCKS = ("name", "trial", "search", "match", "tune", "run")

STORAGE_FOLDERS = NODE_LOCAL | {"checkpoints", "snapshots"}
"""Folders of a storage that all its sweeps share, next to the folders of the sweeps."""

KINDS = ("choice", "uniform", "quniform", "loguniform", "randint")


class Draw(Settings):
    """A random axis, in the words of Ray Tune."""

    kind: Literal["choice", "uniform", "quniform", "loguniform", "randint"]
    values: tuple[Any, ...]
    """The choices, or two inclusive bounds, with the step of quniform; the file excludes the upper bound of randint."""

    @property
    def extremes(self) -> tuple[Any, ...]:
        return self.values if self.kind == "choice" else self.values[:2]

    def snapped(self, value: Any) -> Any:
        """Return the nearest multiple of quniform's step above its lower bound; other values as they are."""
        if self.kind != "quniform":
            return value
        lower, upper, step = self.values
        steps = min(max(0, round((value - lower) / step)), math.floor((upper - lower) / step + 1e-9))
        whole = all(isinstance(each, int) for each in self.values)
        return lower + steps * step if whole else float(f"{lower + steps * step:.12g}")

    def contains(self, value: Any) -> bool:
        if self.kind == "choice":
            return canonical_json(value) in map(canonical_json, self.values)
        number = type(value) in (int, float) and self.values[0] <= value <= self.values[1]
        return number and (self.kind != "randint" or type(value) is int)

    def written(self) -> dict[str, list[Any]]:
        values = list(self.values)
        return {self.kind: [values[0], values[1] + 1] if self.kind == "randint" else values}


class Sweep(Settings):
    """The content of a sweep file."""

    name: str
    source: str
    """Path of the file, for messages."""
    trial: Mapping[str, Any]
    """The trial template as written; `trial_settings` validates it at one point of the search."""
    grid: Mapping[str, tuple[Any, ...]]
    draws: Mapping[str, Draw]
    run: RunSettings
    match: Literal["parameters"] | None = None
    """Whether ranks are chosen so that all methods train equally many parameters; see `matching`."""
    tune: TuneSettings | None = None
    tuning_of: str | None = None
    """Name of the sweep whose tuning trials these are."""

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for _, path in _paths(_values(self.grid, self.draws))))

    @property
    def is_adaptive(self) -> bool:
        return self.run.search.is_adaptive

    @property
    def crossed(self) -> Mapping[str, tuple[Any, ...]]:
        packed = self.run.pack if isinstance(self.run.pack, tuple) else ()
        return {axis: values for axis, values in self.grid.items() if not self.is_adaptive or axis in packed}

    @property
    def drawn(self) -> Mapping[str, Draw]:
        """The other axes, which a random draw or a searcher sets."""
        rest = {axis: values for axis, values in self.grid.items() if axis not in self.crossed}
        return {axis: Draw(kind="choice", values=values) for axis, values in rest.items()} | dict(self.draws)


def load_sweep(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file or its content, apply `--set path=value`, and find its places. ConfigError lists all faults."""
    if isinstance(source, Mapping):
        content, shown_as = _plain(source), f"sweep {source.get('name', '')}".strip()
    else:
        content, shown_as = _read_sweep_file(source), str(source)
    sweep = parse_sweep(content, shown_as, overrides)
    given: dict[str, Any] = {}
    for override in overrides:
        _apply_override(given, override)
    run, faults = placed(sweep.run, _mapping(given, "run")[0])
    if faults:
        raise fault_report(sweep.source, faults)
    return sweep.model_copy(update={"run": run})


def _read_sweep_file(path: str | Path) -> Any:
    try:
        return read_yaml(local_path(path))
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError) or local_path(path).is_absolute():
            raise
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
        raise ConfigError(
            f"{error}; the working directory is {'that of the cluster, ' * in_job}{Path.cwd()}. Correct the path"
            f"{', or submit the job with --working-dir .' * in_job}"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_plain(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def override(path: str, value: Any) -> str:
    return f"{path}={yaml_text(_plain(value), one_line=True)}"


@memo_scope()
def parse_sweep(content: Any, source: str, overrides: Sequence[str] = ()) -> Sweep:
    content = copy.deepcopy(content)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{source}: found {'an empty file' if content is None else shown(content)}; expected a sweep file, a "
            f"mapping with {', '.join(BLOCKS)}. `latent-sweep init NAME` writes a first one"
        )
    faults = [fault for override in overrides for fault in _apply_override(content, override)]
    faults += [_unknown_key(str(key), BLOCKS) for key in content if key not in BLOCKS]
    name = content.get("name")
    faults += _name_faults(name)
    template, template_faults = _mapping(content, "trial")
    search, search_faults = _mapping(content, "search")
    run_content, run_faults = _mapping(content, "run")
    faults += template_faults + search_faults + run_faults
    run, run_faults = _group(RunSettings, run_content, "run")
    faults += run_faults
    if isinstance(run, RunSettings) and run.search.is_adaptive:
        faults += _scored_on(run.search.on, template)
    _, trial_faults = _trial(template)
    faults += [] if template_faults else [f"trial.{fault}" for fault in trial_faults]
    grid: dict[str, tuple[Any, ...]] = {}
    draws: dict[str, Draw] = {}
    by_axis = {
        str(axis): _axis(str(axis), values, template, set(trial_faults), grid, draws) for axis, values in search.items()
    }
    axes = _values(grid, draws)
    by_axis |= _lacking(template, axes)  # more precise than an unknown key
    faults += [fault for axis_faults in by_axis.values() for fault in axis_faults]
    faults += _overlaps("search", axes)
    tune = None
    if content.get("tune") is not None:
        tune, tune_faults = _tune(content["tune"], template, axes)
        faults += tune_faults
    faults += match_faults(content, isinstance(run, RunSettings) and run.search.is_adaptive)
    if isinstance(run, RunSettings):
        if run.search.is_adaptive:
            faults += _searcher_faults(run, axes, draws, tuned=content.get("tune") is not None)
        else:
            faults += _size_faults(grid, run.search.num_samples if draws else 1)
            faults += _sample_faults(search, run.search.num_samples)
        if isinstance(run.pack, tuple):
            faults += [fault for axis in run.pack for fault in _pack_axis(axis, list(axes))]
    if faults:
        raise fault_report(source, faults)
    assert isinstance(run, RunSettings) and isinstance(name, str)
    match = content.get("match")
    return Sweep(name=name, source=source, trial=template, grid=grid, draws=draws, run=run, tune=tune, match=match)


def trial_settings(sweep: Sweep, point: Mapping[str, Any]) -> WrittenTrial:
    """Return the template at one point of the search; ConfigError if the combination is not valid."""
    template = _copied(sweep.trial)
    for path, value in point.items():
        _put(template, path.split("."), value)
    settings, faults = _trial(template)
    if settings is None:
        raise ConfigError("; ".join(f"trial.{fault}" for fault in faults))
    return settings


# --- blocks ----------------------------------------------------------------------------------------------------------


def _name_faults(name: Any) -> list[str]:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        usable = re.sub("[^A-Za-z0-9_.-]+", "_", str(name)).strip("_.-")[:100] if name is not None else ""
        return [
            f"name: {'missing' if name is None else f'found {shown(name)}'}; expected at most 100 letters, digits, "
            f"'_', '-' and '.', starting with a letter or digit{f'. Write {redact(usable)}' if usable else ''}"
        ]
    if name.lower() in STORAGE_FOLDERS:
        return [f"name: found {name!r}, the name of a folder that all sweeps of a storage share; choose another"]
    return []


def _size_faults(grid: Mapping[str, Sequence[Any]], samples: int) -> list[str]:
    points = samples * math.prod(map(len, grid.values()))
    if points <= MOST_TRIALS:
        return []
    drawn = "draw fewer" if samples > 1 else "draw some of them at random"
    return [
        f"search: {points:,} points; expected at most {MOST_TRIALS:,}. Leave values out, split them into several sweep "
        f"files, or {drawn} (run.search.num_samples)"
    ]


def _sample_faults(search: Mapping[str, Any], samples: int) -> list[str]:
    if samples == 1 or any(isinstance(values, dict) for values in search.values()):
        return []
    return [
        f"run.search.num_samples: found {samples}, but it has no effect without a random axis in search. Leave it "
        "out, draw an axis, e.g. training.learning_rate: {loguniform: [1.0e-4, 1.0e-2]}, or add name: optuna"
    ]


def _scored_on(rows: str, template: dict[str, Any]) -> list[str]:
    benchmark = template.get("benchmark")
    written = benchmark.get("score_on") if isinstance(benchmark, dict) else None
    if written not in (None, rows):
        return [f"trial.benchmark.score_on: found {written}, but run.search.on is {rows}; set the one in run.search"]
    _put(template, ["benchmark", "score_on"], rows)
    return []


def _searcher_faults(
    run: RunSettings, axes: Mapping[str, Sequence[Any]], draws: Mapping[str, Draw], tuned: bool
) -> list[str]:
    packed = run.pack if isinstance(run.pack, tuple) else ()
    faults = ["tune: a searcher chooses settings, too; leave out tune, or run.search.name"] if tuned else []
    if run.pack == "auto" or (isinstance(run.pack, int) and run.pack > 1):
        faults.append(f"run.pack: found {run.pack}; with a searcher expected 1, or the axes of a point, e.g. [seed]")
    if not set(axes) - set(packed):
        faults.append(f"search: {run.search.name} has no axis to choose from; add one that is not in run.pack")
    faults += [
        f"run.pack: found {axis}, a random axis; with a searcher expected lists" for axis in packed if axis in draws
    ]
    if run.search.num_samples == 1 or run.search.num_samples > MOST_TRIALS:
        faults.append(f"run.search.num_samples: found {run.search.num_samples:,}; expected 2 to {MOST_TRIALS:,} points")
    setters = {path: axis for axis, path in _paths(axes)}
    if "seed" in setters and setters["seed"] not in packed:
        faults.append(
            "search.seed: a searcher would choose the luckiest seed; set trial.seed, or add run.pack: [seed], so that "
            "the mean over the seeds counts"
        )
    if "benchmark.score_on" in setters:
        faults.append(f"search.{setters['benchmark.score_on']}: sets benchmark.score_on; set run.search.on")
    return faults


def _pack_axis(axis: str, searched: Sequence[str]) -> list[str]:
    if axis not in searched:
        return [f"run.pack: found {axis!r}, which search does not vary; its axes are {', '.join(searched) or 'none'}"]
    shared = axis in ("method.name", "training.gradient_checkpointing")
    if axis == "seed" or (axis.startswith(("method.", "training.")) and not shared):
        return []
    return [
        f"run.pack: found {axis!r}; trainings of one pack may differ only in seed, method.* (not its name) and "
        "training.*"
    ]


def _mapping(content: Mapping[str, Any], key: str) -> tuple[dict[str, Any], list[str]]:
    value = content.get(key)
    if value is None:
        return {}, []
    if not isinstance(value, dict):
        return {}, [f"{key}: found {shown(value)}; expected a mapping, {EXAMPLES[key]}"]
    return value, []


@memoized(lambda kind, content, path: (kind, repr(content), path))
def _group(kind: type[Settings], content: Any, path: str) -> tuple[Settings | None, list[str]]:
    try:
        return as_written(kind).model_validate({} if content is None else content), []
    except ValidationError as error:
        group = path if path in ("method", *GROUPS) else ""
        method = content.get("name") if path == "method" and isinstance(content, dict) else None
        faults = validation_faults(error, kind, group, partial(_elsewhere, method=method))
        return None, [f"{path}.{fault}".replace(".the file: ", ": ", 1) for fault in faults]


def _trial(template: Mapping[str, Any]) -> tuple[WrittenTrial | None, list[str]]:
    """Return a trial, or the faults of its groups with paths below `trial`."""
    allowed = ("method", *GROUPS, "seed")
    faults = [_unknown_key(str(key), allowed, "trial") for key in template if key not in allowed]
    groups: dict[str, Any] = {}
    groups["method"], method_faults = _method(template.get("method"))
    faults += method_faults
    for name, kind in GROUPS.items():
        groups[name], group_faults = _group(kind, template.get(name), name)
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
        return _group(MethodSettings, content, "method")
    name = content.get("name", DEFAULT)
    if not isinstance(name, str):
        return None, [f"method.name: found {shown(name)}; expected one of {', '.join(METHODS)}"]
    try:
        kind = method_class(name).settings_class
    except ConfigError as error:
        return None, [f"method.name: {error}"]
    return _group(kind, {**content, "name": name}, "method")


# --- axes ------------------------------------------------------------------------------------------------------------


def _axis(
    axis: str,
    values: Any,
    template: Mapping[str, Any],
    template_faults: set[str],
    grid: dict[str, tuple[Any, ...]],
    draws: dict[str, Draw],
    block: str = "search",
) -> list[str]:
    """Add one axis to `grid` or `draws`; each value is tried on the template, so that faults have its path."""
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
        tried: Sequence[Any] = draw.extremes
    elif isinstance(values, list) and values:
        if len(values) > MOST_TRIALS:
            return [f"{where}: found {len(values):,} values; expected at most {MOST_TRIALS:,}"]
        grid[axis] = tuple(values)
        tried = values
    else:
        advice = "list the values to try" if values in (None, []) else f"write [{values}], or set it under trial"
        return [
            f"{where}: found {shown(values)}; expected a list of values, or a mapping with {', '.join(KINDS)}. "
            f"For an axis, {redact(advice)[:120]}"
        ]
    by_value: list[list[str]] = []
    for value in tried:
        candidate = _copied(template)
        if not all(_put(candidate, path.split("."), leaf) for path, leaf in flatten(axis, value).items()):
            return [f"{where}: found a plain value where the path has a group; write a path such as method.rank"]
        by_value.append([fault for fault in _trial(candidate)[1] if fault not in template_faults])
    if any(by_value) and isinstance(values, dict) and (advice := _whole_numbers(axis, draws[axis], template)):
        return [f"{where}.{draws[axis].kind}: draws fractions, but {axis} takes whole numbers. {advice}"]
    if len(tried) > 1 and all(faults == by_value[0] for faults in by_value):  # such as a misspelled axis
        faults = [f"{where}: {fault}" for fault in by_value[0]]
    else:
        faults = [f"{where}[{index}]: {fault}" for index, found in enumerate(by_value) for fault in found]
    if axis in grid and not faults and (repeated := _repeated(tried)):
        return [f"{where}: {repeated[0]!r} appears twice; equal trials would collapse into one"]
    return faults


def _whole_numbers(axis: str, draw: Draw, template: Mapping[str, Any]) -> str:
    if draw.kind not in ("uniform", "loguniform") or not all(float(bound).is_integer() for bound in draw.values):
        return ""
    lower, upper = map(int, draw.values)
    candidate = _copied(template)
    _put(candidate, axis.split("."), lower)
    return "" if _trial(candidate)[1] else f"Write randint: [{lower}, {upper + 1}]"


def _lacking(template: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
    """Return, by axis, which methods of the search lack its setting while others have it."""
    owner = {path: axis for axis, path in _paths(axes)}.get("method.name")
    if owner is None:
        return {}
    method = template.get("method")
    own = method.get("name", DEFAULT) if isinstance(method, dict) else DEFAULT
    names = dict.fromkeys(str(flatten(owner, value).get("method.name", own)) for value in axes[owner])
    fields_of = {}
    for name in names:
        with contextlib.suppress(ConfigError):  # a fault of the owner
            fields_of[name] = method_class(name).settings_class.model_fields
    advice = f"write it into the entries of `search.{owner}` whose method has it"
    if owner == "method.name":
        advice = "search `method` instead of `method.name`, and write it into the entries whose method has it"
    faults = {}
    for axis in axes:
        group, _, rest = axis.partition(".")
        setting = rest.partition(".")[0]
        lack = [name for name, fields in fields_of.items() if setting not in fields]
        if group == "method" and setting and 0 < len(lack) < len(fields_of):
            verb = "has" if len(lack) == 1 else "have"
            faults[axis] = [f"search.{axis}: {', '.join(lack)} {verb} no setting {setting}; {advice}"]
    return faults


def _repeated(values: Sequence[Any]) -> list[Any]:
    keys = [canonical_json(value) if isinstance(value, (dict, list)) else value for value in values]
    seen: set[Any] = set()
    return [value for key, value in zip(keys, values, strict=True) if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def _values(grid: Mapping[str, Sequence[Any]], draws: Mapping[str, Draw]) -> dict[str, Sequence[Any]]:
    return dict(grid) | {axis: draw.extremes for axis, draw in draws.items()}


def _paths(axes: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, str]]:
    for axis, values in axes.items():
        for path in dict.fromkeys(path for value in values for path in flatten(axis, value)):
            yield axis, path


def _overlaps(block: str, axes: Mapping[str, Sequence[Any]]) -> list[str]:
    owners: dict[str, str] = {}
    faults = []
    for axis, path in _paths(axes):
        if path in owners:
            faults.append(f"{block}.{axis}: {path} is also set by the axis {owners[path]}; vary it in one of them")
        owners[path] = axis
    return faults


def _draw(content: Mapping[str, Any], where: str) -> tuple[Draw | None, list[str]]:
    if len(content) != 1 or next(iter(content)) not in KINDS:
        paths = "; ".join(f"{path}: {_short(value)}" for path, value in flatten(where, dict(content)).items())
        nested = not set(content) & set(KINDS) and all(str(key).isidentifier() for key in content)
        advice = f". Write a dotted path for each axis: {paths.replace('search.', '')}" if nested and paths else ""
        return None, [
            f"{where}: found {quoted(dict(content))}; expected a single key out of {', '.join(KINDS)}{advice}"
        ]
    kind, values = next(iter(content.items()))
    found = f"{where}.{kind}: found {quoted(values)}"
    expected = {"choice": "a list of values", "quniform": "[lower, upper, step]"}.get(kind, "two bounds [lower, upper]")
    if not isinstance(values, list) or not values or (kind != "choice" and len(values) != 2 + (kind == "quniform")):
        return None, [f"{found}; expected {expected}"]
    if kind != "choice":
        number = (int,) if kind == "randint" else (int, float)
        if not all(isinstance(v, number) and not isinstance(v, bool) for v in values) or not values[0] < values[1]:
            return None, [f"{found}; expected two increasing numbers"]
        if kind == "loguniform" and values[0] <= 0:
            return None, [f"{found}; expected bounds above 0"]
        if kind == "quniform" and not 0 < values[2] <= values[1] - values[0]:
            return None, [f"{found}; expected a step above 0 and at most upper - lower"]
        if kind == "randint":
            values = [values[0], values[1] - 1]
        elif kind != "quniform" or any(isinstance(v, float) for v in values):  # quniform of whole numbers draws them
            values = [float(v) for v in values]
    return Draw.model_validate({"kind": kind, "values": tuple(values)}), []


# --- tuning ----------------------------------------------------------------------------------------------------------


_HELD_OUT = {
    "score_on": "tuning trials are scored on held-out training examples",
    "validation_fraction": "set tune.validation_fraction",
    "prompts": "tuning trials read definitions unchanged",
}
"""Benchmark settings that tuning decides itself, and why or where."""


def _tune(
    content: Any, template: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]
) -> tuple[TuneSettings | None, list[str]]:
    """Read the `tune:` block; values are tried on the template, those for one method with that method."""
    tune, faults = _group(TuneSettings, content, "tune")
    if not isinstance(tune, TuneSettings):
        return None, faults
    if isinstance(tune.on, Mapping):
        faults += _group(BenchmarkSettings, tune.on, "tune.on")[1]
        faults += [f"tune.on.{key}: has no effect; {_HELD_OUT[key]}" for key in tune.on if key in _HELD_OUT]
    taken = {path: f"search.{axis}" for axis, path in _paths(axes)}
    written = {name: group for name, group in template.items() if group is not None}
    taken |= {path: f"trial.{path}" for path in flatten("trial", written)}
    faults += _tuned_axes("tune.search", tune.search, template, taken)
    faults += _overlaps("tune.search", tune.search)
    for name, own in tune.by_method.items():
        block = f"tune.by_method.{name}"
        try:
            method_class(name)
        except ConfigError as error:
            faults.append(f"{block}: {error}")
        else:
            faults += _tuned_axes(block, own, {**template, "method": {"name": name}}, taken)
            faults += _overlaps(block, tune.tried(name))
    return tune, faults


def _tuned_axes(
    block: str, axes: Mapping[str, Sequence[Any]], template: Mapping[str, Any], taken: Mapping[str, str]
) -> list[str]:
    _, before = _trial(template)
    faults = []
    for axis, values in axes.items():
        where, group = f"{block}.{axis}", axis.partition(".")[0]
        leaves = dict.fromkeys(leaf for value in values for leaf in flatten(axis, value))
        if group not in ("method", "router", "training") or axis in (group, "method.name"):
            faults.append(f"{where}: expected a setting of method (not its name), router or training")
        elif setters := [setter for path, setter in taken.items() if any(_meet(path, leaf) for leaf in leaves)]:
            faults.append(f"{where}: {setters[0]} sets it too; leave one of them out")
        elif not (group == "method" and block == "tune.search"):  # checked for each method of the sweep
            faults += _axis(axis, list(values), template, set(before), {}, {}, block)
    return faults


def _meet(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


# --- content ---------------------------------------------------------------------------------------------------------


def _short(value: Any) -> str:
    return redact(yaml_text(value, one_line=True))[:60]


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in tree.items()}


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    for key in path[:-1]:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            return False
    tree[path[-1]] = value
    return True


def _apply_override(content: dict[str, Any], override: str) -> list[str]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return [f"--set {override}: expected path=value, e.g. --set trial.training.epochs=1"]
    value = parse_yaml(text, f"--set {override}")
    if value is None and text.strip().lower() not in ("null", "~"):  # such as an empty shell variable
        end = f"write {path.strip()}=null to remove an axis" if keys[0] == "search" else "leave it out for the file's"
        return [f"--set {override}: found nothing after '='; write a value, or {end}"]
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
    for block in (["search"], ["tune", "search"], ["tune", "by_method"]):
        start = len(block) + (block[-1] == "by_method")
        if keys[: len(block)] == block and len(keys) > start:
            return [*keys[:start], ".".join(keys[start:])]
    return keys


def _unknown_key(key: str, allowed: Sequence[str], block: str = "") -> str:
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
