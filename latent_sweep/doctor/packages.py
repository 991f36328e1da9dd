"""The packages that are installed, against what the metadata of latent-sweep asks for."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import latent_sweep
from latent_sweep.doctor.findings import Finding, examined, fault, ok, warning
from latent_sweep.storage.versions import OURS, Declared, declared

if TYPE_CHECKING:
    from packaging.requirements import Requirement

NEEDED_FOR: Mapping[str, str] = {
    "ray": "runs without --local",
    "mlflow": "tracking; `--set run.tracking.uri=none` does without",
    "deepspeed": "`run.engine.name: deepspeed`",
    "accelerate": "the embedded backbone",
    "gguf": "the embedded backbone",
    "sentencepiece": "tokenizers that are published without a tokenizer.json",
    "matplotlib": "reports as a page, pictures",
    "jinja2": "reports as a page",
    "rich": "the screen of a run on a terminal",
    "pandas": "`latent_sweep.open_sweep`",
}
"""Packages that some sweeps do without, and what for they are needed."""

IMPORTED: Mapping[str, str] = {"torch": "torch", "transformers": "transformers", "datasets": "datasets"}
"""Packages that every sweep imports, by the name that they are imported by."""


def check_packages(needed: Sequence[str] = ()) -> Iterator[Finding]:
    """Find python and all packages in the versions that are asked for.

    Args:
        needed: packages that the sweep cannot do without, whatever others can, e.g. `deepspeed`.
    """
    try:
        asked_for = declared()
    except importlib.metadata.PackageNotFoundError:
        advice = "`make setup`, or `pip install`"
        yield fault(OURS, "not installed, so nothing says which versions it needs", advice=advice)
        return
    yield from examined("python", partial(_python, asked_for.python))
    yield _ours(asked_for.version)
    for asked in _requirements(asked_for):
        yield from examined(asked.name, partial(_package, asked.name, str(asked.specifier), needed))


def check_imports(needed: Sequence[str] = ()) -> Iterator[Finding]:
    """Import what every sweep imports, and what this one needs: an installed package may still be a broken one."""
    for name in [*IMPORTED, *needed]:
        if _installed(name) is not None:
            yield from _import(name)


def code_digest() -> str:
    """Content hash of the package's own files: nodes with two checkouts of one version do not run the same code."""
    digest, folder = hashlib.sha256(), Path(latent_sweep.__file__).parent
    for path in sorted(path for kind in ("*.py", "*.yaml") for path in folder.rglob(kind)):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return all that nodes of one cluster must agree on, by name."""
    found = {"python": platform.python_version(), f"{OURS} (code)": code_digest()}
    try:
        return found | {asked.name: _installed(asked.name) or "not installed" for asked in _requirements(declared())}
    except importlib.metadata.PackageNotFoundError:
        return found


def _requirements(asked_for: Declared) -> list[Requirement]:
    """What latent-sweep needs on this system, its extras left out."""
    from packaging.requirements import Requirement

    asked = map(Requirement, asked_for.requirements)
    return [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]


def _python(asked: str) -> Iterator[Finding]:
    yield _compared("python", platform.python_version(), asked, "make the environment anew with such a Python")


def _ours(version: str) -> Finding:
    if version == latent_sweep.__version__:
        return ok(OURS, f"{version}, code {code_digest()}")
    folder = Path(latent_sweep.__file__).parent
    return warning(
        OURS,
        f"the metadata says {version}, but the code in {folder} is {latent_sweep.__version__}",
        advice="install it again (`make setup`): the ranges below are those of the other version",
    )


def _package(name: str, asked: str, needed: Sequence[str]) -> Iterator[Finding]:
    version, remedy = _installed(name), f"`pip install '{name}{asked}'`, or `make setup` for all of them"
    if version is not None:
        yield _compared(name, version, asked, remedy, _torch_build if name == "torch" else None)
    elif name in NEEDED_FOR and name not in needed:
        yield warning(name, "not installed", asked, f"needed only for {NEEDED_FOR[name]}; {remedy}")
    else:
        yield fault(name, "not installed", asked, remedy)


def _compared(name: str, version: str, asked: str, remedy: str, more: Callable[[], str] | None = None) -> Finding:
    from packaging.specifiers import SpecifierSet

    shown = f"{version}{more() if more else ''}"
    if SpecifierSet(asked).contains(version, prereleases=True):
        return ok(name, shown, asked)
    return fault(name, shown, asked, remedy)


def _torch_build() -> str:
    import torch

    return f", built for CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import(name: str) -> Iterator[Finding]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(IMPORTED.get(name, name))
    except Exception as error:  # whatever a broken installation raises
        said = f"installed, but importing it fails with {type(error).__name__}: {error}"
        yield fault(name, said, advice=f"install it again: `pip install --force-reinstall {name}`")
