"""Every node of a Ray cluster: the same packages and code as here, a device that works, one view of the storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

from latent_sweep.doctor.findings import Finding, examined, fault, ok, warning
from latent_sweep.doctor.machine import look_at_cpu, look_at_disk, look_at_gpus
from latent_sweep.doctor.packages import look_at_imports, look_at_packages, versions
from latent_sweep.doctor.storage import look_at_caches, look_at_storage, missing_folders, remove_empty
from latent_sweep.execution.ray_nodes import (
    Answer,
    Node,
    alive_nodes,
    ask,
    check_cluster_answers,
    connect,
    disconnect,
    resources_here,
)
from latent_sweep.execution.ray_tune import has_room, less_text, wanted_text
from latent_sweep.security import log_without_secrets, redact
from latent_sweep.storage.storage import Storage, has_answer, question, sees, unseen_message
from latent_sweep.sweep.schema import ResourceSettings
from latent_sweep.tracking.addresses import check_ray_address

SHOWN = ("driver", "CPU", "RAM", "storage")
"""What is told of the first node of each shape though nothing is wrong with it; and its GPUs."""


@dataclass(frozen=True)
class NodeReport:
    """What a node has found of itself."""

    findings: Sequence[Finding]
    versions: Mapping[str, str]
    sees: bool
    """Whether it sees what was written where it was asked."""


def look_at_room(resources: ResourceSettings) -> Iterator[Finding]:
    """Hold what a trial asks for against this machine, where `run` starts a cluster of it alone."""
    if find_spec("ray") is None:
        advice = "`pip install ray` in the version above, or run it with --local, which asks for nothing"
        yield warning("resources", "not looked at: Ray is not installed", advice=advice)
        return
    here = resources_here()
    if has_room([here], resources):
        yield ok("resources", f"{wanted_text(resources)}; this machine has {shape_of(here)}")
        return
    less = less_text([here], resources)
    advice = f"ask for less, {less}, or run it on a machine or cluster that has it; `run --local` asks for nothing"
    yield fault("resources", f"{wanted_text(resources)}; this machine has {shape_of(here)}", advice=advice)


def look_at_nodes(
    storage: Storage, needed: Sequence[str], allow_insecure: bool, resources: ResourceSettings
) -> Iterator[Finding]:
    """Have every node of the cluster examine itself, compare them with this machine, and a trial with what they have.

    Args:
        needed: packages that the sweep cannot do without.
        resources: what a trial asks for.

    Raises:
        ConfigError: the cluster cannot be joined, or may not be.
    """
    check_ray_address(allow_insecure)
    check_cluster_answers()
    connect()
    made = missing_folders(storage.folder)
    try:
        with question(storage) as asked:
            nodes = alive_nodes()
            gpus = [node.node_id for node in nodes if node.resources.get("GPU", 0)]
            answers = ask(nodes, examine_node, storage, asked, list(needed), gpus)
            here, shapes = versions(), set[str]()
            for node, answer in answers.items():
                shape = shape_of(node.resources)
                yield from _of_node(
                    node, answer, here, shape, shape not in shapes, _unseen(node, answer, storage, asked)
                )
                shapes.add(shape)
            yield ok("cluster", f"{len(nodes)} nodes of {len(shapes)} shapes: {'; '.join(sorted(shapes))}")
            if not has_room([node.resources for node in nodes], resources):
                less = less_text([node.resources for node in nodes], resources)
                advice = f"ask for less, {less}, or add such nodes; `run` waits for them"
                yield warning("resources", f"{wanted_text(resources)}; no such room is on these nodes", advice=advice)
    finally:
        disconnect()
        if made:
            remove_empty([storage.folder / ".preflight", *made])


def examine_node(
    storage: Storage, asked: str, needed: Sequence[str], with_gpus: Sequence[str], node_id: str
) -> NodeReport:
    """Look at the machine of this process as `doctor` does at its own; runs as a Ray task.

    Args:
        asked: the question that was written where the nodes are asked.
        with_gpus: ids of the nodes that Ray gives GPUs of.
    """
    log_without_secrets()
    device = "cuda" if node_id in with_gpus else "cpu"
    checks = {
        "packages": lambda: look_at_packages(needed),
        "imports": lambda: look_at_imports(needed),
        "GPU": lambda: look_at_gpus(device),
        "CPU": look_at_cpu,
        "disk": lambda: look_at_disk("storage", storage.folder),
        "storage": lambda: look_at_storage(storage),
        "caches": look_at_caches,
    }
    found = chain.from_iterable(examined(what, check) for what, check in checks.items())
    # this machine's own secrets are known here alone
    said = [replace(f, found=redact(f.found), expected=redact(f.expected), advice=redact(f.advice)) for f in found]
    return NodeReport(said, versions(), _sees(storage, asked, node_id))


def _sees(storage: Storage, asked: str, node_id: str) -> bool:
    try:
        return sees(storage, asked, node_id)
    except Exception:  # the check of the storage has said why
        return False


def _unseen(node: Node, answer: Answer, storage: Storage, asked: str) -> str:
    """Say that a node and this one do not see the same storage; nothing where they do, or it has not answered."""
    if answer.error is not None or (answer.value.sees and has_answer(storage, asked, node.node_id)):
        return ""
    return unseen_message(storage, [node.name])


def _of_node(
    node: Node, answer: Answer, here: Mapping[str, str], shape: str, first: bool, unseen: str
) -> Iterator[Finding]:
    if answer.error is not None:
        yield _no_answer(answer).on(node.name)
        return
    report: NodeReport = answer.value
    wrong = [finding for finding in report.findings if finding.mark != "ok"]
    others = [f"{name} {report.versions.get(name, 'unknown')} there, {here[name]} here" for name in here]
    different = [said for name, said in zip(here, others, strict=True) if report.versions.get(name) != here[name]]
    for finding in report.findings:
        if finding.mark != "ok" or (first and (finding.what in SHOWN or finding.what.startswith("GPU"))):
            yield finding.on(node.name)
    if different:
        advice = "install the same on all nodes, and have all see the same code: `ray job submit` ships it"
        yield fault("versions", "; ".join(different), "the same on all nodes", advice).on(node.name)
    if unseen:
        yield fault("storage", unseen).on(node.name)
    if not (wrong or different or unseen):
        yield ok("node", f"{shape}: {len(report.findings)} checks, versions and code as here").on(node.name)


def _no_answer(answer: Answer) -> Finding:
    cause: Any = getattr(answer.error, "cause", None) or answer.error
    said = f"{type(cause).__name__}: {str(cause).strip()[-1000:]}"
    if answer.left:
        return fault("node", f"left the cluster before it answered ({said})", advice="ask again when it is back")
    advice = "have the same packages and the same code on it (`ray job submit` ships the code), and see its Ray logs"
    return fault("node", f"could not be examined: {said}", advice=advice)


def shape_of(resources: Mapping[str, float]) -> str:
    """Name what nodes of one type have in common: CPUs, GPUs, the accelerator, and RAM in whole GiB."""
    parts = [f"{resources.get('CPU', 0):g} CPU", f"{resources.get('GPU', 0):g} GPU"]
    parts += sorted(key.partition(":")[2] for key in resources if key.startswith("accelerator_type:"))
    parts += [f"{resources['memory'] / 2**30:.0f} GiB for tasks"] if "memory" in resources else []
    return ", ".join(parts)
