"""Processes in which this package is not installed, as on the nodes that run a job."""

HIDING = """
import importlib.metadata


def without_ours(cls, name, found=importlib.metadata.Distribution.from_name.__func__):
    if name == "latent-sweep":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(cls, name)


importlib.metadata.Distribution.from_name = classmethod(without_ours)
"""
"""A `sitecustomize`, or the end of one."""
