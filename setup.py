"""Add what pyproject.toml cannot express: sweep files as package data, a long description without local links."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithSweeps(build_py):
    """Copies sweeps/*.yaml into the package. Editable installs read them from their folder."""

    def run(self) -> None:
        """Build the package and add the sweep files."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "latent_sweep" / "sweep_files"
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted((HERE / "sweeps").glob("*.yaml")):
                shutil.copyfile(path, target / path.name)


def long_description() -> str:
    """Return README.md without local pictures, and with the text in place of each local link."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r'<img src="(?!https?:)[^>]*>\s*', "", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithSweeps},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
