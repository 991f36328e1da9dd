"""All checks in turn, printed as they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from latent_sweep.backends.addresses import check_ray_address
from latent_sweep.doctor.findings import Check, Finding, counted, examined, fault
from latent_sweep.doctor.machine import chosen_device, has_device, look_at_cpu, look_at_disk, look_at_gpus
from latent_sweep.doctor.methods import method_checks
from latent_sweep.doctor.nodes import look_at_nodes
from latent_sweep.doctor.packages import look_at_imports, look_at_packages
from latent_sweep.doctor.storage import hostname, look_at_caches, look_at_storage
from latent_sweep.doctor.subject import Subject, look_at_first_step, look_at_sweep
from latent_sweep.doctor.tracker import look_at_tracker
from latent_sweep.store.files import cache_folder
from latent_sweep.store.storage import open_storage
from latent_sweep.sweep.config import load_sweep
from latent_sweep.sweep.groups import RunSettings
from latent_sweep.sweep.plan import expand


@dataclass(frozen=True)
class Part:
    """Checks that are printed together."""

    title: str
    checks: Sequence[tuple[str, Check]]
    """Each with a word for what it looks at."""


def examine(
    path: str | None, overrides: Sequence[str], device: str, address: str | None, tell: Callable[[str], None]
) -> bool:
    """Look at this machine, at the cluster where there is one, and at the sweep where one is given.

    Args:
        path: a sweep file.
        overrides: `path=value`, as after `--set`.
        device: `auto`, `cpu` or `cuda`.
        address: of a Ray cluster; None is RAY_ADDRESS, and without that there is none.
        tell: prints a text.

    Returns:
        Whether there is no fault.

    Raises:
        ConfigError: the sweep file is not valid, or the cluster asks for no token.
    """
    began, subject = time.monotonic(), _subject(path, overrides)
    run = subject.sweep.run if subject else RunSettings()
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    check_ray_address(run.allow_insecure)
    tell(f"latent-sweep doctor on {hostname()}")
    found: list[Finding] = []
    for part in _parts(subject, run, device):
        tell(f"\n{part.title}")
        for what, check in part.checks:
            findings = examined(what, check)
            found += findings
            if findings:
                tell("\n".join(finding.text() for finding in findings))
    tell(f"\n{counted(found)} ({time.monotonic() - began:.0f} s)")
    return not any(finding.mark == "fault" for finding in found)


def _subject(path: str | None, overrides: Sequence[str]) -> Subject | None:
    if path is None:
        return None
    sweep = load_sweep(path, overrides)
    return Subject(sweep, expand(sweep), open_storage(sweep.run.storage))


def _parts(subject: Subject | None, run: RunSettings, asked: str) -> Iterator[Part]:
    storage = subject.storage if subject else open_storage(run.storage)
    needed = ["deepspeed"] if run.engine.name == "deepspeed" else []
    yield Part("packages", _packages(needed))
    device = _device(asked)
    yield Part(f"this machine (device {device})", _machine(device, storage.folder))
    yield Part("storage", [("storage", lambda: look_at_storage(storage)), ("caches", look_at_caches)])
    if os.environ.get("RAY_ADDRESS"):
        yield Part("cluster", [("cluster", lambda: look_at_nodes(storage, needed))])
    yield Part("tracker", [("tracker", lambda: look_at_tracker(run.tracking.uri, run.allow_insecure))])
    yield Part(f"methods, on {device}", _methods(device))
    if subject is not None:
        yield Part(f"sweep {subject.sweep.name}", _of_sweep(subject, asked))


def _packages(needed: Sequence[str]) -> list[tuple[str, Check]]:
    """Return the checks of the packages of whatever machine calls them."""
    return [("packages", lambda: look_at_packages(needed)), ("imports", lambda: look_at_imports(needed))]


def _machine(device: str, storage: Path) -> list[tuple[str, Check]]:
    """Return the checks of the machine that calls them."""
    return [
        ("GPU", lambda: look_at_gpus(device)),
        ("CPU", look_at_cpu),
        ("disk", lambda: look_at_disk("storage", storage)),
        ("disk", lambda: look_at_disk("caches", cache_folder())),
    ]


def _device(asked: str) -> str:
    try:
        return chosen_device(asked)
    except Exception:  # torch is missing or broken, as the packages have said
        return "cpu"


def _methods(device: str) -> list[tuple[str, Check]]:
    return method_checks(device) if has_device(device) else [("methods", _no_device)]


def _no_device() -> Iterator[Finding]:
    yield fault("methods", "not tried: there is no GPU", advice="`--device cpu` tries them on the CPU")


def _of_sweep(subject: Subject, asked: str) -> list[tuple[str, Check]]:
    gpus = subject.sweep.run.resources.gpus
    device = subject.trials[0].settings.backbone.device if asked == "auto" else asked
    device = _device(device) if gpus or asked != "auto" else "cpu"  # a trial without a GPU sees none
    return [
        ("sweep", lambda: look_at_sweep(subject)),
        ("first step", lambda: look_at_first_step(subject, device)),
    ]
