"""MLflow as a mirror of what lies on disk: one experiment per sweep, one run per trial.

Only the driver writes here, from the journals; workers never talk to MLflow. A dead tracker delays the mirror and
nothing else: `sync` brings whatever is missing, any number of times, into the same runs. What should be there says
`tracked`; this file brings it, and reads back what is there.

Runs are found again by tag: `kind` (sweep, trial, summary) with `sweep_id`, `trial_id` or `configuration`. On a
trial's run the tag `mirrored_events` says of how many events the points have surely arrived: it travels with them, and
MLflow writes the tags of a batch last. The status is written when all else is there, so that a run that has ended has
its artifacts, too. Points carry the journal's times, so that MLflow itself takes one that arrives twice for one.

What it costs follows what has changed: a journal is read again when its file has changed, a trial's news is one
request while it runs, its files are sent once it has ended, and a summary run is written when its trials have ended
and when something in it is another. A server gets the news of several trials at once.

A trial whose folder was deleted and that runs again has another life, with a journal of its own. MLflow takes back no
point and no param, so its old run could never again say what the journal says, and one run with the points of two lives
would say what neither did. Hence the tag `journal` names the life that a run tells of; each life has its own run, and
that of an earlier one is marked deleted (`delete_run`) once all that the new journal tells has arrived: at every moment
the trial is there, and after a sync it is there once. MLflow keeps what is marked deleted, and `mlflow gc` frees it.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shlex
import tempfile
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from latent_sweep.errors import ConfigError, LatentSweepError, StoreError, TrackingError
from latent_sweep.labels import short_names
from latent_sweep.results import summaries
from latent_sweep.results.definition import defined_events
from latent_sweep.security import has_credentials, redact
from latent_sweep.storage.files import FileState, private_file, private_folder, state_of
from latent_sweep.storage.folders import LOCKS, SweepFolder, TrialFolder
from latent_sweep.storage.leases import FileLease, held
from latent_sweep.sweep.tracking_uris import DEFAULT_URI, TRACKING_VARIABLE, address_faults, place_faults, sqlite_file
from latent_sweep.tracking.addresses import check_tracking_address
from latent_sweep.tracking.contents import (
    KEY_TAG,
    MODEL_FOLDER,
    Artifact,
    Kind,
    Point,
    RunContent,
    configuration_content,
    configuration_contents,
    life_of,
    run_status,
    run_tags,
    sweep_content,
    sweep_tags,
    trial_content,
    trial_mark,
    unsent,
)

ARTIFACTS = "mlartifacts"
"""Folder beside a local database."""

_logger = logging.getLogger(__name__)

_MOST_ENTITIES = 1000  # points, params and tags that one MLflow call accepts
_AT_ONCE = 8
"""Runs that a server is told of at once: with fewer it waits for us, and MLflow's client keeps ten connections. A local
database takes one write at a time."""
_DRAWING = threading.Lock()
"""Matplotlib draws for one thread at a time."""
_CLIENT_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""For MLflow's client; what the environment sets stays. Nobody but the tracker is told of a sweep. 15 seconds to wait
for an answer and one more attempt: a tracker that hangs is noticed after half a minute, with MLflow's own limits after
many."""


_DESCRIPTION = (
    "Scores are fractions: AP 0.728 here is 72.8 % in the sweep's report, which has them in per cent. FM and BWT "
    "are missing where they are not defined: for joint training, zero-shot and streams of one task."
)
"""Of an experiment."""

_FOLDED = ("score", "rouge_1", *(f"router/{name}" for name in ("p_correct", "accuracy", "nll", "ece", "one_hot")))
"""Prefixes of metrics with a value for each task."""

_Identity = tuple[str, str]
"""Kind and key of a run."""
_Item = TypeVar("_Item")


@dataclass
class _Run:
    """The state of one MLflow run as far as it is known; kept up to date with everything this mirror writes to it."""

    run_id: str
    status: str
    end: int | None
    """When it ended, in milliseconds since 1970."""
    artifact_uri: str
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest value of each metric; not kept up for trials, whose journals tell it."""
    logged: dict[tuple[str, int], float] = field(default_factory=dict)
    """Newest value known to be there, by (metric, step); likewise."""
    unread_metrics: set[str] = field(default_factory=set)
    """Metrics that were there when the run was found, and whose steps are not in `logged` yet."""


@dataclass(frozen=True)
class StoredRun:
    """One run of this sweep as MLflow holds it."""

    run_id: str
    kind: str
    key: str
    status: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    points: Sequence[Point]
    """Every value of every metric, in order of time."""
    artifacts: Mapping[str, int]
    """Path -> size in bytes."""
    artifact_uri: str
    """Where they lie."""


class MlflowTracker:
    """Brings one sweep into MLflow and keeps it current.

    Not thread-safe: one thread at a time. Several processes may mirror one sweep: they take turns. Every method that
    talks to the tracker raises `TrackingError` when it cannot be reached or refuses; nothing is lost by that, the next
    call starts from what has arrived.
    """

    def __init__(self, uri: str | None, sweep: SweepFolder, allow_insecure: bool = False):
        """Take the tracker's address; None means the environment's MLFLOW_TRACKING_URI, else `sqlite:///mlflow.db`."""
        self.uri = tracking_uri(uri)
        self.sweep = sweep
        self.allow_insecure = allow_insecure
        self._id = uuid.uuid4().hex
        self._client: Any = None
        self._experiment_id = ""
        self._runs: dict[_Identity, dict[str, _Run]] = {}
        """By the life of the trial that they tell of: one, but for the moment at which a life takes another's place."""
        self._brought: dict[str, FileState] = {}
        """What the journals were that have been brought, by trial id."""
        self._view_key = ""

    def open(self) -> None:
        """Begin one launch of the sweep: experiment, parent run, saved view. Call it once per launch.

        Raises:
            TrackingError: the tracker cannot be reached or refuses.
        """
        with self._connected():
            parent = self._parent()
            self._set_running(parent)
            self._write(parent, tags={"launches": str(int(parent.tags.get("launches", 0)) + 1)})
            self._save_view()

    def sync(self) -> int:
        """Bring everything that the journals hold and MLflow lacks; returns how many trial runs changed.

        A trial whose files are damaged, or whose run MLflow refuses, is reported after all others have been brought.

        Raises:
            TrackingError: the tracker cannot be reached, or refuses a write.
            StoreError: `sweep.json` or a journal is damaged.
        """
        with self._connected():
            self._parent()
            changed, faults = self._mirror_trials()
            faults += self._mirror_summaries(changed)
            if faults:
                raise faults[0]
        return len(changed)

    def close(self) -> int:
        """Bring the rest, then what only the whole sweep can tell: summary runs, tables, the figure, the best AP.

        Returns:
            How many trial runs changed.

        Raises:
            TrackingError: the tracker cannot be reached, or refuses a write.
            StoreError: `sweep.json` or a journal is damaged.
        """
        changed = self.sync()
        with self._connected():
            self._parent()
            summary = summaries.summarize(self.sweep)
            contents = list(configuration_contents(self.sweep, summary))
            if faults := self._at_once(self._bring_summary, contents):
                raise faults[0]
            self._delete_other_summaries({content.key for content in contents})
            content = sweep_content(self.sweep, summary)
            self._bring(content, content.points)
            if not self._view_key:
                self._save_view()
        return changed

    def renew(self, runs: Collection[tuple[str, str]]) -> None:
        """Put new runs in the place of these, given by kind and key: what MLflow holds of them cannot be mended.

        The old ones are marked deleted when the new ones are whole; one that should not be there gets no other.

        Raises:
            TrackingError: the tracker cannot be reached, or refuses a write.
            StoreError: `sweep.json` or a journal is damaged.
        """
        self._client = None  # others may have changed the runs since they were read
        with self._connected():
            old = [self._runs.pop(identity) for identity in runs if identity in self._runs]
        self.close()
        with self._connected():
            for run in (run for lives in old for run in lives.values()):
                self._client.delete_run(run.run_id)

    def read(self) -> list[StoredRun]:
        """All runs of this sweep as they are now; changes nothing.

        Raises:
            TrackingError: the tracker cannot be reached or refuses.
        """
        database = sqlite_file(self.uri)
        if database is not None and not (database.exists() and database.stat().st_size):
            return []  # MLflow would make one
        with self._explained():
            client = quiet_client(self.uri)
            experiment = client.get_experiment_by_name(self.sweep.name)
            runs = [] if experiment is None else _all_runs(client, experiment.experiment_id)
            mine = [run for run in runs if run.data.tags.get("sweep_id") == self.sweep.sweep_id]
            return [_read_run(client, run, self.uri) for run in mine]

    def read_artifact(self, run: StoredRun, path: str) -> bytes:
        """The content of one artifact.

        Raises:
            TrackingError: the tracker cannot be reached or refuses.
        """
        with self._explained(), tempfile.TemporaryDirectory() as folder:
            return Path(_artifact_repository(run.artifact_uri, self.uri).download_artifacts(path, folder)).read_bytes()

    def model_uri(self) -> str:
        """The address by which MLflow loads the model that lies in the sweep's run.

        Raises:
            TrackingError: the tracker cannot be reached or refuses.
        """
        with self._connected():
            return f"runs:/{self._parent().run_id}/{MODEL_FOLDER}"

    def link(self) -> str:
        """The UI's address that opens this sweep's comparison; empty until the tracker was reached."""
        if not self._experiment_id:
            return ""
        server = redact(self.uri).rstrip("/") if self._is_served() else "http://127.0.0.1:5000"
        page = f"{server}/#/experiments/{self._experiment_id}/runs?workflowType=machine_learning"
        return f"{page}&compareRunsMode=CHART&viewStateShareKey={self._view_key}" if self._view_key else page

    def ui_command(self) -> str:
        """The command that opens the UI on a local store, or the address of a server; passwords are masked."""
        uri = redact(self.uri)
        if self._is_served():
            return uri
        return f"mlflow ui --backend-store-uri {shlex.quote(uri)} --port 5000"

    def sync_command(self) -> str:
        """The command that brings everything later; an address with a password stays in the environment."""
        command = f"latent-sweep sync {shlex.quote(str(self.sweep.path))}"
        if self.sweep.tracking_uri is None and not has_credentials(self.uri):
            command += f" --uri {shlex.quote(self.uri)}"
        return command + (" --allow-insecure" if self.allow_insecure else "")

    def _is_served(self) -> bool:
        return self.uri.startswith(("http://", "https://", "databricks"))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn any failure inside the block into an error of ours, without secrets."""
        try:
            yield
        except LatentSweepError:
            raise
        except Exception as error:
            # The cause is cut off: its own message may hold the address with its password.
            raise TrackingError(
                f"MLflow at {redact(self.uri)}: {type(error).__name__}: {redact(str(error))[:500]} "
                f"Nothing on disk is lost; check the address, the credentials and the server."
            ) from None

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Hold the sweep alone, with a client and with `_runs` as they are; after a failure they are read anew."""
        locks = self.sweep.path / LOCKS
        with self._explained(), held(FileLease(locks / "mirror.lock"), _say_waiting):
            last = locks / "mirror.last"
            if not last.exists() or last.read_text() != self._id:
                self._client = None  # another process has written since
                last.write_text(self._id)
            try:
                if self._client is None:
                    self._connect()
                yield
            except BaseException:
                self._client = None  # what arrived is unknown now
                raise

    def _connect(self) -> None:
        client = quiet_client(self.uri)
        self._experiment_id = self._find_or_create_experiment(client)
        self._runs, self._brought = {}, {}
        for found in sorted(
            _all_runs(client, self._experiment_id), key=lambda run: (run.info.start_time, run.info.run_id)
        ):
            kind, key, life = _identity(found)
            lives = self._runs.setdefault((kind, key), {})
            if life in lives:
                client.delete_run(found.info.run_id)  # a creation that was retried after its answer got lost
            elif kind in KEY_TAG:
                metrics = dict(found.data.metrics) if kind != "trial" else {}
                lives[life] = _Run(
                    run_id=found.info.run_id,
                    status=found.info.status,
                    end=found.info.end_time,
                    artifact_uri=found.info.artifact_uri,
                    tags=dict(found.data.tags),
                    params=dict(found.data.params),
                    metrics=metrics,
                    unread_metrics=set(metrics),
                )
        self._client = client

    def _find_or_create_experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.sweep.name)
        if found is None:
            location = _artifact_location(self.uri, self.sweep.name)
            return client.create_experiment(
                self.sweep.name, artifact_location=location, tags={"mlflow.note.content": _DESCRIPTION}
            )
        if found.lifecycle_stage != "active":
            raise TrackingError(
                f"MLflow at {redact(self.uri)}: the experiment {self.sweep.name!r} is deleted; expected an "
                f"active one. Run `mlflow experiments restore -x {found.experiment_id}`, or rename the sweep."
            )
        return found.experiment_id

    def _parent(self) -> _Run:
        name = f"sweep {self.sweep.name} {time.strftime('%Y-%m-%d')}"
        tags = {"kind": "sweep"} | sweep_tags(self.sweep)
        return self._find_or_create(("sweep", self.sweep.sweep_id), "", name, time.time(), tags)

    def _find_or_create(self, identity: _Identity, life: str, name: str, start: float, tags: Mapping[str, str]) -> _Run:
        """The run of this identity and life, made with these tags if there is none."""
        lives = self._runs.setdefault(identity, {})
        if life not in lives:
            made = self._client.create_run(
                self._experiment_id, start_time=round(1000 * start), tags=dict(tags), run_name=name
            ).info
            lives[life] = _Run(made.run_id, made.status, made.end_time, made.artifact_uri, tags=dict(tags))
        return lives[life]

    def _parent_tag(self, kind: Kind) -> dict[str, str]:
        return {} if kind == "sweep" else {"mlflow.parentRunId": self._parent().run_id}

    def _at_once(self, action: Callable[[_Item], object], items: Iterable[_Item]) -> list[Exception]:
        """Do it for all, in no order, and for several at once where a server is told.

        This thread does its part, and alone where there is no server. The others end with the process, as those of a
        pool do not: whoever has waited long enough for a tracker that hangs can go.

        Returns:
            What items have failed with that says nothing of the others: damaged files, refusals. After any other
            failure no item is begun, and it is raised.
        """
        waiting, faults, broken = deque(items), list[Exception](), list[Exception]()

        def work() -> None:
            while True:
                try:
                    item = waiting.popleft()
                except IndexError:
                    return
                try:
                    action(item)
                except Exception as error:
                    if isinstance(error, StoreError) or _is_refusal(error):
                        faults.append(error)
                    else:
                        broken.append(error)
                        waiting.clear()

        threads = [
            threading.Thread(target=work, name=f"mirror-{number}", daemon=True)
            for number in range(1, min(_AT_ONCE if self._is_served() else 1, len(waiting)))
        ]
        try:
            for thread in threads:
                thread.start()
            work()  # a new thread each time would leave a heap of its own behind
            for thread in threads:
                thread.join()
        finally:
            waiting.clear()  # an interrupt ends the others, too
        if broken:
            raise broken[0]
        return faults

    def _mirror_trials(self) -> tuple[set[str], list[Exception]]:
        """Bring the trials up to their journals; return those that there was something to bring of, and what failed."""
        changed: set[str] = set()

        def mirror(trial: TrialFolder) -> None:
            state = state_of(trial.journal.path)  # before it is read: what comes in between is news
            if self._mirror_trial(trial):
                changed.add(trial.trial_id)
            self._brought[trial.trial_id] = state

        moved = [trial for trial in self.sweep if self._brought.get(trial.trial_id) != state_of(trial.journal.path)]
        return changed, self._at_once(mirror, moved)

    def _mirror_trial(self, trial: TrialFolder) -> bool:
        """Bring one trial up to its journal; return whether there was anything to bring."""
        events = trial.events()
        if not events:
            return False
        life = life_of(events)
        run = self._runs.get(("trial", trial.trial_id), {}).get(life)
        mark = trial_mark(self.sweep, events) | self._parent_tag("trial")
        news = run is None or run.status != run_status(events) or not mark.items() <= run.tags.items()
        if news:
            arrived = int(run.tags.get("mirrored_events", 0)) if run is not None else 0
            news_of = unsent(defined_events(trial, events), arrived)
            self._bring(trial_content(self.sweep, trial, events), news_of)
        self._delete_other_lives(trial.trial_id, life)
        return news

    def _delete_other_lives(self, trial_id: str, life: str) -> None:
        """Mark the runs deleted that tell of earlier journals of a trial."""
        lives = self._runs["trial", trial_id]
        for other in [found for found in lives if found != life]:
            self._client.delete_run(lives[other].run_id)
            del lives[other]

    def _mirror_summaries(self, changed: Collection[str]) -> list[Exception]:
        """Bring the summary runs of these trials, as far as all that they summarize have ended; return what failed."""

        def mirror(members: Sequence[TrialFolder]) -> None:
            configuration = summaries.summarize_one(self.sweep, members)
            if configuration.n_finished:
                self._bring_summary(configuration_content(self.sweep, configuration, members[0]))

        groups = summaries.repetitions(self.sweep) if changed else []
        touched = [members for members in groups if any(trial.trial_id in changed for trial in members)]
        return self._at_once(mirror, [members for members in touched if all(map(self._has_ended, members))])

    def _delete_other_summaries(self, keys: Collection[str]) -> None:
        """Mark the summary runs deleted whose configurations have no finished trial any more, as where data changed."""
        for kind, key in list(self._runs):
            run = self._runs[kind, key].get("")
            if kind == "summary" and key not in keys and run and run.tags.get("sweep_id") == self.sweep.sweep_id:
                self._client.delete_run(run.run_id)
                del self._runs[kind, key]

    def _has_ended(self, trial: TrialFolder) -> bool:
        """Whether a trial's run says so."""
        lives = self._runs.get(("trial", trial.trial_id), {})
        return bool(lives) and all(run.status != "RUNNING" for run in lives.values())

    def _bring_summary(self, content: RunContent) -> None:
        """Write a summary run if it is not there as it should be."""
        run = self._runs.get((content.kind, content.key), {}).get("")
        if run is not None:
            tags = {**run_tags(self.sweep, content), **content.tags, **content.mark, **self._parent_tag(content.kind)}
            metrics = {point.key: point.value for point in content.points}
            has_all = (
                tags.items() <= run.tags.items()
                and content.params.items() <= run.params.items()
                and metrics.items() <= run.metrics.items()
            )
            if has_all and (run.status, run.end) == (content.status, round(1000 * content.end)):
                return
            if content.kind == "summary" and any(self._is_behind(run, point) for point in content.points):
                del self._runs[content.kind, content.key]
                self._bring(content, content.points)
                self._client.delete_run(run.run_id)
                return
        self._bring(content, content.points)

    def _bring(self, content: RunContent, points: Sequence[Point]) -> None:
        """Write whatever of a run is not there yet, of its points these, and its artifacts anew."""
        parent = self._parent_tag(content.kind)
        tags = {**run_tags(self.sweep, content), **content.tags, **parent}
        run = self._find_or_create((content.kind, content.key), content.life, content.name, content.start, tags)
        if content.kind == "trial":
            self._set_running(run)  # until its files are there
        else:
            points = [point for point in points if not self._is_logged(run, point)]
        self._write(run, params=content.params, tags={**tags, **content.mark}, points=points)
        if content.kind != "trial":
            run.logged |= {(point.key, point.step): point.value for point in points}
            run.metrics |= {point.key: point.value for point in points}
        self._write_artifacts(run, content.artifacts)
        if content.status != "RUNNING":
            self._set_ended(run, content.status, round(1000 * content.end))

    def _write_artifacts(self, run: _Run, artifacts: Mapping[str, Artifact]) -> None:
        """Send them as one folder: MLflow looks three times as long at files that it is given one by one."""
        if not artifacts:
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, artifact in artifacts.items():
                file = Path(folder, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(artifact, Path):
                    file.symlink_to(artifact.absolute())
                elif isinstance(artifact, str):
                    file.write_text(artifact, encoding="utf-8")
                else:
                    with _DRAWING:
                        file.write_bytes(artifact())
            _artifact_repository(run.artifact_uri, self.uri).log_artifacts(folder)

    def _save_view(self) -> None:
        """Keep a view that opens on this sweep's comparison. A convenience: without it there is a plainer link."""
        try:
            state = view_state(self.sweep)
            now = round(1000 * time.time())
            packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
            view = {"name": f"sweep {self.sweep.name}", "createdAt": now, "updatedAt": now, "state": packed}
            tag = f"mlflow.sharedViewState.{self.sweep.sweep_id}"
            self._client.set_experiment_tag(self._experiment_id, tag, json.dumps(view))
            self._view_key = self.sweep.sweep_id
        except Exception as error:
            _logger.info("no saved view in MLflow: %s", redact(str(error)))

    def _set_running(self, run: _Run) -> None:
        if run.status != "RUNNING":
            self._client.update_run(run.run_id, status="RUNNING")
            run.status = "RUNNING"

    def _set_ended(self, run: _Run, status: str, end: int) -> None:
        if (run.status, run.end) != (status, end):
            self._client.set_terminated(run.run_id, status, end_time=end)
            run.status, run.end = status, end

    def _write(
        self,
        run: _Run,
        *,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        points: Iterable[Point] = (),
    ) -> None:
        """Log params and tags that the run does not hold yet, and these points; tags arrive last."""
        from mlflow.entities import Metric, Param, RunTag

        new_params = {key: value for key, value in (params or {}).items() if key not in run.params}
        new_tags = {key: value for key, value in (tags or {}).items() if run.tags.get(key) != value}
        metrics = [Metric(point.key, point.value, round(1000 * point.time), point.step) for point in points]
        room = _MOST_ENTITIES - len(new_params) - len(new_tags)
        while len(metrics) > room:
            self._client.log_batch(run.run_id, metrics=metrics[:_MOST_ENTITIES])
            del metrics[:_MOST_ENTITIES]
        if new_params or new_tags or metrics:
            self._client.log_batch(
                run.run_id,
                metrics=metrics,
                params=[Param(key, value) for key, value in new_params.items()],
                tags=[RunTag(key, value) for key, value in new_tags.items()],
            )
            run.params |= new_params
            run.tags |= new_tags

    def _is_logged(self, run: _Run, point: Point) -> bool:
        """Whether MLflow holds this value; a stage scored again, because its data changed, has another one."""
        if point.key in run.unread_metrics:
            history = _history(self._client, run.run_id, point.key)
            run.logged |= {(found.key, found.step): found.value for found in history}
            run.unread_metrics.remove(point.key)
        return run.logged.get((point.key, point.step)) == point.value

    def _is_behind(self, run: _Run, point: Point) -> bool:
        """Whether MLflow would go on showing another value, of a higher step: of more finished trials than now."""
        self._is_logged(run, point)  # knows all steps of it then
        return any(key == point.key and step > point.step for key, step in run.logged)


class NullTracker:
    """The mirror of a sweep that is not tracked: every method does nothing."""

    def open(self) -> None:
        """Do nothing."""

    def sync(self) -> int:
        """Do nothing; return 0, as no run changed."""
        return 0

    def close(self) -> int:
        """Do nothing; return 0, as no run changed."""
        return 0

    def link(self) -> str:
        """Return an empty text: there is no link."""
        return ""

    def ui_command(self) -> str:
        """Return an empty text: there is no command."""
        return ""

    def sync_command(self) -> str:
        """Return an empty text: there is no command."""
        return ""


def tracking_uri(uri: str | None) -> str:
    """Return the address that a sweep file's `tracking: {uri: ...}` means in this process."""
    return uri or os.environ.get(TRACKING_VARIABLE) or DEFAULT_URI


def tracker_for(uri: str | None, sweep: SweepFolder, allow_insecure: bool = False) -> MlflowTracker | NullTracker:
    """The mirror that the sweep file's `tracking: {uri: ...}` asks for; `none` asks for no tracking.

    Raises:
        ConfigError: MLflow takes no such address, or the server is on another machine, and TLS or credentials are
            missing.
    """
    if uri == "none":
        return NullTracker()
    mirror = MlflowTracker(uri, sweep, allow_insecure)
    if faults := address_faults(mirror.uri) or place_faults(mirror.uri):
        raise ConfigError(f"tracker: {'; '.join(faults)}")
    check_tracking_address(mirror.uri, allow_insecure)
    return mirror


class SyncThread:
    """Keeps a mirror current from one background thread, so that a slow or dead tracker never holds up training.

    `start` returns at once; `stop` is the only place that waits. A failure is reported once, then tried again with
    growing pauses until it passes; the next sync brings everything.
    """

    def __init__(
        self,
        mirror: MlflowTracker | NullTracker,
        *,
        interval_seconds: float = 5.0,
        longest_pause_seconds: float = 60.0,
        tell: Callable[[str], None] = _logger.warning,
    ):
        """Have `tell` receive one message when the mirror falls behind and one when it has caught up."""
        self.mirror = mirror
        self._later = mirror.sync_command()
        self.interval_seconds = interval_seconds
        self.longest_pause_seconds = longest_pause_seconds
        self.tell = tell
        self._opened = False
        self._behind_since = ""
        self._delivered = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        """Open the mirror and begin to sync, in the background."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 120.0, away_seconds: float = 10.0) -> bool:
        """Ask for a last sync and the closing of the mirror; whether both were done within the time given.

        Args:
            timeout_seconds: to wait for a tracker that has answered so far.
            away_seconds: to wait for one that has not answered the last time it was asked.
        """
        self._stopping.set()
        self._thread.join(min(away_seconds, timeout_seconds) if self._behind_since else timeout_seconds)
        tell, self.tell = self.tell, lambda line: None  # whatever still runs in the background is silent from now on
        if not self._delivered:
            away = f"; it is away since {self._behind_since}" if self._behind_since else " in time"
            tell(f"the tracker has not taken everything{away}. When it is back: {self._later}")
        return self._delivered

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            if self._attempt(self.mirror.sync):
                pause = self.interval_seconds
            elif self._stopping.is_set():
                return  # it was asked a moment ago
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
            if not self._behind_since:
                self._behind_since = time.strftime("%Y-%m-%d %H:%M:%S")
                self.tell(
                    f"tracking is behind since {self._behind_since}: {redact(str(error))} Training goes on and the "
                    f"tracker is tried again; to catch up later: {self._later}"
                )
            return False
        if self._behind_since:
            self.tell("tracking has caught up")
        self._behind_since = ""
        return True


def view_state(sweep: SweepFolder) -> dict[str, Any]:
    """The state of MLflow's run page that compares this sweep's trials: table, scatter charts, AP over tasks.

    The format is undocumented and read off MLflow 3.17; a newer UI that does not know it shows its plain page.
    """
    axes = {axis: name for axis, name in short_names(sweep.axes).items() if axis != sweep.seed_axis}
    numeric = summaries.numeric_axis([{name: trial.values[axis] for axis, name in axes.items()} for trial in sweep])
    shown = [*axes.values(), "seed"]
    return {
        "searchFilter": f"tags.sweep_id = '{sweep.sweep_id}' and tags.kind = 'trial'",
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
            *(_section(prefix, prefix, display=False) for prefix in _FOLDED),
        ],
        "compareRunCharts": _charts(numeric, list(axes.values())),
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


def quiet_client(uri: str) -> Any:
    """Make MLflow's client for an address; it gives up soon, and says nothing on its own."""
    for name, value in _CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient  # not at the top: it takes seconds, which the mirror's own thread can spare

    _ask_once_for_databricks()
    logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it would warn at every attempt
    if (database := sqlite_file(uri)) is not None:
        database.parent.mkdir(parents=True, exist_ok=True)
        if uri == DEFAULT_URI:  # as with the default storage, nobody has chosen who may read it
            private_file(database)
            private_folder(database.parent / ARTIFACTS)
    return MlflowClient(tracking_uri=uri)


def _ask_once_for_databricks() -> None:
    """Have MLflow not find out at every request whether it runs inside Databricks.

    Elsewhere that is a dozen imports that fail, which take longer than all else that its client does for a request.
    """
    from mlflow.tracking.request_header import registry

    providers = registry._request_header_provider_registry._registry
    asking = registry.DatabricksRequestHeaderProvider
    providers[:] = [found for found in providers if not isinstance(found, asking) or found.in_context()]


def _say_waiting(holder: str) -> None:
    _logger.warning("%s is bringing this sweep into MLflow; waiting for it", holder)


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


def _identity(run: Any) -> tuple[str, str, str]:
    """A run's kind and key, and the life of the trial that it tells of; empty for runs that are not ours."""
    tags = run.data.tags
    kind = tags.get("kind", "")
    return kind, tags.get(KEY_TAG.get(kind, ""), ""), tags.get("journal", "")


def _read_run(client: Any, run: Any, uri: str) -> StoredRun:
    run_id = run.info.run_id
    kind, key, _ = _identity(run)
    points = [point for metric in run.data.metrics for point in _history(client, run_id, metric)]
    return StoredRun(
        run_id=run_id,
        kind=kind,
        key=key,
        status=run.info.status,
        params=dict(run.data.params),
        tags=dict(run.data.tags),
        points=points,
        artifacts=dict(_all_artifacts(_artifact_repository(run.info.artifact_uri, uri))),
        artifact_uri=run.info.artifact_uri,
    )


def _history(client: Any, run_id: str, key: str) -> list[Point]:
    """Every value of one metric, in order of time."""
    found = sorted(client.get_metric_history(run_id, key), key=lambda metric: metric.timestamp)
    return [Point(key, metric.value, metric.step, metric.timestamp / 1000) for metric in found]


def _artifact_repository(artifact_uri: str, uri: str) -> Any:
    """A run's artifacts where they lie: by its id, MLflow asks the tracker for the run, and for models, at every file.

    It is made as MLflow's client makes it to log them.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from mlflow.utils.uri import add_databricks_profile_info_to_artifact_uri

    location = add_databricks_profile_info_to_artifact_uri(artifact_uri, uri)
    return get_artifact_repository(location, tracking_uri=uri)


def _all_artifacts(repository: Any, folder: str | None = None) -> Iterator[tuple[str, int]]:
    for entry in repository.list_artifacts(folder):
        if entry.is_dir:
            yield from _all_artifacts(repository, entry.path)
        else:
            yield entry.path, entry.file_size


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Return a folder beside a local database; None for a server, which knows its own place."""
    database = sqlite_file(uri)
    return (database.parent / ARTIFACTS / experiment).as_uri() if database else None
