"""Which storage and which tracker a sweep uses: command line, file, environment, and Ray's copy of a job's folder."""

import pytest
from helpers.sweeps import tiny, write

from latent_sweep.cli.main import main
from latent_sweep.errors import ConfigError
from latent_sweep.sweep.config import load_sweep


@pytest.fixture(autouse=True)
def _no_tracker_of_other_tests(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)  # MLflow itself sets it: `set_tracking_uri`


PACKAGE = "session_1/runtime_resources/working_dir_files/_ray_pkg_0123456789abcdef"


def loaded(tmp_path, storage=None, uri=None, *overrides):
    """What a sweep file with this storage and tracker uses."""
    run = {"tracking": {"uri": uri}} | ({"storage": storage} if storage else {})
    content = tiny(run=run)
    path = write(tmp_path, content)
    if not storage:
        text = (tmp_path / "sweep.yaml").read_text().replace(f"  storage: {tmp_path / 'runs'}\n", "")
        (tmp_path / "sweep.yaml").write_text(text)
    return load_sweep(path, overrides).run


@pytest.mark.parametrize(
    ("given", "written", "variable", "used"),
    [
        (None, None, None, "runs"),
        (None, "results", None, "results"),
        (None, None, "/data/sweeps", "/data/sweeps"),
        (None, "results", "/data/sweeps", "/data/sweeps"),
        (None, "results", "s3://bucket/sweeps", "s3://bucket/sweeps"),
        (None, "/own/runs", "/data/sweeps", "/own/runs"),
        (None, "~/runs", "/data/sweeps", "~/runs"),
        (None, "s3://own/runs", "/data/sweeps", "s3://own/runs"),
        ("here", "/own/runs", "/data/sweeps", "here"),
        ("here", "results", "/data/sweeps", "here"),
        (None, "results", "", "results"),
    ],
)
def test_the_first_that_names_a_storage_decides(tmp_path, monkeypatch, given, written, variable, used):
    if variable is not None:
        monkeypatch.setenv("LATENT_SWEEP_STORAGE", variable)
    overrides = [] if given is None else [f"run.storage={given}"]
    assert loaded(tmp_path, written, None, *overrides).storage == used


@pytest.mark.parametrize(
    ("given", "written", "variable", "used"),
    [
        (None, "sqlite:///own.db", None, "sqlite:///own.db"),
        (None, "sqlite:///own.db", "https://mlflow:5000", None),  # that of the environment, which may hold a password
        (None, None, "https://mlflow:5000", None),
        (None, "sqlite:////own/own.db", "https://mlflow:5000", "sqlite:////own/own.db"),
        (None, "https://own:5000", "https://mlflow:5000", "https://own:5000"),
        (None, "none", "https://mlflow:5000", "none"),
        ("sqlite:///own.db", "https://own:5000", "https://mlflow:5000", "sqlite:///own.db"),
    ],
)
def test_the_first_that_names_a_tracker_decides(tmp_path, monkeypatch, given, written, variable, used):
    if variable is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    overrides = [] if given is None else [f"run.tracking.uri={given}"]
    assert loaded(tmp_path, None, written, *overrides).tracking.uri == used


def test_a_whole_group_on_the_command_line_counts_as_well(tmp_path, monkeypatch):
    monkeypatch.setenv("LATENT_SWEEP_STORAGE", "/data/sweeps")
    assert loaded(tmp_path, None, None, "run={storage: here}").storage == "here"
    assert loaded(tmp_path, None, None, "run={page: false}").storage == "/data/sweeps"


@pytest.mark.parametrize("variable", ["ftp://host/runs", "s3://user:word@bucket/runs", "file:///runs"])
def test_a_variable_that_names_no_storage_is_named(tmp_path, monkeypatch, variable):
    monkeypatch.setenv("LATENT_SWEEP_STORAGE", variable)
    with pytest.raises(ConfigError, match="LATENT_SWEEP_STORAGE: "):
        loaded(tmp_path)


@pytest.mark.parametrize("variable", ["mlruns", "ftp://host", "sqlite://mlflow.db"])
def test_a_variable_that_names_no_tracker_is_named(tmp_path, monkeypatch, variable):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI: "):
        loaded(tmp_path)


# --- inside Ray's copy of a job's working directory ------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / PACKAGE
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_relative_storage_there_is_refused_before_anything_starts(package, tmp_path, capsys, command):
    path = write(tmp_path, tiny(run__storage="runs"))
    assert main([command, path]) == 2
    message = capsys.readouterr().err
    assert "run.storage: found 'runs'" in message
    assert "LATENT_SWEEP_STORAGE" in message
    assert list(package.iterdir()) == []


def test_a_relative_storage_of_the_command_line_or_the_variable_is_refused_there_too(package, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"run\.storage"):
        loaded(tmp_path, "/data/sweeps", "none", "run.storage=runs")
    monkeypatch.setenv("LATENT_SWEEP_STORAGE", "runs")
    with pytest.raises(ConfigError, match="LATENT_SWEEP_STORAGE: found"):
        loaded(tmp_path, "results", "none")
    assert loaded(tmp_path, "/data/sweeps", "none").storage == "/data/sweeps"


@pytest.mark.parametrize(
    ("uri", "variable", "where"),
    [
        (None, None, "run.tracking.uri"),
        ("sqlite:///own.db", None, "run.tracking.uri"),
        (None, "sqlite:///mlflow.db", "MLFLOW_TRACKING_URI"),
    ],
)
def test_a_relative_tracker_is_refused_there(package, tmp_path, monkeypatch, uri, variable, where):
    if variable:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    with pytest.raises(ConfigError, match=rf"{where}: found 'sqlite:///"):
        loaded(tmp_path, "/data/sweeps", uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert loaded(tmp_path, "/data/sweeps", uri).tracking.uri is None


def test_a_sweep_that_is_not_there_names_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "sweeps/none.yaml"]) == 2
    message = capsys.readouterr().err
    assert "sweeps/none.yaml" in message
    assert str(tmp_path) in message
    assert "--working-dir" not in message
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert main(["plan", "sweeps/none.yaml"]) == 2
    assert "--working-dir ." in capsys.readouterr().err
