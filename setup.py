"""What pyproject.toml cannot say: the sweep files go into the package, and its page on an index has no dead links."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithSweeps(build_py):
    """Copies sweeps/*.yaml into the package; where it is installed to be edited, they are read in their folder."""

    def run(self) -> None:
        """Build the package, and add the sweep files."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "latent_sweep" / "sweep_files"
            target.mkdir(parents=True, exist_ok=True)
            for path in sorted((HERE / "sweeps").glob("*.yaml")):
                shutil.copyfile(path, target / path.name)


def long_description() -> str:
    """Return README.md without the pictures and with the texts of the links that lead to files beside it."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r'<img src="(?!https?:)[^>]*>\s*', "", text)
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithSweeps},
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
