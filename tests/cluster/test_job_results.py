"""Results of jobs are found by the next job, and by name from the repository."""

import os
import shutil
import subprocess
import sys

import pytest
import yaml
from helpers.patience import PATIENCE
from helpers.ray_heads import ROOT, head
from helpers.sweeps import sweep_folder, tiny

from latent_sweep.cli.main import main

pytestmark = pytest.mark.slow

SWEEP = tiny(
    search={"method.ortho_lambda": [0.0, 1e-5]}, trial__training__epochs=1, run={"storage": "runs", "page": False}
)
"""Two trainings that share their first stage, with relative storage and tracker as in the packaged sweeps."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the repository."""
    folder = tmp_path_factory.mktemp("place") / "checkout"
    for name in ("latent_sweep", "cluster"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    write(folder, SWEEP)
    return folder


@pytest.fixture(scope="module")
def cluster(checkout):
    with head("--num-cpus=2", "--num-gpus=0", "--object-store-memory=120000000", root=checkout) as found:
        yield found


def write(checkout, content):
    (checkout / "sweeps").mkdir(exist_ok=True)
    (checkout / "sweeps" / "tiny.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")


def submit(cluster, checkout, *options, sweep="sweeps/tiny.yaml"):
    """Submit a sweep from the repository as documented; return the finished process."""
    command = ["ray", "job", "submit", "--address", cluster.dashboard, *options]
    return done([*command, "--", "python", "-m", "latent_sweep.run", sweep], cluster.environment, checkout)


def done(command, environment, folder):
    return subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def submitted(cluster, checkout):
    """Submit the sweep twice with its working directory, the second time with another lambda."""
    first = submit(cluster, checkout, "--working-dir", ".")
    assert first.returncode == 0, first.stdout
    before = {trial.trial_id: trial.events() for trial in sweep_folder(checkout)}
    write(checkout, SWEEP | {"search": {"method.ortho_lambda": [0.0, 1e-5, 1e-2]}})
    second = submit(cluster, checkout, "--working-dir", ".")
    assert second.returncode == 0, second.stdout
    return before


def test_results_are_in_the_repository_and_private(checkout, submitted):
    assert (checkout / "mlflow.db").stat().st_size > 0
    assert len(submitted) == 2
    modes = [(checkout / name).stat().st_mode & 0o077 for name in ("runs", "mlflow.db", "mlartifacts")]
    assert modes == [0, 0, 0]


def test_a_changed_sweep_submitted_again_learns_only_what_is_new(checkout, submitted):
    trials = {trial.trial_id: trial for trial in sweep_folder(checkout)}
    assert {name: trials[name].events() for name in submitted} == submitted
    (new,) = trials.keys() - submitted.keys()
    assert [event.reused for event in trials[new].events() if event.name == "stage"] == [True, False]


def test_a_job_without_a_working_directory_runs_in_the_repository(cluster, checkout, submitted):
    before = {trial.trial_id: trial.events() for trial in sweep_folder(checkout)}
    again = submit(cluster, checkout)
    assert again.returncode == 0, again.stdout
    assert {trial.trial_id: trial.events() for trial in sweep_folder(checkout)} == before
    write(checkout, SWEEP | {"search": {"method.ortho_lambda": [0.0, 1e-5, 1e-2, 1e-1]}})
    new = submit(cluster, checkout)  # its worker finds the package there, too
    assert new.returncode == 0, new.stdout
    assert len(list(sweep_folder(checkout))) == 4


def test_a_sweep_file_missing_on_the_cluster_is_refused(cluster, checkout):
    refused = submit(cluster, checkout, sweep="sweeps/other.yaml")
    assert refused.returncode != 0
    assert "sweeps/other.yaml" in refused.stdout
    assert "--working-dir" in refused.stdout
    assert "Traceback" not in refused.stdout


def test_results_are_found_by_name_from_the_repository(checkout, submitted, monkeypatch):
    monkeypatch.chdir(checkout)
    for command in ("status", "report"):
        assert main([command, "tiny"]) == main([command, "runs/tiny"]) == 0
    # in processes of their own: within one, MLflow keeps the database that it first opened by a relative name
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for name in ("tiny", "runs/tiny"):
        found = done([sys.executable, "-m", "latent_sweep.cli.main", "verify", name], environment, checkout)
        assert found.returncode == 0, found.stdout
