"""A real MLflow server is down, dies, comes back, hangs: training takes no notice, and `sync` brings everything."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from mlflow_server import Server, empty_database
from sweeps_for_tests import end, events, results, start, sweep_folder, tiny, wait_until, write

from latent_sweep.cli import main

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

pytestmark = pytest.mark.slow

AWAY_SECONDS = 10.0
"""What an absent tracker may cost at a run's end."""


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An empty database: making one takes seconds."""
    return empty_database(tmp_path_factory.mktemp("database"))


@pytest.fixture
def server(tmp_path, database):
    """A server that is not running yet."""
    server = Server(tmp_path / "server", database)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Results of the tiny sweep, and the seconds that its run took, without a tracker."""
    folder = tmp_path_factory.mktemp("undisturbed")
    began = time.monotonic()
    code, printed = finish(start(write(folder, tiny()), "--local"))
    assert code == 0, printed
    return results(sweep_folder(folder)), time.monotonic() - began


def finish(process):
    """The exit code of a process and all that it printed."""
    try:
        printed, _ = process.communicate(timeout=240)
        return process.returncode, printed
    finally:
        end(process)


def launch(folder, server):
    return start(write(folder, tiny(run__tracking__uri=server.uri)), "--local")


def command(*arguments):
    return [sys.executable, "-m", "latent_sweep.cli", *arguments]


def assert_all_arrives(folder, server, capsys):
    """Sync brings everything once, verify agrees, and a second sync finds nothing to do."""
    path = str(sweep_folder(folder).path)
    assert main(["sync", path]) == 0
    assert main(["verify", path]) == 0, capsys.readouterr().out
    assert "looked at 7 runs" in capsys.readouterr().out  # four trials, two means over seeds, the sweep
    assert main(["sync", path]) == 0
    assert "0 runs brought up to date" in capsys.readouterr().out
    assert len(server.runs("trial")) == 4


def test_a_tracker_that_is_never_there_costs_a_bounded_moment(tmp_path, server, undisturbed):
    began = time.monotonic()
    code, printed = finish(launch(tmp_path, server))
    took = time.monotonic() - began
    expected, usual = undisturbed
    assert code == 0, printed
    assert results(sweep_folder(tmp_path)) == expected
    assert took < 1.5 * usual + AWAY_SECONDS + 5, "the moment is bounded"
    assert printed.count("tracking is behind since 20") == 1
    assert "the tracker has not taken everything; it is away since 20" in printed
    assert f"When it is back: latent-sweep sync {sweep_folder(tmp_path).path}\n" in printed
    assert "Traceback" not in printed


def test_a_tracker_that_comes_during_the_run_is_taken_up(tmp_path, server, undisturbed, capsys):
    process = launch(tmp_path, server)
    try:
        wait_until(lambda: events_so_far(tmp_path, "started"), process)
        server.start()
        code, printed = finish(process)
    finally:
        end(process)
    assert code == 0, printed
    assert results(sweep_folder(tmp_path)) == undisturbed[0]
    assert_all_arrives(tmp_path, server, capsys)


def test_a_tracker_killed_in_the_middle(tmp_path, server, undisturbed, capsys):
    server.start()
    process = launch(tmp_path, server)
    try:
        wait_until(lambda: server.runs("trial"), process)  # the first trial has been mirrored
        assert len(events_so_far(tmp_path, "finished")) < 4, "too late to be in the middle"
        server.kill()
        code, printed = finish(process)
    finally:
        end(process)
    assert code == 0, printed
    assert results(sweep_folder(tmp_path)) == undisturbed[0]
    assert "the tracker has not taken everything; it is away since 20" in printed
    server.start()
    assert_all_arrives(tmp_path, server, capsys)


def test_a_tracker_that_hangs_is_left(tmp_path, server, undisturbed, monkeypatch):
    """The system takes connections for a socket that listens; nobody ever answers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", server.port))
        silent.listen(50)
        began = time.monotonic()
        code, printed = finish(launch(tmp_path, server))
        took = time.monotonic() - began
    assert code == 0, printed
    assert results(sweep_folder(tmp_path)) == undisturbed[0]
    assert took < 1.5 * undisturbed[1] + AWAY_SECONDS + 5
    assert "the tracker has not taken everything; it is away since 20" in printed


def test_syncs_at_the_same_time_and_a_killed_one_double_nothing(tmp_path, server, capsys):
    content = tiny(run__tracking__uri="none")
    assert main(["run", write(tmp_path, content), "--local"]) == 0
    path = str(sweep_folder(tmp_path).path)
    server.start()
    arguments = [path, "--uri", server.uri]
    killed = subprocess.Popen(command("sync", *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: len(server.runs("trial")) >= 2, killed)
        os.kill(killed.pid, signal.SIGKILL)
    finally:
        end(killed)
    assert main(["verify", *arguments]) == 1
    both = [
        subprocess.Popen(command("sync", *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    ended = [finish(process) for process in both]
    assert [code for code, _ in ended] == [0, 0], ended
    capsys.readouterr()
    assert main(["verify", *arguments]) == 0, capsys.readouterr().out
    assert [len(server.runs(kind)) for kind in ("sweep", "trial", "summary")] == [1, 4, 2]


def events_so_far(folder, kind):
    """As `events`, also before the sweep's folder is there."""
    return events(sweep_folder(folder), kind) if (sweep_folder(folder).path / "sweep.json").exists() else []
