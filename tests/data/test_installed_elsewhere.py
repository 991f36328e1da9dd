"""A sweep runs with packages on PYTHONPATH, as after `pip install --target`, outside any `site-packages` folder."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from helpers.patience import PATIENCE
from helpers.sweeps import brief, tiny

import latent_sweep

REPOSITORY = Path(latent_sweep.__file__).parent.parent


@pytest.mark.slow
@pytest.mark.one_machine
def test_a_sweep_runs_with_packages_outside_of_site_packages(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix != ".pth" and not path.name.startswith(("__editable__", "_virtualenv")):
            (target / path.name).symlink_to(path)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(yaml.safe_dump(tiny(**brief(run__storage=str(tmp_path / "runs")))))
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    ran = subprocess.run(
        [str(python), "-S", "-m", "latent_sweep.run", str(sweep), "--local"],
        env=os.environ | {"PYTHONPATH": f"{target}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PicklingError" not in ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr
