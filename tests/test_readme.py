"""What the README says must be what the code says."""

import re
from pathlib import Path

from latent_sweep.settings import parse_yaml
from latent_sweep.sweep.config import load_sweep, parse_sweep
from latent_sweep.sweep.groups import describe_settings
from latent_sweep.sweep.plan import expand

README = Path(__file__).parents[1] / "README.md"


def test_settings_reference_is_current():
    assert describe_settings() in README.read_text(encoding="utf-8"), "paste `latent-sweep settings` into the README"


def test_sweep_file_in_readme_is_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    sweep = parse_sweep(parse_yaml(next(b for b in blocks if b.startswith("name: lambda")), "README"), "README")
    assert len(expand(sweep)) == 3 * 6 * 4


def test_every_sweep_file_named_in_the_readme_exists():
    named = set(re.findall(r"sweeps/(\w+)\.yaml", README.read_text(encoding="utf-8")))
    assert named
    for name in named:
        load_sweep(README.parent / "sweeps" / f"{name}.yaml")
