"""Is the disk whole, and does the tracker hold what the journals say? `verify_*` read and change nothing.

`repair_*` set aside what is damaged, so that the same run command makes it again, and bring the tracker what it lacks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latent_sweep.errors import ConfigError, StoreError
from latent_sweep.report.tables import PAGE_FILE, mixed_lines
from latent_sweep.results import summaries
from latent_sweep.results.definition import trial_name
from latent_sweep.security import quoted
from latent_sweep.settings import flatten, parse_yaml
from latent_sweep.storage.checksummed import is_sealed, set_aside
from latent_sweep.storage.folders import SETTINGS, SweepFolder, TrialFolder, driving, writing
from latent_sweep.storage.journal import Event, stages, status
from latent_sweep.storage.predictions import ANSWERS
from latent_sweep.storage.storage import JOURNAL
from latent_sweep.storage.trial_files import PREDICTIONS, RESULT, SCORES, contradictions, damages
from latent_sweep.sweep.tuning import TUNING
from latent_sweep.tracking.contents import (
    Point,
    RunContent,
    configuration_contents,
    run_tags,
    sweep_content,
    trial_content,
)
from latent_sweep.tracking.mlflow import MlflowTracker, StoredRun

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison: what was looked at, and what differs."""

    faults: Sequence[str]
    """One line each: where, what was found, what was expected."""
    counts: Mapping[str, int]
    """How many of what were looked at."""
    notes: Sequence[str] = ()
    """What is no fault, and worth knowing."""

    def text(self) -> str:
        """The faults and the counts, for people."""
        looked_at = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
        end = f"{len(self.faults)} differences" if self.faults else "equal"
        notes = [f"not all trials were computed alike: {note}" for note in self.notes]
        return "\n".join([*self.faults, *notes, f"{end}; looked at {looked_at or 'nothing'}"])

    def record(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {"faults": list(self.faults), "counts": dict(self.counts), "notes": list(self.notes)}


# --- the disk --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fault:
    """Something on disk that is not as it should be."""

    text: str
    trials: Sequence[TrialFolder]
    """Those that need it."""
    what: Path | str
    """The file, or the lineage of the snapshot."""
    remedy: str
    """What the next run does about it, once it is set aside."""


def verify_disk(sweep: SweepFolder) -> Verdict:
    """Whether every journal is as it was written, and every file and snapshot as the journals say.

    The files of a trial that has not come to its end are not looked at: a run writes them again.
    """
    counts: Counter[str] = Counter()
    faults = [fault.text for fault in _disk_faults(sweep, counts)]
    return Verdict(faults, counts, () if faults else list(mixed_lines(summaries.summarize(sweep))))


def repair_disk(sweep: SweepFolder) -> list[str]:
    """Set aside what is damaged, so that the same run command makes it again; a line for each thing that it will do.

    A trial whose snapshot is damaged or missing is opened again by an event in its journal. Where the storage is an
    object store, what is whole there is fetched first.

    Raises:
        StoreError: `sweep.json` is damaged, or the storage cannot be read or written.
    """
    store, storage = sweep.snapshots, sweep.storage
    remedies: dict[str, None] = {}

    def mend(fault: _Fault, otherwise: Callable[[Path], object]) -> None:
        with writing(sweep, {t.training_id: [other.trial_id for other in fault.trials] for t in fault.trials}):
            if isinstance(fault.what, Path):
                if fault.what.exists():
                    set_aside(fault.what, "is damaged")
                otherwise(fault.what)
                mended = fault.what.exists()
            else:
                mended = store.get(fault.what) is not None
                for trial in () if mended else fault.trials:
                    trial.journal.append("lost", kind="damaged", message=fault.text)
        if not mended:
            remedies[fault.remedy] = None

    with driving(sweep, lambda driver: log.warning("%s is being run by %s; waiting", sweep.name, driver)):
        for way in (storage.sync, storage.remove):  # what an object store has may be whole; if not, it goes there too
            for fault in list(_disk_faults(sweep, Counter())):
                mend(fault, way)
    return list(remedies)


def _disk_faults(sweep: SweepFolder, counts: Counter[str]) -> Iterator[_Fault]:
    """Find everything that is not as it should be, and count what is looked at."""
    users: dict[str, list[TrialFolder]] = {}
    stage_of: dict[str, Event] = {}
    for trial in sweep:
        try:
            events = trial.events()
        except StoreError as error:
            yield _fault(sweep, trial, trial.path / JOURNAL, str(error), _TOLD_ANEW)
            continue
        if not events:
            if (result := trial.path / RESULT).exists():
                text = f"{trial.path / JOURNAL}: found no event; expected how {result} came about"
                yield _fault(sweep, trial, result, text, "the trial is run again")
            continue
        counts["journals"] += 1
        yield from _file_faults(sweep, trial, events, counts)
        if status(events) in ("finished", "stopped"):
            stage_of |= {event["lineage"]: event for event in stages(events)}
            for lineage in dict.fromkeys(event["lineage"] for event in stages(events)):
                users.setdefault(lineage, []).append(trial)
    if (tuning := sweep.path / TUNING).exists():
        counts["files"] += 1
        if not is_sealed(tuning):
            text = f"{tuning}: does not check against its digest; expected what was chosen for the trials"
            yield _Fault(text, (), tuning, "what was chosen is written again, from what the candidates have left")
    store = sweep.snapshots
    for lineage, trials in users.items():
        counts["snapshots"] += 1
        if (found := store.fault(lineage)) is not None:
            name, others = trial_name(sweep, trials[0]), f" and {len(trials) - 1} more" if len(trials) > 1 else ""
            text = f"{name}{others}: snapshot {lineage}, which the journal names, {found}"
            stage = stage_of[lineage]
            remedy = f"{name}{others}: stage {stage['tasks_seen']}, task {stage['task']}, is learned again"
            yield _Fault(text, trials, lineage, remedy)


_TOLD_ANEW = "all rows are scored again, from the answers that are known; what the store holds is not learned again"


def _file_faults(
    sweep: SweepFolder, trial: TrialFolder, events: Sequence[Event], counts: Counter[str]
) -> Iterator[_Fault]:
    settings = trial.path / SETTINGS
    if trial.groups is None and (found := _settings_fault(settings, trial.params)) is not None:
        yield _fault(sweep, trial, settings, f"{settings} {found}", "it is written again")
    if status(events) == "running":
        return
    counts["files"] += len({name for event in events for name in event.get("files", {})})
    seen = len(stages(events))
    remedies = {
        JOURNAL: _TOLD_ANEW,
        SCORES: "it is written again from the journal",
        PREDICTIONS: f"row {seen} is scored again, from the answers that are known",
        ANSWERS: "its row and those after it are scored again, from the answers that are known",
        RESULT: "it is written again",
    }
    found_damages = damages(trial.path, events)
    for damage in found_damages or contradictions(trial.path, events):
        remedy = remedies[damage.path.relative_to(trial.path).parts[0]]
        yield _fault(sweep, trial, damage.path, f"{damage.path} {damage.found}", remedy)


def _fault(sweep: SweepFolder, trial: TrialFolder, path: Path, text: str, remedy: str) -> _Fault:
    return _Fault(text, [trial], path, f"{trial_name(sweep, trial)}: {path.name}: {remedy}")


def _settings_fault(path: Path, params: Mapping[str, object]) -> str | None:
    """Describe the fault of a trial's settings file; None where it has none."""
    try:
        found = flatten("trial", parse_yaml(path.read_text(encoding="utf-8"), "it"))
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, ConfigError) as error:
        return f"cannot be read: {error}"
    told = dict(params)
    tasks, names = found.pop("benchmark.tasks", None), told.pop("benchmark.tasks", None)
    # sweep.json has the names in the order that they are learned in, whether the settings name them or an order
    same = not isinstance(tasks, list) or sorted(map(str, tasks)) == sorted(str(names).split())
    return None if same and found == told else "says something else than sweep.json"


# --- the tracker -----------------------------------------------------------------------------------------------------


def verify_tracker(sweep: SweepFolder, mirror: MlflowTracker) -> Verdict:
    """Whether MLflow holds exactly what the journals say: runs, params, tags, status, every metric point, artifacts.

    Artifacts are compared byte for byte, snapshots by size, pictures by name. Params, tags and artifacts that others
    have added are none of our business; points and runs too many are faults.

    Raises:
        TrackingError: MLflow cannot be reached or refuses.
        StoreError: a journal or a trial's file is damaged.
    """
    counts: Counter[str] = Counter()
    return Verdict([text for _, text in _tracker_faults(sweep, mirror, counts)], counts)


def repair_tracker(sweep: SweepFolder, mirror: MlflowTracker) -> None:
    """Bring MLflow all that it lacks, and put new runs in the place of those that still differ.

    Raises:
        TrackingError: MLflow cannot be reached or refuses.
        StoreError: a journal or a trial's file is damaged.
    """
    mirror.close()
    if differing := {run for run, _ in _tracker_faults(sweep, mirror, Counter())}:
        mirror.renew(differing)


def _tracker_faults(
    sweep: SweepFolder, mirror: MlflowTracker, counts: Counter[str]
) -> Iterator[tuple[tuple[str, str], str]]:
    """Find everything that differs, with kind and key of its run, and count what is looked at."""
    found: dict[tuple[str, str], list[StoredRun]] = {}
    for run in mirror.read():
        found.setdefault((run.kind, run.key), []).append(run)
    parents = [run.run_id for run in found.get(("sweep", sweep.sweep_id), [])]
    for content in _contents(sweep):
        identity = (content.kind, content.key)
        runs = found.pop(identity, [])
        if len(runs) != 1:
            yield identity, f"{content.name}: found {len(runs)} runs; expected one"
            continue
        tags = {**run_tags(sweep, content), **content.tags, **content.mark}
        if content.kind != "sweep":
            tags["mlflow.parentRunId"] = " or ".join(parents)
        for fault in _faults(content, tags, runs[0], mirror.read_artifact):
            yield identity, f"{content.name}: {fault}"
        counts.update(
            runs=1,
            params=len(content.params),
            tags=len(tags),
            points=len(content.points),
            artifacts=len(content.artifacts),
        )
    for (kind, key), runs in found.items():
        yield (kind, key), f"{kind} {key}: found {len(runs)} runs; expected none"


def _contents(sweep: SweepFolder) -> Iterator[RunContent]:
    for trial in sweep:
        if events := trial.events():
            yield trial_content(sweep, trial, events)
    summary = summaries.summarize(sweep)
    yield from configuration_contents(sweep, summary)
    yield sweep_content(sweep, summary)


def _faults(
    content: RunContent, tags: Mapping[str, str], run: StoredRun, read: Callable[[StoredRun, str], bytes]
) -> Iterator[str]:
    if run.status != content.status:
        yield f"found status {run.status}; expected {content.status}"
    for kind, wanted, there in (("param", content.params, run.params), ("tag", tags, run.tags)):
        for name, value in wanted.items():
            if there.get(name) != value:
                yield f"{kind} {name}: found {quoted(there.get(name), 200)}; expected {quoted(value, 200)}"
    yield from _point_faults(content, run.points)
    for path, artifact in content.artifacts.items():
        if path not in run.artifacts:
            yield f"artifact {path}: found none"
        elif path.startswith("snapshots/") and isinstance(artifact, Path):
            if run.artifacts[path] != (size := artifact.stat().st_size):
                yield f"artifact {path}: found {run.artifacts[path]} bytes; expected {size}"
        elif path != PAGE_FILE and isinstance(artifact, (Path, str)):  # a page has pictures, drawn anew each time
            wanted_bytes = artifact.read_bytes() if isinstance(artifact, Path) else artifact.encode()
            if read(run, path) != wanted_bytes:
                yield f"artifact {path}: found another content than on disk"


def _point_faults(content: RunContent, points: Sequence[Point]) -> Iterator[str]:
    """Find values that are missing or too many.

    Of a sweep and its configurations it is not known what they were earlier: only a value that directly repeats itself
    is there too often.
    """
    newest: dict[tuple[str, int], float] = {}
    excess: Counter[tuple[str, int, float]] = Counter()
    for point in points:
        place = (point.key, point.step)
        excess[(*place, point.value)] += content.kind == "trial" or newest.get(place) == point.value
        newest[place] = point.value
    if content.kind == "trial":
        excess -= Counter((point.key, point.step, point.value) for point in content.history)
    for (key, step, value), count in excess.items():
        if count:
            yield f"metric {key} at step {step}: found {value!r} {count} times too often"
    last = {} if content.kind == "trial" else dict(sorted(newest))
    for key in last.keys() - {point.key for point in content.points}:
        yield f"metric {key}: shows {newest[key, last[key]]!r}; expected none"
    for point in content.points:
        found = newest.get((point.key, point.step))
        if (later := last.get(point.key, 0)) > point.step:
            yield f"metric {point.key}: shows {newest[point.key, later]!r}, of step {later}; expected step {point.step}"
        if found != point.value:
            yield f"metric {point.key} at step {point.step}: found {found!r}; expected {point.value!r}"
