"""Choosing settings before the trials run: candidates, which are trials of their own, and what follows from them.

A *choice* is due for every value of the settings in `tune.apply_to`. Its candidates learn other rows than those that
trials are judged on: the first tasks of the stream or another benchmark, scored on rows held out of the training rows.
They make up a sweep of their own, `<name>-tuning`, which runs, resumes and is reused like any other.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from latent_sweep.data.schema import load_benchmark, task_sequence
from latent_sweep.errors import ConfigError, LatentSweepError, StoreError
from latent_sweep.labels import format_value, label, short_names
from latent_sweep.routing.gaussian import ROUTED
from latent_sweep.settings import Settings, canonical_json, flatten
from latent_sweep.storage.checksummed import is_sealed, sealed_json
from latent_sweep.storage.folders import SweepFolder, TrialFolder, tuning_name
from latent_sweep.storage.journal import stages, status
from latent_sweep.sweep.config import MOST_TRIALS, Sweep, fault_report, trial_settings
from latent_sweep.sweep.plan import Trial, has_setting, plan_trial, points, resolve, setting, trial_faults
from latent_sweep.sweep.schema import SchedulerSettings, TrialSettings, TuneSettings, WrittenTrial

EXACT = 9
"""Decimals of a mean score: counts of right rows tell scores apart before them, and the order of a sum only after."""

TUNING = "tuning.json"
"""What was chosen, in the sweep's folder."""


class NotChosen(LatentSweepError):
    """Candidates have ended without a score, so nothing can be chosen."""


@dataclass(frozen=True)
class Candidate:
    """One combination of values to try."""

    values: Mapping[str, Any]
    """By dotted path."""
    trial: Trial


@dataclass(frozen=True)
class Choice:
    """What is to be chosen for the trials that have these settings in common."""

    shared: Mapping[str, Any]
    """Groups and settings of `tune.apply_to`, as plain values."""
    candidates: tuple[Candidate, ...]
    """Empty where the method learns nothing, so that there is nothing to choose."""


def choices(sweep: Sweep) -> list[Choice]:
    """List the choices that a sweep's `tune:` block asks for, each with its candidates; none without the block.

    Raises:
        ConfigError: listing every fault of every candidate, or that candidates would read what trials are judged on.
    """
    tune = sweep.tune
    if tune is None:
        return []
    found: dict[str, Choice] = {}
    unread: dict[str, frozenset[str]] = {}
    faults: list[str] = []
    methods, judged, unknown = set(), set(), set(tune.apply_to)
    for point in points(sweep):
        settings = resolve(trial_settings(sweep, point))
        methods.add(settings.method.name)
        unknown -= {path for path in unknown if has_setting(settings, path)}
        shared = _shared(settings, tune)
        key, b = canonical_json(shared), settings.benchmark
        if (stream := (b.name, b.order, b.tasks)) not in judged:  # of each, for trials that share a choice may differ
            judged.add(stream)
            try:
                _rows_read(tune, settings)
            except ConfigError as error:
                faults.append(str(error))
                continue
        unread.setdefault(key, _unread(tune, settings))
        if missed := sorted(unread[key] - _unread(tune, settings)):
            faults.append(
                f"tune: candidates are made from the first trial of a choice, which does not read {', '.join(missed)}, "
                f"and a trial with router.combine {settings.router.combine} does, which shares that choice; "
                "add router.combine to tune.apply_to"
            )
        if key not in found:
            try:
                choice = Choice(shared, tuple(_candidates(sweep, tune, point, settings)))
            except ConfigError as error:
                faults.append(str(error))
                continue
            found[key] = choice
            faults += [fault for candidate in choice.candidates for fault in trial_faults(candidate.trial)]
    for name in tune.by_method:
        if name not in methods:
            faults.append(f"tune.by_method.{name}: no trial has this method; they have {', '.join(sorted(methods))}")
    for path in sorted(unknown):
        faults.append(f"tune.apply_to: found {path!r}; expected a group or setting of trial, e.g. method.rank")
    count = sum(len(choice.candidates) for choice in found.values())
    if count > MOST_TRIALS:
        faults.append(f"tune: {count:,} candidates; at most {MOST_TRIALS:,} are possible. Try fewer values")
    if faults:
        raise fault_report(sweep.source, list(dict.fromkeys(faults)))
    return list(found.values())


def tuning_sweep(sweep: Sweep) -> Sweep:
    """Make the sweep that candidates belong to; none of them is stopped early, so that all can be compared."""
    run = sweep.run.model_copy(update={"scheduler": SchedulerSettings()})
    own: dict[str, Any] = {
        "name": tuning_name(sweep.name),
        "grid": {},
        "draws": {},
        "tune": None,
        "run": run,
        "tuning_of": sweep.name,
    }
    return sweep.model_copy(update=own)


def candidate_trials(found: Sequence[Choice]) -> list[Trial]:
    """List the trials of all candidates, each once."""
    trials = {c.trial.trial_id: c.trial for choice in found for c in choice.candidates}
    return list(trials.values())


def _shared(settings: TrialSettings, tune: TuneSettings) -> dict[str, Any]:
    """Return what trials that share a choice have in common: of groups what training reads, or all where it is nothing.

    A setting that the trial's method does not have is None.
    """
    shared: dict[str, Any] = {}
    for path in tune.apply_to:
        value = setting(settings, path) if has_setting(settings, path) else None
        shared[path] = value.training_identity() or value.identity() if isinstance(value, Settings) else value
    return shared


def _unread(tune: TuneSettings, settings: TrialSettings) -> frozenset[str]:
    """Return the paths of what would be tried that the trial does not read: those of a router that it does without."""
    tried = tune.tried(settings.method.name)
    routers = frozenset(path for path in tried if path.startswith("router.") and path != "router.combine")
    return frozenset() if settings.router.combine in ROUTED else routers


def _candidates(
    sweep: Sweep, tune: TuneSettings, point: Mapping[str, Any], settings: TrialSettings
) -> Iterator[Candidate]:
    """Yield the candidates of the choice that the trial at this point is the first to need, each trial once."""
    changed = {**point, **_rows_read(tune, settings), "seed": tune.seed}
    told = [path for path in point if any(path == p or path.startswith(f"{p}.") for p in tune.apply_to)]
    tried = tune.tried(settings.method.name)
    seen = set()
    for values in itertools.product(*tried.values()):
        axes = zip(tried, values, strict=True)
        combination = {leaf: value for axis, values in axes for leaf, value in flatten(axis, values).items()}
        trial = plan_trial(trial_settings(sweep, {**changed, **combination}), [*told, *combination])
        if not any(trial.method().learns_from(i, len(trial.tasks)) for i in range(len(trial.tasks))):
            return
        if trial.trial_id not in seen:
            seen.add(trial.trial_id)
            yield Candidate(combination, trial)


def _rows_read(tune: TuneSettings, settings: TrialSettings) -> dict[str, Any]:
    """Return the settings of the benchmark that candidates read, by dotted path."""
    judged = settings.benchmark
    held_out: dict[str, Any] = {"score_on": "validation", "validation_fraction": tune.validation_fraction}
    held_out["prompts.definition"] = "verbatim"  # as all training rows have it
    spec = load_benchmark(judged.name)
    if isinstance(tune.on, str):
        names = [task.name for task in task_sequence(judged, spec)]
        if tune.tasks is None or tune.tasks >= len(names):
            raise ConfigError(
                f"tune.tasks: found {tune.tasks}, but trials learn {len(names)} tasks of {spec.name}; expected fewer, "
                "as nothing may be chosen on the whole stream that trials are judged on"
            )
        changed = {"order": judged.order, "tasks": names[: tune.tasks]} | held_out
    else:
        other = load_benchmark(str(tune.on["name"]))
        if other.name == spec.name:
            raise ConfigError(
                f"tune.on: found {other.name}, the benchmark that trials are judged on; name another one, or write "
                "first_tasks"
            )
        named = {"order": None, "tasks": None} | dict(tune.on)
        asked = judged.model_copy(update={"order": named["order"], "tasks": _tuple(named["tasks"])})
        try:
            names = [task.name for task in task_sequence(asked, other)]
        except ConfigError as error:
            raise ConfigError(str(error).replace("benchmark.", "tune.on.", 1)) from error
        changed = named | {"tasks": names[: tune.tasks]} | held_out
    return {f"benchmark.{name}": value for name, value in changed.items()}


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


# --- choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """A candidate's end."""

    values: Mapping[str, Any]
    trial_id: str
    score: float | None
    """Average performance on the held-out rows; None where its loss was not finite."""
    loss: float | None
    """Task loss at the end of each task, the mean over tasks."""
    steps: int
    """Optimizer steps of all tasks; what another candidate has learned takes none."""
    seconds: float
    """Of learning and answering; what another candidate has learned costs nothing."""


@dataclass(frozen=True)
class Chosen:
    """What was chosen for trials with these settings in common, and why."""

    shared: Mapping[str, Any]
    values: Mapping[str, Any]
    """By dotted path; empty where nothing was tried."""
    tried: tuple[Tried, ...]
    remarks: tuple[str, ...]
    """What a reader should know: ties, and values at an edge of what was tried."""


def choose(found: Sequence[Choice], folder: SweepFolder) -> list[Chosen]:
    """Choose the best candidate of each choice: highest score, then lowest loss, then smallest values.

    Args:
        folder: of the candidates' sweep.

    Raises:
        NotChosen: candidates have not come to an end, or a choice has none with a score.
    """
    ended = {trial.trial_id: trial for trial in folder} if any(choice.candidates for choice in found) else {}
    return [_chosen(choice, ended) for choice in found]


def known_choices(found: Sequence[Choice], folder: SweepFolder) -> list[Chosen] | None:
    """Make the choices as `choose` does, where all candidates have ended already; None where some have not."""
    try:
        return choose(found, folder)
    except (NotChosen, StoreError):
        return None


def _chosen(choice: Choice, ended: Mapping[str, TrialFolder]) -> Chosen:
    if missing := [c for c in choice.candidates if c.trial.trial_id not in ended]:
        raise NotChosen(f"{len(missing)} of {len(choice.candidates)} candidates have not begun")
    spent: set[str] = set()
    tried = tuple(_tried(candidate, ended[candidate.trial.trial_id], spent) for candidate in choice.candidates)
    if not tried:
        return Chosen(choice.shared, {}, (), ())
    scored = [t for t in tried if t.score is not None]
    if not scored:
        raise NotChosen(f"{_label(tried[0].values)}, ...: no candidate has a finite loss; try smaller learning rates")
    best = min(scored, key=_rank)
    return Chosen(choice.shared, best.values, tried, tuple(_remarks(best, tried)))


def _tried(candidate: Candidate, trial: TrialFolder, spent: set[str]) -> Tried:
    """Read how a candidate has ended.

    Args:
        spent: lineages that other candidates have told of having learned, with this one maybe; those of it are added.
    """
    events = trial.events()
    told, end = stages(events), status(events)
    not_finite = end == "failed" and events[-1]["kind"] == "non_finite"
    if end != "finished" and not not_finite:
        raise NotChosen(
            f"candidate {_label(candidate.values)} ({trial.path}) is {end}, so nothing can be chosen; its journal says "
            "why. Run the same command again: what is complete is not repeated"
        )
    metrics = [event["metrics"] for event in told]
    learned = [event for event in told if not event.get("reused") and event["lineage"] not in spent]
    spent.update(event["lineage"] for event in learned)
    losses = [found["train_loss"] for found in metrics if "train_loss" in found]
    return Tried(
        values=dict(candidate.values),
        trial_id=trial.trial_id,
        score=None if not_finite else metrics[-1]["AP"],
        loss=math.fsum(losses) / len(losses) if losses and not not_finite else None,
        steps=sum(event.get("steps") or 0 for event in learned),
        seconds=sum(event["metrics"].get("seconds_train", 0.0) for event in learned)
        + sum(found.get("seconds_eval", 0.0) for found in metrics),
    )


def _rank(tried: Tried) -> tuple[Any, ...]:
    """Return a key by which the better of two candidates is the smaller."""
    assert tried.score is not None
    return (
        -round(tried.score, EXACT),
        math.inf if tried.loss is None else tried.loss,
        *map(_size, tried.values.values()),
    )


def _size(value: Any) -> tuple[int, float, str]:
    """Return a key that orders numbers by size, before other values by their text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, format_value(value)


def _remarks(best: Tried, tried: Sequence[Tried]) -> Iterator[str]:
    """Say what makes the choice doubtful: values at an edge of those tried, and ties."""
    names = short_names(best.values)
    for path, value in best.values.items():
        others = sorted({t.values[path] for t in tried if path in t.values and _size(t.values[path])[0] == 0})
        if len(others) > 1 and value in (others[0], others[-1]):
            edge = "smallest" if value == others[0] else "largest"
            yield f"the best {names[path]}, {format_value(value)}, is the {edge} tried"
    equal = [t for t in tried if t.score is not None and t is not best and _rank(t)[0] == _rank(best)[0]]
    if equal:
        verb = "was" if len(equal) == 1 else "were"
        yield f"as good {verb} {'; '.join(_label(t.values) for t in equal)}, with a higher loss or larger values"
    if failed := [t for t in tried if t.score is None]:
        yield f"not finite: {'; '.join(_label(t.values) for t in failed)}"


def _label(values: Mapping[str, Any]) -> str:
    names = short_names(values)
    return label({names[path]: value for path, value in values.items()})


def chosen_for(sweep: Sweep, chosen: Sequence[Chosen]) -> Callable[[WrittenTrial], Mapping[str, Any]] | None:
    """Return what gives a trial the settings chosen for it; None where nothing is to be chosen. See `expand`."""
    values, tune = {canonical_json(c.shared): c.values for c in chosen}, sweep.tune
    if tune is None:
        return None

    def look_up(written: WrittenTrial) -> Mapping[str, Any]:
        return values[canonical_json(_shared(resolve(written), tune))]

    return look_up


def stand_ins(found: Sequence[Choice]) -> list[Chosen]:
    """Return what stands for the choices before they are made: each one's first candidate."""
    return [Chosen(c.shared, c.candidates[0].values if c.candidates else {}, (), ()) for c in found]


# --- on disk ---------------------------------------------------------------------------------------------------------


def tuning_content(sweep: Sweep, chosen: Sequence[Chosen]) -> bytearray:
    """Write what was chosen, from what, on what, as the sealed content of `TUNING`."""
    assert sweep.tune is not None
    content = {"tune": sweep.tune.model_dump(mode="json"), "chosen": [asdict(c) for c in chosen]}
    return sealed_json(content, indent=1)


def read_tuning(folder: SweepFolder) -> list[Chosen] | None:
    """Read what was chosen for a sweep; None where nothing was, or the file does not check against its digest.

    Whoever only looks changes nothing: `verify` says what is damaged.
    """
    path = folder.path / TUNING
    if not is_sealed(path):
        return None
    content = json.loads(path.read_bytes())["content"]
    return [
        Chosen(c["shared"], c["values"], tuple(Tried(**t) for t in c["tried"]), tuple(c["remarks"]))
        for c in content["chosen"]
    ]


def tuning_lines(chosen: Sequence[Chosen]) -> list[str]:
    """Say what was chosen, one line a choice, with what it took."""
    lines = []
    for name, c in zip(choice_names([c.shared for c in chosen]), chosen, strict=True):
        if c.tried:
            best = next(t for t in c.tried if t.values == c.values)
            cost = f"{len(c.tried)} tried, {sum(t.steps for t in c.tried):,} steps"
            text = f"{name}: {_label(c.values)}, AP {100 * (best.score or 0):.1f} %; {cost}"
            lines.append("; ".join([text, *c.remarks]))
    return lines


def choice_names(shared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name choices by the names and settings they are for, and those of one name by what tells them apart."""
    whole = [dict(pair for path, group in one.items() for pair in flatten(path, group).items()) for one in shared]
    named = [{leaf: one[leaf] for leaf in one if leaf.endswith(".name") or leaf in shared[0]} for one in whole]
    names = []
    for one, known in zip(whole, named, strict=True):
        alike = [other for other, name in zip(whole, named, strict=True) if name == known]
        apart = {leaf: value for leaf, value in one.items() if any(other.get(leaf) != value for other in alike)}
        short = short_names([*known, *apart])
        names.append(label({short[leaf]: value for leaf, value in (known | apart).items()}))
    return names
