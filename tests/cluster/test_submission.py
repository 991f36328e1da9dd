"""Sweeps submitted to a real cluster by `ray job submit`, with a token, from a working directory."""

import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import yaml
from helpers.moments import at_step
from helpers.patience import PATIENCE
from helpers.ray_heads import ROOT, eventually, head
from helpers.sweeps import events, family, results, sweep_folder, tiny, write
from helpers.uninstalled import HIDING

from latent_sweep.cli.main import main

pytestmark = pytest.mark.slow

QUICK = tiny(trial__training__epochs=1)
STEPS = 16
LONG = tiny(
    trial__training__epochs=STEPS // 8,
    trial__training__checkpoint_every=5,
    search={"router.epsilon": [0.01, 0.1]},
    name="long",
)
"""One pack of two trials that is interrupted in its second task."""


@pytest.fixture(scope="module")
def inside_the_second_task(tmp_path_factory):
    """Where the worker of `LONG` halts; the other sweep has more steps.

    Its processes find this package in their working directory, and not among those that are installed.
    """
    folder = tmp_path_factory.mktemp("moment") / "moment"
    moment = at_step(folder, position=1, step=8, of=STEPS)
    with (folder / "sitecustomize.py").open("a", encoding="utf-8") as hooks:
        hooks.write(HIDING)
    return moment


@pytest.fixture(scope="module")
def cluster(inside_the_second_task):
    options = ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=120000000"]
    with head(*options, **inside_the_second_task.environment) as found:
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with the code, two sweep files and a model that must not be shipped, next to the results."""
    folder = tmp_path_factory.mktemp("place")
    checkout = folder / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "latent_sweep", checkout / "latent_sweep", ignore=ignore)
    for name in (".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    for content in (QUICK, LONG):
        content = content | {"run": content["run"] | {"storage": str(folder / "runs")}}
        (checkout / f"{content['name']}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    (checkout / "runs").mkdir()
    with (checkout / "runs" / "model.safetensors").open("wb") as model:
        model.truncate(200 * 2**20)  # more than Ray takes
    return folder


def submit(cluster, place, name, *options, **environment):
    """Submit a sweep by `ray job submit`; by default, wait for its end."""
    command = ["ray", "job", "submit", "--address", cluster.dashboard, "--working-dir", ".", *options]
    return subprocess.run(
        [*command, "--", "python", "-m", "latent_sweep.run", f"{name}.yaml"],
        env=cluster.environment | environment,
        cwd=place / "checkout",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def submitted(cluster, place):
    return submit(cluster, place, "tiny")


def test_the_job_log_has_plan_progress_and_result(submitted):
    assert submitted.returncode == 0, submitted.stdout
    parts = [
        r"4 trials",
        r"\[\d+:\d\d\] epsilon=0\.1 seed=[01]: finished",
        r"epsilon +n +AP \(%\) +LA \(%\) +FM \(%\)",
        r"Job 'raysubmit_\w+' succeeded",
    ]
    found = [re.search(part, submitted.stdout) for part in parts]
    assert all(found), submitted.stdout
    assert [match.start() for match in found] == sorted(match.start() for match in found)


def test_ignored_files_are_not_shipped(cluster, submitted):
    home = cluster.environment["HOME"]
    (package,) = set(re.findall(r"(_ray_pkg_\w+)\.zip", submitted.stdout))
    (shipped,) = (path for path in Path(home).glob(f"ray/session_2*/runtime_resources/working_dir_files/{package}"))
    files = [path for path in shipped.rglob("*") if path.is_file()]
    assert shipped / "latent_sweep" / "run.py" in files
    assert not (shipped / "runs").exists()
    assert sum(path.stat().st_size for path in files) < 8e6


def test_submitting_a_complete_sweep_again_learns_nothing(cluster, place, submitted):
    sweep = sweep_folder(place)
    before = {trial.trial_id: trial.events() for trial in sweep}
    again = submit(cluster, place, "tiny")
    assert again.returncode == 0, again.stdout
    assert {trial.trial_id: trial.events() for trial in sweep} == before


def drivers(cluster, name):
    """Return the driver processes of a sweep."""
    found = []
    for member in family(cluster.process):
        try:
            if member.cmdline()[1:] == ["-m", "latent_sweep.run", f"{name}.yaml"]:
                found.append(member)
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_killed_sweep_resumes_when_submitted_again(cluster, place, inside_the_second_task, tmp_path, one_thread):
    submitted = submit(cluster, place, "long", "--no-wait")  # it returns though the work waits to be let go
    assert submitted.returncode == 0, submitted.stdout
    assert eventually(lambda: inside_the_second_task.reached)
    sweep = sweep_folder(place, "long")
    (driver,) = drivers(cluster, "long")
    driver.kill()
    assert eventually(lambda: not drivers(cluster, "long"))
    assert events(sweep, "finished") == []

    again = submit(cluster, place, "long")
    assert again.returncode == 0, again.stdout
    for trial in sweep:
        assert [event.name for event in trial.events()] == ["started", "stage", "started", "stage", "finished"]
    assert [event.reused for event in events(sweep, "stage")] == [False] * 4
    assert results_of(sweep) == undisturbed(tmp_path)


def results_of(sweep):
    """Return the result files of a sweep's trials, without snapshots."""
    return {name: content for name, content in results(sweep).items() if name.startswith(sweep.path.name)}


def undisturbed(folder):
    """The same sweep, run without Ray."""
    assert main(["run", write(folder, LONG), "--local"]) == 0
    return results_of(sweep_folder(folder, "long"))


@pytest.mark.parametrize("environment", [{"RAY_AUTH_TOKEN": "0" * 64}, {"RAY_AUTH_MODE": "disabled"}])
def test_a_client_without_a_token_is_refused(cluster, place, environment):
    refused = submit(cluster, place, "tiny", "--no-wait", **environment)
    assert refused.returncode != 0
    assert re.search("authentication", refused.stdout) and "raysubmit_" not in refused.stdout
