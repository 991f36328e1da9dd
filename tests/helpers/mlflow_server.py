"""A real MLflow server for the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from helpers.sweeps import end, wait_until
from latent_sweep.tracking import mlflow as mlflow_mirror


def empty_database(folder: Path) -> Path:
    """Return an empty database to copy; creating one takes seconds."""
    path = folder / "mlflow.db"
    mlflow_mirror.quiet_client(f"sqlite:///{path}").search_experiments()
    return path


class Server:
    """An MLflow server on its own port, which keeps its data when restarted.

    Args:
        folder: a new folder for its data.
        database: an empty SQLite database to copy, or the address of another database.
    """

    def __init__(self, folder: Path, database: Path | str, workers: int = 1):
        folder.mkdir()
        self.store, self.workers = f"sqlite:///{folder / 'mlflow.db'}", workers
        if isinstance(database, Path):
            shutil.copy(database, folder / "mlflow.db")
        else:
            self.store = database
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--backend-store-uri", self.store, "--workers", str(self.workers)]
        options += ["--artifacts-destination", str(self.folder / "artifacts"), "--port", str(self.port)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *options],
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self.listens, self.process)

    def listens(self) -> bool:
        """Return whether it answers on its port."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def kill(self) -> None:
        if self.process is not None:
            end(self.process)
        self.process = None

    def client(self) -> Any:
        return mlflow_mirror.quiet_client(self.uri)

    def runs(self, kind: str) -> list[Any]:
        """Return its runs of the tiny sweep with this tag `kind`."""
        experiment = self.client().get_experiment_by_name("tiny")
        if experiment is None:
            return []
        return self.client().search_runs([experiment.experiment_id], f"tags.kind = '{kind}'")
