"""Whether a tracker can be reached and takes runs: one is written, read and deleted in an experiment of its own."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from latent_sweep.errors import TrackingError
from latent_sweep.security import redact
from latent_sweep.storage.files import committing
from latent_sweep.sweep.tracking_uris import sqlite_file
from latent_sweep.tracking.mlflow import quiet_client

EXPERIMENT = "latent-sweep-doctor"


@dataclass(frozen=True)
class Probe:
    """What came of a probe."""

    seconds: float
    """From the first word to the last."""
    client: str
    """Version of MLflow here."""
    server: str | None
    """Version of MLflow there; None where it is a database, or does not say."""


def probe_tracker(uri: str) -> Probe:
    """Write a run into an experiment of its own, read it back, delete both.

    MLflow keeps what is deleted until `mlflow gc`; no list shows it. A local database that is not there is made beside
    its place, and removed.

    Raises:
        TrackingError: the tracker cannot be reached, refuses, or does not give back what it took.
        StoreError: no database can be made there.
    """
    import mlflow

    began = time.monotonic()
    with _database(uri) as there:
        try:
            client = quiet_client(there)
            server = _server_version(there)
            _round_trip(client)
        except Exception as error:
            # The cause is cut off: its own message may hold the address with its password.
            raise TrackingError(f"{type(error).__name__}: {redact(str(error))[:500]}") from None
    return Probe(time.monotonic() - began, mlflow.__version__, server)


@contextmanager
def _database(uri: str) -> Iterator[str]:
    """Yield the address to try: a local database's, where there is one already, else one's beside it."""
    file = sqlite_file(uri)
    if file is None or (file.exists() and file.stat().st_size):
        yield uri
        return
    with committing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".doctor-", dir=file.parent, ignore_cleanup_errors=True)
    with folder:
        yield f"sqlite:///{folder.name}/mlflow.db"


def _round_trip(client: Any) -> None:
    name = f"{EXPERIMENT}-{uuid.uuid4().hex[:8]}"
    experiment = client.create_experiment(name)
    try:
        run = client.create_run(experiment, run_name="probe").info.run_id
        client.log_param(run, "probe", name)
        client.log_metric(run, "probe", 0.5, step=1)
        client.set_terminated(run)
        found = client.get_run(run)
        if (found.data.params, found.data.metrics, found.info.status) != ({"probe": name}, {"probe": 0.5}, "FINISHED"):
            raise TrackingError("a run that was just written reads otherwise")
        client.delete_run(run)
    finally:
        with suppress(Exception):  # what has gone wrong before says more
            client.delete_experiment(experiment)


def _server_version(uri: str) -> str | None:
    if not uri.startswith(("http://", "https://")):
        return None
    from mlflow.store.tracking.rest_store import RestStore
    from mlflow.tracking._tracking_service.utils import _get_store

    store = _get_store(uri)
    if not isinstance(store, RestStore):
        return None
    from mlflow.utils.rest_utils import http_request

    answer = http_request(
        store.get_host_creds(), "/version", "GET"
    )  # with the credentials and certificates of the rest
    return answer.text.strip() if answer.status_code == 200 and len(answer.text) < 40 else None
