"""MLflow as a mirror of what lies on disk: one experiment per sweep, one run per trial.

Only the driver writes here, from the journals; workers never talk to MLflow. A dead tracker delays the mirror and
nothing else: `sync` brings whatever is missing, any number of times, into the same runs.

Runs are found again by tag: `kind` (sweep, trial, summary) with `sweep_id`, `trial_id` or `configuration`. On a
trial's run the tag `mirrored_events` is written last: it says how much of the journal has surely arrived.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import shlex
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_sweep import report
from latent_sweep.errors import LatentSweepError, StoreError, TrackingError
from latent_sweep.figures import curve_figure, score_matrix_figure
from latent_sweep.settings import content_hash
from latent_sweep.tracking import Event, Status, SweepFolder, TrialFolder, attempts, stages, status

DEFAULT_URI = "sqlite:///mlflow.db"

_logger = logging.getLogger(__name__)

_KEY_TAG = {"sweep": "sweep_id", "trial": "trial_id", "summary": "configuration"}
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
_RUN_STATUS: Mapping[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}
_TRIAL_FILES = ("trial.yaml", "scores.json", "result.json", "journal.jsonl")
_MOST_METRICS, _LONGEST_PARAM, _LONGEST_TAG = 1000, 6000, 5000  # what one MLflow call accepts


@dataclass(frozen=True)
class Point:
    """One value of one metric; `step` is the number of tasks seen, `time` is in Unix seconds."""

    key: str
    value: float
    step: int
    time: float


@dataclass
class _Run:
    """What is known of one MLflow run; kept up to date with everything this mirror writes to it."""

    run_id: str
    status: str
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    logged: dict[tuple[str, int], float] = field(default_factory=dict)
    """Newest value known to be there, by (metric, step)."""
    unread_metrics: set[str] = field(default_factory=set)
    """Metrics that were there when the run was found, and whose steps are not in `logged` yet."""


class MlflowMirror:
    """Brings one sweep into MLflow and keeps it current.

    Not thread-safe: one thread at a time. Every method that talks to the tracker raises `TrackingError` when it cannot
    be reached or refuses; nothing is lost by that, the next call starts from what has arrived.
    """

    def __init__(self, uri: str | None, sweep: SweepFolder):
        """`uri` None means the environment's MLFLOW_TRACKING_URI, else `sqlite:///mlflow.db`."""
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
        self.sweep = sweep
        self._client: Any = None
        self._experiment_id = ""
        self._runs: dict[tuple[str, str], _Run] = {}
        self._view_key = ""

    def open(self) -> None:
        """Begin one launch of the sweep: experiment, parent run, saved view. Call it once per launch.

        Raises:
            TrackingError: the tracker cannot be reached or refuses.
        """
        with self._tracker():
            parent = self._parent()
            self._set_running(parent)
            self._write(parent, tags={"launches": int(parent.tags.get("launches", 0)) + 1})
            self._save_view()

    def sync(self) -> int:
        """Bring everything that the journals hold and MLflow lacks; returns how many trial runs changed.

        A trial whose files are damaged, or whose run MLflow refuses, is reported after all others have been brought.

        Raises:
            TrackingError: the tracker cannot be reached, or refuses a write.
            StoreError: `sweep.json` or a journal is damaged.
        """
        changed, faults = 0, []
        with self._tracker():
            self._parent()
            for trial in self.sweep:
                try:
                    changed += self._mirror_trial(trial)
                except Exception as error:
                    if not (isinstance(error, StoreError) or _is_refusal(error)):
                        raise
                    faults.append(error)
            if faults:
                raise faults[0]
        return changed

    def close(self) -> None:
        """Bring the rest, then what only the whole sweep can tell: summary runs, tables, the figure, the best AP.

        Raises:
            TrackingError: the tracker cannot be reached, or refuses a write.
            StoreError: `sweep.json` or a journal is damaged.
        """
        self.sync()
        with self._tracker():
            summary = report.summarise(self.sweep)
            trials = {trial.trial_id: trial for trial in self.sweep}
            for configuration in summary.configurations:
                if configuration.n_finished:
                    self._mirror_configuration(configuration, trials[configuration.trial_ids[0]])
            parent = self._parent()
            best = {"best_AP": summary.best_average_performance}
            self._write(parent, points=_summary_points(best, summary.counts.get("finished", 0)))
            self._write_sweep_artifacts(parent, summary)
            work_left = summary.counts.get("pending", 0) + summary.counts.get("running", 0)
            self._set_ended(parent, "KILLED" if work_left else "FINISHED", time.time())

    def link(self) -> str:
        """The UI's address that opens this sweep's comparison; empty until the tracker was reached."""
        if not self._experiment_id:
            return ""
        server = mask_secrets(self.uri).rstrip("/") if self._is_served() else "http://127.0.0.1:5000"
        page = f"{server}/#/experiments/{self._experiment_id}/runs?workflowType=machine_learning"
        return f"{page}&compareRunsMode=CHART&viewStateShareKey={self._view_key}" if self._view_key else page

    def ui_command(self) -> str:
        """The command that opens the UI on a local store, or the address of a server; passwords are masked."""
        uri = mask_secrets(self.uri)
        if self._is_served():
            return uri
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)} --port 5000"

    def _is_served(self) -> bool:
        return self.uri.startswith(("http://", "https://", "databricks"))

    @contextmanager
    def _tracker(self) -> Iterator[None]:
        """A connected client inside; any failure becomes an error without secrets, and the next call connects anew."""
        try:
            if self._client is None:
                self._connect()
            yield
        except Exception as error:
            self._client = None  # what arrived is unknown now: read it back before writing more
            if isinstance(error, LatentSweepError):
                raise
            # The cause is cut off: its own message may hold the address with its password.
            raise TrackingError(
                f"MLflow at {mask_secrets(self.uri)}: {type(error).__name__}: {mask_secrets(str(error))[:500]} "
                f"Nothing on disk is lost; check the address and the server, then run "
                f"`latent-sweep sync {self.sweep.path}`."
            ) from None

    def _connect(self) -> None:
        client = _quiet_client(self.uri)
        self._experiment_id = self._find_or_create_experiment(client)
        self._runs = {}
        for found in sorted(
            _all_runs(client, self._experiment_id), key=lambda run: (run.info.start_time, run.info.run_id)
        ):
            kind = found.data.tags.get("kind", "")
            key = (kind, found.data.tags.get(_KEY_TAG.get(kind, ""), ""))
            if key in self._runs:
                client.delete_run(found.info.run_id)  # a creation that was retried after its answer got lost
            elif kind in _KEY_TAG:
                self._runs[key] = _Run(
                    run_id=found.info.run_id,
                    status=found.info.status,
                    tags=dict(found.data.tags),
                    params=dict(found.data.params),
                    unread_metrics=set(found.data.metrics),
                )
        self._client = client

    def _find_or_create_experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.sweep.name)
        if found is None:
            return client.create_experiment(
                self.sweep.name, artifact_location=_artifact_location(self.uri, self.sweep.name)
            )
        if found.lifecycle_stage != "active":
            raise TrackingError(
                f"MLflow at {mask_secrets(self.uri)}: the experiment {self.sweep.name!r} is deleted; expected an "
                f"active one. Run `mlflow experiments restore -x {found.experiment_id}`, or rename the sweep."
            )
        return found.experiment_id

    def _parent(self) -> _Run:
        name = f"sweep {self.sweep.name} {time.strftime('%Y-%m-%d')}"
        return self._find_or_create("sweep", self.sweep.sweep_id, name, time.time())

    def _find_or_create(self, kind: str, key: str, name: str, start: float) -> _Run:
        """The run with this `kind` and `key`, made if there is none and brought under this sweep's parent."""
        tags = {"kind": kind, "sweep": self.sweep.name, "sweep_id": self.sweep.sweep_id, _KEY_TAG[kind]: key}
        if kind != "sweep":
            tags["mlflow.parentRunId"] = self._parent().run_id
        run = self._runs.get((kind, key))
        if run is None:
            made = self._client.create_run(
                self._experiment_id, start_time=round(1000 * start), tags=tags, run_name=mask_secrets(name)
            )
            run = self._runs[kind, key] = _Run(made.info.run_id, made.info.status, tags=tags)
        return run

    def _mirror_trial(self, trial: TrialFolder) -> bool:
        """Bring one trial up to its journal; whether there was anything to bring."""
        events = trial.events()
        if not events:
            return False
        names = report.short_names(self.sweep.axes)
        name = report.label({names[axis]: trial.values[axis] for axis in self.sweep.axes}) or trial.trial_id
        run = self._find_or_create("trial", trial.trial_id, name, events[0]["time"])
        mirrored = {"sweep_id": self.sweep.sweep_id, "mirrored_events": str(len(events))}
        if mirrored.items() <= run.tags.items():
            return False
        self._set_running(run)
        self._write(run, params=self._params(trial), tags=self._trial_tags(trial, events), points=_points(events))
        if status(events) != "running":
            self._write_trial_artifacts(run, trial)
            self._set_ended(run, _RUN_STATUS[status(events)], events[-1]["time"])
        self._write(run, tags=mirrored)
        return True

    def _params(self, trial: TrialFolder) -> dict[str, Any]:
        shown = {path: trial.params[path] for path in _CONTEXT if path in trial.params} | dict(trial.values)
        names = report.short_names(shown)
        return {names[path]: value for path, value in shown.items()}

    def _trial_tags(self, trial: TrialFolder, events: Sequence[Event]) -> dict[str, Any]:
        starts = attempts(events)
        return {
            "training_id": trial.training_id,
            "mlflow.parentRunId": self._parent().run_id,
            "attempt": starts[-1]["attempt"] if starts else 0,
            "node": starts[-1]["node"] if starts else "unknown",
            "status": status(events),
            "reason": report.end_reason(events),
        }

    def _write_trial_artifacts(self, run: _Run, trial: TrialFolder) -> None:
        for name in _TRIAL_FILES:
            if (trial.path / name).exists():
                self._client.log_artifact(run.run_id, str(trial.path / name))
        if (trial.path / "predictions").is_dir():
            self._client.log_artifacts(run.run_id, str(trial.path / "predictions"), "predictions")
        matrix = trial.read_json("scores.json")
        if matrix and matrix["scores"]:
            text = report.score_matrix_csv(matrix["tasks"], matrix["scores"])
            self._client.log_text(run.run_id, text, "scores.csv")
            figure = score_matrix_figure(matrix["tasks"], matrix["scores"])
            self._client.log_figure(run.run_id, figure, "score_matrix.png")
        for snapshot in (trial.read_json("result.json") or {}).get("snapshots", []):
            if (path := self.sweep.storage / snapshot).exists():
                self._client.log_artifact(run.run_id, str(path), "snapshots")

    def _mirror_configuration(self, configuration: report.Configuration, trial: TrialFolder) -> None:
        """Bring one configuration's summary run: its params and its mean, spread and count over seeds."""
        name = f"mean {report.label(configuration.values)}".strip()
        run = self._find_or_create("summary", content_hash(dict(configuration.values)), name, time.time())
        seed_name = report.short_names(self.sweep.axes).get(self.sweep.seed_axis, "seed")
        params = {key: value for key, value in self._params(trial).items() if key != seed_name}
        values: dict[str, float | None] = {"n": float(configuration.n_finished)}
        for metric, found in (("AP", configuration.average_performance), ("FM", configuration.forgetting)):
            values |= {f"{metric}_mean": getattr(found, "mean", None), f"{metric}_std": getattr(found, "std", None)}
        tags = {"sweep_id": self.sweep.sweep_id, "mlflow.parentRunId": self._parent().run_id}
        self._write(run, params=params, tags=tags, points=_summary_points(values, configuration.n_finished))
        self._set_ended(run, "FINISHED", time.time())

    def _write_sweep_artifacts(self, parent: _Run, summary: report.Summary) -> None:
        rows = report.records(summary)
        table = {"columns": list(rows[0]) if rows else [], "data": [list(row.values()) for row in rows]}
        # Not log_table: it appends to the table already there, and closing a resumed sweep would double the rows.
        self._client.log_text(parent.run_id, json.dumps(table), "sweep_table.json")
        self._write(parent, tags={"mlflow.loggedArtifacts": '[{"path": "sweep_table.json", "type": "table"}]'})
        self._client.log_text(parent.run_id, report.render(summary, "markdown"), "report.md")
        if (curves := report.curves(summary)) is not None:
            figure = curve_figure(curves.x_name, curves.x_values, curves.series)
            self._client.log_figure(parent.run_id, figure, f"{curves.x_name}_vs_AP.png")

    def _save_view(self) -> None:
        """Keep a view that opens on this sweep's comparison. A convenience: without it there is a plainer link."""
        try:
            state = view_state(report.summarise(self.sweep), self.sweep.sweep_id)
            now = round(1000 * time.time())
            packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
            view = {"name": f"sweep {self.sweep.name}", "createdAt": now, "updatedAt": now, "state": packed}
            tag = f"mlflow.sharedViewState.{self.sweep.sweep_id}"
            self._client.set_experiment_tag(self._experiment_id, tag, json.dumps(view))
            self._view_key = self.sweep.sweep_id
        except Exception as error:
            _logger.info("no saved view in MLflow: %s", mask_secrets(str(error)))

    def _set_running(self, run: _Run) -> None:
        if run.status != "RUNNING":
            self._client.update_run(run.run_id, status="RUNNING")
            run.status = "RUNNING"

    def _set_ended(self, run: _Run, run_status: str, end: float) -> None:
        if run.status != run_status:
            self._client.set_terminated(run.run_id, run_status, end_time=round(1000 * end))
            run.status = run_status

    def _write(
        self,
        run: _Run,
        *,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        points: Iterable[Point] = (),
    ) -> None:
        """Log whatever of these the run does not hold yet; no param and no point is logged twice."""
        from mlflow.entities import Metric, Param, RunTag

        new_params = {key: value for key, value in _texts(params, _LONGEST_PARAM).items() if key not in run.params}
        new_tags = {key: value for key, value in _texts(tags, _LONGEST_TAG).items() if run.tags.get(key) != value}
        if new_params or new_tags:
            self._client.log_batch(
                run.run_id,
                params=[Param(key, value) for key, value in new_params.items()],
                tags=[RunTag(key, value) for key, value in new_tags.items()],
            )
            run.params |= new_params
            run.tags |= new_tags
        new_points = [point for point in points if not self._is_logged(run, point)]
        for start in range(0, len(new_points), _MOST_METRICS):
            batch = new_points[start : start + _MOST_METRICS]
            metrics = [Metric(point.key, point.value, round(1000 * point.time), point.step) for point in batch]
            self._client.log_batch(run.run_id, metrics=metrics)
            run.logged |= {(point.key, point.step): point.value for point in batch}

    def _is_logged(self, run: _Run, point: Point) -> bool:
        """Whether MLflow holds this value; a stage scored again, because its data changed, has another one."""
        if point.key in run.unread_metrics:
            history = self._client.get_metric_history(run.run_id, point.key)
            in_time = sorted(history, key=lambda metric: metric.timestamp)
            run.logged |= {(point.key, metric.step): metric.value for metric in in_time}
            run.unread_metrics.remove(point.key)
        return run.logged.get((point.key, point.step)) == point.value


class NullMirror:
    """The mirror of a sweep that is not tracked: every method does nothing."""

    def open(self) -> None:
        """Do nothing."""

    def sync(self) -> int:
        """Do nothing; no run changed."""
        return 0

    def close(self) -> None:
        """Do nothing."""

    def link(self) -> str:
        """No link."""
        return ""

    def ui_command(self) -> str:
        """No command."""
        return ""


def mirror_for(uri: str | None, sweep: SweepFolder) -> MlflowMirror | NullMirror:
    """The mirror that the sweep file's `tracking: {uri: ...}` asks for; `none` asks for no tracking."""
    return NullMirror() if uri == "none" else MlflowMirror(uri, sweep)


class MirrorThread:
    """Keeps a mirror current from one background thread, so that a slow or dead tracker never holds up training.

    A failure is reported once, then tried again with growing pauses until it passes; the next sync brings everything.
    """

    def __init__(
        self,
        mirror: MlflowMirror | NullMirror,
        *,
        interval_seconds: float = 5.0,
        longest_pause_seconds: float = 300.0,
        tell: Callable[[str], None] = _logger.warning,
    ):
        """`tell` receives one message when the mirror falls behind and one when it has caught up."""
        self.mirror = mirror
        self.interval_seconds = interval_seconds
        self.longest_pause_seconds = longest_pause_seconds
        self.tell = tell
        self._opened = False
        self._behind = False
        self._delivered = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        """Open the mirror and begin to sync, in the background."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 120.0) -> bool:
        """Ask for a last sync and the closing of the mirror; whether both were done within the time given."""
        self._stopping.set()
        self._thread.join(timeout_seconds)
        if not self._delivered:
            self.tell(
                "the tracker has not taken everything; run `latent-sweep sync` on the sweep's folder when it is back"
            )
        return self._delivered

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            if self._attempt(self.mirror.sync):
                pause = self.interval_seconds
            else:
                pause = min(max(2 * pause, self.interval_seconds), self.longest_pause_seconds)
        self._delivered = self._attempt(self.mirror.close)

    def _attempt(self, action: Callable[[], object]) -> bool:
        try:
            if not self._opened:
                self.mirror.open()
                self._opened = True
            action()
        except Exception as error:  # whatever the tracker does, training goes on
            if not self._behind:
                self.tell(f"tracking is behind and will be tried again: {error}")
            self._behind = True
            return False
        if self._behind:
            self.tell("tracking has caught up")
        self._behind = False
        return True


def mask_secrets(text: str) -> str:
    """`text` with the user part of every address in it replaced: `http://user:word@host` -> `http://***@host`."""
    return re.sub(r"://[^/\s]+@", "://***@", text)


def view_state(summary: report.Summary, sweep_id: str) -> dict[str, Any]:
    """The state of MLflow's run page that compares this sweep's trials: table, scatter charts, AP over tasks.

    The format is undocumented and read off MLflow 3.17; a newer UI that does not know it shows its plain page.
    """
    shown = [*summary.axes, "seed"]
    return {
        "searchFilter": f"tags.sweep_id = '{sweep_id}' and tags.kind = 'trial'",
        "orderByKey": "metrics.`AP`",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": "SHOW_ALL",
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "selectedColumns": ["metrics.`AP`", "metrics.`FM`", *(f"params.`{name}`" for name in shown)],
        # MLflow sorts sections by name and adds one for each prefix of metric names: named here, those stay folded
        "compareRunSections": [
            _section("sweep", "comparison", display=True),
            _section("score", "score", display=False),
            _section("rouge_1", "rouge_1", display=False),
        ],
        "compareRunCharts": _charts(report.numeric_axis(summary), summary.axes),
    }


def _section(uuid: str, name: str, display: bool) -> dict[str, Any]:
    shape = {"columns": 2, "cardHeight": 320, "isReordered": False, "deleted": False, "isGenerated": False}
    return {"uuid": uuid, "name": name, "display": display, **shape}


def _charts(x_name: str | None, axes: Sequence[str]) -> list[dict[str, Any]]:
    charts: list[dict[str, Any]] = []
    if x_name is not None:
        x_axis = {"key": x_name, "type": "PARAM"}
        charts += [
            {"type": "SCATTER", "xaxis": x_axis, "yaxis": {"key": metric, "type": "METRIC"}} for metric in ("AP", "FM")
        ]
    charts.append({"type": "LINE", "metricKey": "AP", "selectedMetricKeys": ["AP"], "xAxisKey": "step"})
    if len(axes) > 1:
        charts.append({"type": "PARALLEL", "selectedParams": list(axes), "selectedMetrics": ["AP"]})
    shared = {"metricSectionId": "sweep", "runsCountToCompare": 100, "deleted": False, "isGenerated": False}
    return [{"uuid": f"chart{number}", **shared, **chart} for number, chart in enumerate(charts)]


def _points(events: Sequence[Event]) -> list[Point]:
    """Every metric value of a journal, one for each (metric, tasks seen)."""
    found: dict[tuple[str, int], Point] = {}
    for stage in stages(events):
        scores = {f"score/{task}": score for task, score in stage["scores"].items()}
        for key, value in {**stage["metrics"], **scores}.items():
            found[key, stage["tasks_seen"]] = Point(key, value, stage["tasks_seen"], stage["time"])
    if found and events[-1]["event"] == "finished":
        last_step = max(step for _, step in found)
        for key, value in events[-1]["metrics"].items():
            found.setdefault((key, last_step), Point(key, value, last_step, events[-1]["time"]))
    return list(found.values())


def _summary_points(values: Mapping[str, float | None], n_finished: int) -> list[Point]:
    """Values that change as trials finish: their step is how many have, so a closed sweep closes again unchanged."""
    return [Point(key, value, n_finished, time.time()) for key, value in values.items() if value is not None]


def _texts(values: Mapping[str, Any] | None, longest: int) -> dict[str, str]:
    return {key: mask_secrets(report.format_value(value))[:longest] for key, value in (values or {}).items()}


def _quiet_client(uri: str) -> Any:
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow import MlflowClient  # not at the top: it takes seconds, which the mirror's own thread can spare

    logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)
    if (database := _sqlite_file(uri)) is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
    return MlflowClient(tracking_uri=uri)


def _is_refusal(error: Exception) -> bool:
    """Whether the tracker answered and said no, rather than not answering."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.get_http_status_code() < 500


def _all_runs(client: Any, experiment_id: str) -> Iterator[Any]:
    page_token = None
    while True:
        page = client.search_runs([experiment_id], max_results=1000, page_token=page_token)
        yield from page
        page_token = page.token
        if not page_token:
            return


def _sqlite_file(uri: str) -> Path | None:
    match = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", uri)
    return Path(match[1]).absolute() if match else None


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Beside a local database; a server knows its own place."""
    database = _sqlite_file(uri)
    return (database.parent / "mlartifacts" / experiment).as_uri() if database else None
