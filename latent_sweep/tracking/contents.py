"""What a tracker should hold of a sweep, by what lies on disk: the contents of one run for each trial, each finished
configuration and the sweep itself. Knows no tracker: the mirror brings it, `verify` compares with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from latent_sweep.labels import format_value, short_names
from latent_sweep.report import report
from latent_sweep.report.tables import PAGE_FILE
from latent_sweep.results import summaries
from latent_sweep.results.definition import defined_events
from latent_sweep.security import redact
from latent_sweep.settings import content_hash, yaml_text
from latent_sweep.storage.folders import SETTINGS, SweepFolder, TrialFolder
from latent_sweep.storage.journal import Event, Status, attempts, restarts, stages, status
from latent_sweep.storage.predictions import answers_file, is_kept
from latent_sweep.storage.trial_files import PREDICTIONS
from latent_sweep.sweep.plan import values_read
from latent_sweep.sweep.tuning import TUNING

Kind = Literal["sweep", "trial", "summary"]
RunStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
Artifact = Path | str | Callable[[], bytes]
"""A file as it lies on disk, a text, or a picture (PNG) that is drawn when it is needed."""

KEY_TAG: Mapping[Kind, str] = {"sweep": "sweep_id", "trial": "trial_id", "summary": "configuration"}
"""The tag that, with `kind`, says which run it is."""
_CONTEXT = (
    "method.name",
    "method.rank",
    "backbone.name",
    "backbone.dtype",
    "benchmark.name",
    "benchmark.order",
    "seed",
)
"""Settings shown as params of every run, whether they vary or not."""
_RUN_STATUS: Mapping[Status, RunStatus] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}
MODEL_FOLDER = "model"
"""The model of a sweep's winner, as MLflow has it: its name in a sweep's folder, and among the artifacts of its run."""
_TRIAL_FILES = (SETTINGS, "scores.json", "result.json", "journal.jsonl")
_LONGEST_PARAM, _LONGEST_TAG = 6000, 5000  # what MLflow accepts


@dataclass(frozen=True)
class Point:
    """One value of one metric; `time` is in Unix seconds."""

    key: str
    value: float
    step: int
    """The number of tasks seen; of a configuration, of finished trials; of a sweep, the second of its last event."""
    time: float


@dataclass(frozen=True)
class RunContent:
    """One run as it should be. Everything follows from the disk, so that bringing it twice brings the same."""

    kind: Kind
    key: str
    """With `kind` it says which run it is."""
    life: str
    """Which journal of the trial it tells of, by its first event: one whose folder was deleted begins another."""
    name: str
    start: float
    """Unix seconds."""
    status: RunStatus
    end: float
    """Unix seconds; means nothing while the run is running."""
    params: Mapping[str, str]
    tags: Mapping[str, str]
    mark: Mapping[str, str]
    """Tags that are written last: they say that everything else has arrived."""
    history: Sequence[Point]
    """Every value in order of time. A stage scored again, because its data changed, has two at its step."""
    artifacts: Mapping[str, Artifact]
    """By path; none while the run is running."""

    @property
    def points(self) -> list[Point]:
        """The newest value of each (metric, step)."""
        return list({(point.key, point.step): point for point in self.history}.values())


def trial_content(sweep: SweepFolder, trial: TrialFolder, events: Sequence[Event]) -> RunContent:
    """The run of a trial with these events, of which there is at least one.

    Raises:
        StoreError: a file of the trial is damaged.
    """
    starts = attempts(events)
    tags = {
        "training_id": trial.training_id,
        "attempt": starts[-1]["attempt"] if starts else 0,
        "node": starts[-1]["node"] if starts else "unknown",
        "status": status(events),
        "reason": summaries.end_reason(events),
        "restarts": ", ".join(restarts(events)),
    }
    return RunContent(
        kind="trial",
        key=trial.trial_id,
        life=life_of(events),
        name=redact(" ".join(filter(None, sweep.run_names[trial.trial_id])) or trial.trial_id),
        start=events[0]["time"],
        status=run_status(events),
        end=events[-1]["time"],
        params=_texts(_params(trial), _LONGEST_PARAM),
        tags=_texts(tags, _LONGEST_TAG),
        mark=trial_mark(sweep, events),
        history=list(_history(defined_events(trial, events))),
        artifacts={} if status(events) == "running" else _trial_artifacts(sweep, trial, events),
    )


def run_status(events: Sequence[Event]) -> RunStatus:
    """Return the status of the run of a trial with these events, of which there is at least one."""
    return _RUN_STATUS[status(events)]


def life_of(events: Sequence[Event]) -> str:
    """Names a journal by its first event: no other begins at the same time, on the same node, in the same process."""
    return events[0]["sha256"][:16]


def trial_mark(sweep: SweepFolder, events: Sequence[Event]) -> dict[str, str]:
    """Mark how much of a trial's journal has arrived, for this sweep: another one may share the trial."""
    return {"sweep_id": sweep.sweep_id, "mirrored_events": str(len(events))}


def unsent(events: Sequence[Event], arrived: int) -> list[Point]:
    """What a tracker may lack that has the points of so many `defined_events` for sure: newest values by metric, step.

    A value that is told again unchanged is no new one, unless another was told in between: that may have been sent.
    """
    history = list(_history(events))
    n_there = len(list(_history(events[:arrived])))
    there = {(point.key, point.step): point.value for point in history[:n_there]}
    told: dict[tuple[str, int], list[Point]] = {}
    for point in history[n_there:]:
        told.setdefault((point.key, point.step), []).append(point)
    return [points[-1] for place, points in told.items() if any(there.get(place) != point.value for point in points)]


def configuration_contents(sweep: SweepFolder, summary: summaries.Summary) -> Iterator[RunContent]:
    """The summary run of each configuration with a finished trial."""
    trials = {trial.trial_id: trial for trial in sweep}
    for configuration in summary.configurations:
        if configuration.n_finished:
            yield configuration_content(sweep, configuration, trials[configuration.trial_ids[0]])


def configuration_content(
    sweep: SweepFolder, configuration: summaries.Configuration, member: TrialFolder
) -> RunContent:
    """The summary run of a configuration with a finished trial: params, and mean, spread and count over seeds.

    Its tags say how many trials there are, and how many of them no mean is of.

    Args:
        member: one of its trials.
    """
    seed_name = short_names(sweep.axes).get(sweep.seed_axis, "seed")
    values: dict[str, float | None] = {"n": float(configuration.n_finished)}
    measures = {
        "AP": configuration.average_performance,
        "LA": configuration.learning_accuracy,
        "FM": configuration.forgetting,
    }
    for metric, found in measures.items():
        values |= {f"{metric}_mean": getattr(found, "mean", None), f"{metric}_std": getattr(found, "std", None)}
    end = _last_finish([configuration])
    return RunContent(
        kind="summary",
        key=content_hash(dict(configuration.values)),
        life="",
        name=redact(f"{sweep.run_names[member.trial_id][0]} mean".strip()),
        start=end,
        status="FINISHED",
        end=end,
        params=_texts({k: v for k, v in _params(member).items() if k != seed_name}, _LONGEST_PARAM),
        tags=_texts(
            {name: getattr(configuration, name) for name in ("n_trials", "n_stopped", "n_failed")}, _LONGEST_TAG
        ),
        mark={"sweep_id": sweep.sweep_id},
        history=_summary_points(values, configuration.n_finished, end),
        artifacts={},
    )


def sweep_content(sweep: SweepFolder, summary: summaries.Summary) -> RunContent:
    """The parent run: tables, the figure, the best AP."""
    from latent_sweep.report.figures import (
        curve_png,  # with matplotlib, which a sweep without a tracker never needs
    )

    work_left = summary.counts.get("pending", 0) + summary.counts.get("running", 0)
    summary = replace(summary, driven=False)  # what is told of a sweep is told at a run's end, by the one who drives it
    rows = report.records(summary)
    table = {"columns": list(rows[0]) if rows else [], "data": [list(row.values()) for row in rows]}
    # as a text, not by log_table: that appends to the table already there
    artifacts: dict[str, Artifact] = {
        "sweep_table.json": json.dumps(table),
        "report.md": redact(report.render(summary, "markdown")),
    }
    artifacts |= {name: sweep.path / name for name in (TUNING, PAGE_FILE) if (sweep.path / name).exists()}
    for path in sorted((sweep.path / MODEL_FOLDER).rglob("*")):
        if path.is_file():
            artifacts[path.relative_to(sweep.path).as_posix()] = path
    if (curves := summaries.curves(summary)) is not None:
        artifacts[f"{curves.x_name}_vs_AP.png"] = partial(curve_png, curves.x_name, curves.x_values, curves.series)
    return RunContent(
        kind="sweep",
        key=sweep.sweep_id,
        life="",
        name=f"sweep {sweep.name} {time.strftime('%Y-%m-%d')}",
        start=time.time(),
        status="KILLED" if work_left else "FINISHED",
        end=_last_finish(summary.configurations),
        params={},
        tags={"mlflow.loggedArtifacts": '[{"path": "sweep_table.json", "type": "table"}]'},
        mark={"sweep_id": sweep.sweep_id},
        # its step grows with whatever happens: the number of finished trials can fall
        history=_summary_points({"best_AP": summary.best_average_performance}, int(summary.latest), summary.latest),
        artifacts=artifacts,
    )


def run_tags(sweep: SweepFolder, content: RunContent) -> dict[str, str]:
    """The tags by which a run is found again."""
    found = {"kind": content.kind, KEY_TAG[content.kind]: content.key} | sweep_tags(sweep)
    return found | ({"journal": content.life} if content.life else {})


def sweep_tags(sweep: SweepFolder) -> dict[str, str]:
    """The tags of all runs of a sweep; candidates say for which sweep something is chosen among them."""
    found = {"sweep": sweep.name, "sweep_id": sweep.sweep_id}
    return found | ({"tuning_of": sweep.tuning_of} if sweep.tuning_of else {})


def _params(trial: TrialFolder) -> dict[str, Any]:
    shown = {path: trial.params[path] for path in _CONTEXT if path in trial.params} | values_read(trial)
    names = short_names(shown)
    return {names[path]: value for path, value in shown.items()}


def _history(events: Sequence[Event]) -> Iterator[Point]:
    """Every metric value of a journal; of what a finish tells, only what no stage has told."""
    told, last_step = set(), 0
    for event in events:
        if event["event"] == "stage":
            last_step = max(last_step, event["tasks_seen"])
            scores = {f"score/{task}": score for task, score in event["scores"].items()}
            for key, value in {**event["metrics"], **scores}.items():
                told.add((key, event["tasks_seen"]))
                yield Point(key, value, event["tasks_seen"], event["time"])
        elif event["event"] == "finished":
            for key, value in event["metrics"].items():
                if (key, last_step) not in told:
                    yield Point(key, value, last_step, event["time"])


def _summary_points(values: Mapping[str, float | None], step: int, time: float) -> list[Point]:
    """Values that change as trials finish: step and time follow from journals, so a closed sweep closes unchanged."""
    return [Point(key, value, step, time) for key, value in values.items() if value is not None]


def _last_finish(configurations: Sequence[summaries.Configuration]) -> float:
    """Return when the last of their trials finished, in Unix seconds; now, if none has."""
    ends = [found.last_finish for found in configurations if found.last_finish is not None]
    return max(ends, default=time.time())


def _trial_artifacts(sweep: SweepFolder, trial: TrialFolder, events: Sequence[Event]) -> dict[str, Artifact]:
    from latent_sweep.report.figures import score_matrix_png

    found: dict[str, Artifact] = {name: trial.path / name for name in _TRIAL_FILES if (trial.path / name).exists()}
    if trial.groups is not None:
        found[SETTINGS] = yaml_text(trial.settings())
    found |= {f"{PREDICTIONS}/{path.name}": path for path in sorted((trial.path / PREDICTIONS).glob("*.jsonl"))}
    if told := stages(events):
        kept = [answers_file(stage["tasks_seen"]) for stage in told if is_kept(stage)]
        found |= {name: trial.path / name for name in kept if (trial.path / name).exists()}
        tasks, rows = list(told[-1]["scores"]), [list(stage["scores"].values()) for stage in told]
        found["scores.csv"] = report.score_matrix_csv(tasks, rows)
        found["score_matrix.png"] = partial(score_matrix_png, tasks, rows)
    for lineage in dict.fromkeys(stage["lineage"] for stage in told) if status(events) == "finished" else ():
        if sweep.storage.share(path := sweep.snapshots.path(lineage)):
            found[f"snapshots/{path.name}"] = path
    return found


def _texts(values: Mapping[str, Any], longest: int) -> dict[str, str]:
    return {key: redact(format_value(value))[:longest] for key, value in values.items()}
