"""The package as a wheel, installed without its checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from helpers.patience import PATIENCE

import latent_sweep
from latent_sweep.cli.main import main
from latent_sweep.sweep.templates import packaged_sweeps

REPOSITORY = Path(latent_sweep.__file__).parent.parent
SWEEPS = sorted(path.stem for path in (REPOSITORY / "sweeps").glob("*.yaml"))
UNPACKED = ("latent_sweep", "sweeps", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel of this checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in UNPACKED:
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run(command, cwd=source, check=True, timeout=PATIENCE)
    (found,) = (source / "dist").glob("latent_sweep-*.whl")
    return found


@pytest.mark.slow
def test_an_installed_wheel_lists_and_copies_its_sweeps(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    paths = [str(tmp_path / "site"), sysconfig.get_path("purelib")]
    code = "import sys, latent_sweep, latent_sweep.cli.main as cli; print(latent_sweep.__file__); sys.exit(cli.main())"

    def ran(*arguments):
        return subprocess.run(
            [sys.executable, "-S", "-c", code, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    listed = ran("init", "--list")
    assert listed.returncode == 0, listed.stderr
    where, *lines = listed.stdout.splitlines()
    assert Path(where).is_relative_to(tmp_path)
    assert [line.split()[0] for line in lines] == SWEEPS
    assert ran("init", "mine", "--copy", "quickstart").returncode == 0
    assert (tmp_path / "mine.yaml").read_text() == (REPOSITORY / "sweeps" / "quickstart.yaml").read_text()
    planned = ran("plan", "mine.yaml")
    assert planned.returncode == 0, planned.stderr


@pytest.mark.slow
def test_the_page_on_an_index_has_no_dead_links(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = message_from_string(archive.read(metadata).decode()).get_payload()
    assert "# latent_sweep" in page and "latent-sweep plan" in page
    assert "](" not in page.replace("](http", "") and "<img" not in page


def test_the_sweeps_of_the_package_are_listed_and_copied(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(packaged_sweeps()) == SWEEPS
    assert main(["init", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == SWEEPS
    assert main(["init", "--copy", "quickstart"]) == 0
    assert (tmp_path / "quickstart.yaml").read_text() == packaged_sweeps()["quickstart"].read_text()


@pytest.mark.parametrize("arguments", [[], ["x", "--copy", "quickstrat"], ["x", "--copy", "quickstart", "--own"]])
def test_an_impossible_copy_is_refused(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and ("quickstart" in printed or "--" in printed)
    assert list(tmp_path.iterdir()) == []
