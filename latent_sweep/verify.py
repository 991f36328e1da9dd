"""Does the tracker hold what the journals say, and is the disk whole? Reads; changes nothing.

Except that a snapshot that does not check against its digest is set aside, as whenever one is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from latent_sweep import report
from latent_sweep.backends.mlflow_mirror import FoundRun, MlflowMirror
from latent_sweep.errors import StoreError
from latent_sweep.redaction import quoted
from latent_sweep.snapshots import SnapshotStore
from latent_sweep.tracked import (
    Point,
    RunContent,
    configuration_contents,
    run_tags,
    sweep_content,
    trial_content,
    trial_name,
)
from latent_sweep.tracking import SweepFolder, TrialFolder


@dataclass(frozen=True)
class Verdict:
    """What was compared, and what differs."""

    faults: Sequence[str]
    """One line each: where, what was found, what was expected."""
    counts: Mapping[str, int]
    """How many of what were looked at."""

    def text(self) -> str:
        """The faults and the counts, for people."""
        looked_at = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
        end = f"{len(self.faults)} differences" if self.faults else "equal"
        return "\n".join([*self.faults, f"{end}; looked at {looked_at or 'nothing'}"])


def verify_disk(sweep: SweepFolder) -> Verdict:
    """Whether every journal can be read, and every snapshot that a result names checks against its digest."""
    store = SnapshotStore(sweep.storage / "snapshots")
    faults: list[str] = []
    users: dict[str, TrialFolder] = {}
    counts = Counter(journals=0, snapshots=0)
    for trial in sweep:
        try:
            counts["journals"] += bool(trial.events())
            named = (trial.read_json("result.json") or {}).get("snapshots", [])
        except StoreError as error:
            faults.append(str(error))
            continue
        users |= {Path(path).stem: trial for path in named}
    for lineage, user in users.items():
        counts["snapshots"] += 1
        if store.get(lineage) is None:
            faults.append(
                f"{trial_name(sweep, user)}: its result names snapshot {lineage}, which is missing or does not check "
                f"against its digest; remove {user.path / 'scores.json'} and run the sweep again: only what is missing "
                "is learned"
            )
    return Verdict(faults, counts)


def verify_tracker(sweep: SweepFolder, mirror: MlflowMirror) -> Verdict:
    """Whether MLflow holds exactly what the journals say: runs, params, tags, status, every metric point, artifacts.

    Artifacts are compared byte for byte, snapshots by size, pictures by name. Params, tags and artifacts that others
    have added are none of our business; points and runs too many are faults.

    Raises:
        TrackingError: MLflow cannot be reached or refuses.
        StoreError: a journal or a trial's file is damaged.
    """
    found: dict[tuple[str, str], list[FoundRun]] = {}
    for run in mirror.read():
        found.setdefault((run.kind, run.key), []).append(run)
    parents = [run.run_id for run in found.get(("sweep", sweep.sweep_id), [])]
    faults: list[str] = []
    counts: Counter[str] = Counter()
    for content in _contents(sweep):
        runs = found.pop((content.kind, content.key), [])
        if len(runs) != 1:
            faults.append(f"{content.name}: found {len(runs)} runs; expected one")
            continue
        tags = {**run_tags(sweep, content.kind, content.key), **content.tags, **content.mark}
        if content.kind != "sweep":
            tags["mlflow.parentRunId"] = " or ".join(parents)
        faults += [f"{content.name}: {fault}" for fault in _faults(content, tags, runs[0], mirror.read_artifact)]
        counts.update(
            runs=1,
            params=len(content.params),
            tags=len(tags),
            points=len(content.points),
            artifacts=len(content.artifacts),
        )
    faults += [f"{kind} {key}: found {len(runs)} runs; expected none" for (kind, key), runs in found.items()]
    return Verdict(faults, counts)


def _contents(sweep: SweepFolder) -> Iterator[RunContent]:
    for trial in sweep:
        if events := trial.events():
            yield trial_content(sweep, trial, events)
    summary = report.summarise(sweep)
    yield from configuration_contents(sweep, summary)
    yield sweep_content(sweep, summary)


def _faults(
    content: RunContent, tags: Mapping[str, str], run: FoundRun, read: Callable[[str, str], bytes]
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
        elif isinstance(artifact, (Path, str)):
            wanted_bytes = artifact.read_bytes() if isinstance(artifact, Path) else artifact.encode()
            if read(run.run_id, path) != wanted_bytes:
                yield f"artifact {path}: found another content than on disk"


def _point_faults(content: RunContent, points: Sequence[Point]) -> Iterator[str]:
    """Values that are missing or too many; of a sweep and its configurations, what they were earlier is not known."""
    there = Counter((point.key, point.step, point.value) for point in points)
    told = Counter((point.key, point.step, point.value) for point in content.history)
    allowed = told if content.kind == "trial" else Counter(dict.fromkeys(there, 1))
    for (key, step, value), count in (there - allowed).items():
        yield f"metric {key} at step {step}: found {value!r} {count} times too often"
    newest = {(point.key, point.step): point.value for point in points}
    for point in content.points:
        found = newest.get((point.key, point.step))
        if found != point.value:
            yield f"metric {point.key} at step {point.step}: found {found!r}; expected {point.value!r}"
