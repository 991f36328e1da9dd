"""Processes in which packages are not installed, such as this one on the nodes that run a job."""

from collections.abc import Iterable
from pathlib import Path

HIDING = """
import importlib.metadata


def without_ours(cls, name, found=importlib.metadata.Distribution.from_name.__func__):
    if name == "latent-sweep":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(cls, name)


importlib.metadata.Distribution.from_name = classmethod(without_ours)
"""
"""A `sitecustomize`, or the end of one."""

WITHOUT = """
import importlib.machinery
import importlib.metadata

HIDDEN = {hidden}


def spec_of_others(cls, name, *arguments, found=importlib.machinery.PathFinder.find_spec.__func__):
    return None if name.partition(".")[0] in HIDDEN else found(cls, name, *arguments)


def distribution_of_others(cls, name, found=importlib.metadata.Distribution.from_name.__func__):
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(cls, name)


importlib.machinery.PathFinder.find_spec = classmethod(spec_of_others)
importlib.metadata.Distribution.from_name = classmethod(distribution_of_others)
"""


def hiding(folder: Path, names: Iterable[str]) -> Path:
    """Write a `sitecustomize` into a folder for PYTHONPATH that hides packages from imports and from metadata."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WITHOUT.format(hidden=sorted(names)), encoding="utf-8")
    return folder
