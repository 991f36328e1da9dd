"""How fast a sweep gets into MLflow: trials a second of the mirror, and of a client that sends the same and no more.

Both talk to a server of MLflow's on this machine, in turn, a few times each, so that they share what else the machine
has to do:

    PYTHONPATH=tests python -m tools.mirror --trials 60 --tasks 15 --workers 2 --store postgresql://...

The bare client has all bodies ready before its time begins, knows no run and reads no journal: it is what this server
can take on this machine. Without `--store` the server has a new SQLite database. Seconds depend on what else runs here;
the CPU time that a trial takes does so less, and says how many trials a second so many cores can do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from helpers.mlflow_server import Server, empty_database
from helpers.sweep_folders import run_copies, write_sweep
from helpers.sweeps import family

from latent_sweep.storage.folders import SweepFolder
from latent_sweep.tracking.contents import RunContent, run_tags, trial_content
from latent_sweep.tracking.mlflow import MlflowTracker

SEEDS = 3
CONNECTIONS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60, help="of each sweep; three have a configuration in common")
    parser.add_argument("--tasks", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3, help="sweeps that each of the two brings")
    parser.add_argument("--workers", type=int, default=1, help="processes of the server")
    parser.add_argument("--store", help="address of the server's database; default: a new SQLite file")
    options = parser.parse_args(arguments)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        database = options.store or empty_database(Path(folder))
        server = Server(Path(folder, "server"), database, options.workers)
        server.start()
        try:
            compare(server, Path(folder), options)
        finally:
            server.kill()


def compare(server: Server, folder: Path, options: argparse.Namespace) -> None:
    """Bring sweeps in turn and print what each took."""
    print(f"{options.trials} trials of {options.tasks} tasks, server with {options.workers} workers: trials a second")
    print(f"{'mirror':>8} {'bare':>8} {'ratio':>7} {'again (s)':>10}  CPU ms a trial: mirror, server, server with bare")
    for number in range(options.rounds):
        seeds = list(range(SEEDS))
        axes = {"method.ortho_lambda": [0.1 * i for i in range(options.trials // SEEDS)], "seed": seeds}
        sweep = write_sweep(folder / "runs", axes, name=f"sweep-{time.time_ns()}")
        run_copies(sweep, options.tasks)
        trials = len(list(sweep))
        mirror = MlflowTracker(server.uri, sweep)
        own, busy = time.process_time(), cpu_seconds(server)
        ours = trials / seconds(mirror.close)
        own, busy = time.process_time() - own, cpu_seconds(server) - busy
        again = seconds(mirror.sync)
        contents = [trial_content(sweep, trial, trial.events()) for trial in sweep]
        client, busy_with_bare = Bare(server.port, sweep, contents), cpu_seconds(server)
        bare = trials / seconds(client.send)
        busy_with_bare = cpu_seconds(server) - busy_with_bare
        times = "  ".join(f"{1000 * taken / trials:6.0f}" for taken in (own, busy, busy_with_bare))
        print(f"{ours:8.2f} {bare:8.2f} {ours / bare:7.2f} {again:10.3f}  {times}", flush=True)
        if number == 0:
            print(f"({len(contents[0].points)} points and {len(contents[0].artifacts)} files a trial)")


def cpu_seconds(server: Server) -> float:
    """What the server's processes have computed so far; a database server is not among them."""
    assert server.process is not None
    return sum(sum(process.cpu_times()[:2]) for process in family(server.process))


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


class Bare:
    """What MLflow must be told of finished trials, over a few connections, with nothing to think about."""

    def __init__(self, port: int, sweep: SweepFolder, contents: Sequence[RunContent]):
        self._port, self._own = port, threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        experiment = json.loads(self._post("experiments/create", {"name": f"{sweep.name}-bare"}))["experiment_id"]
        self._trials = [self._bodies(experiment, sweep, content) for content in contents]

    def _bodies(self, experiment: str, sweep: SweepFolder, content: RunContent) -> tuple[Any, ...]:
        tags = {**run_tags(sweep, content), **content.tags}
        create = {"experiment_id": experiment, "start_time": 1, "run_name": content.name, "tags": _pairs(tags)}
        metrics = [
            {"key": point.key, "value": point.value, "timestamp": round(1000 * point.time), "step": point.step}
            for point in content.points
        ]
        batch = {"metrics": metrics, "params": _pairs(content.params), "tags": _pairs(content.cursor)}
        files = {
            f"/api/2.0/mlflow-artifacts/artifacts/{experiment}/RUN/artifacts/{name}": artifact.read_bytes()
            if isinstance(artifact, Path)
            else artifact.encode()
            if isinstance(artifact, str)
            else artifact()
            for name, artifact in content.artifacts.items()
        }
        return create, json.dumps({"run_id": "RUN", **batch}), files

    def send(self) -> None:
        """Send all of it, once."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(self._send, self._trials))
        for connection in self._opened:
            connection.close()

    def _send(self, trial: tuple[Any, ...]) -> None:
        create, batch, files = trial
        run = json.loads(self._post("runs/create", create))["run"]["info"]["run_id"]
        self._request("POST", "/api/2.0/mlflow/runs/log-batch", batch.replace("RUN", run, 1).encode(), JSON)
        for path, content in files.items():
            self._request("PUT", path.replace("RUN", run, 1), content, {"Content-Type": "application/octet-stream"})
        self._post("runs/update", {"run_id": run, "status": "FINISHED", "end_time": 2})

    def _post(self, name: str, body: dict[str, Any]) -> bytes:
        return self._request("POST", f"/api/2.0/mlflow/{name}", json.dumps(body).encode(), JSON)

    def _request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
            self._opened.append(self._own.connection)
        self._own.connection.request(method, path, body, headers)
        answer = self._own.connection.getresponse()
        content: bytes = answer.read()
        assert answer.status == 200, content[:500]
        return content


JSON = {"Content-Type": "application/json"}


def _pairs(values: Any) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


if __name__ == "__main__":
    main()
