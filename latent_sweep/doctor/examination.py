"""All checks in turn, printed as they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from latent_sweep.doctor.findings import Check, Finding, counted, examined, fault
from latent_sweep.doctor.machine import check_cpu, check_disk, check_gpus, chosen_device, has_device
from latent_sweep.doctor.methods import method_checks
from latent_sweep.doctor.nodes import check_nodes, check_resources
from latent_sweep.doctor.packages import check_imports, check_packages
from latent_sweep.doctor.storage import check_caches, check_storage, hostname
from latent_sweep.doctor.subject import Subject, check_first_step, check_plan
from latent_sweep.doctor.tracker import check_tracker
from latent_sweep.errors import LatentSweepError
from latent_sweep.storage.files import cache_folder
from latent_sweep.storage.storage import Storage, default_place, open_storage
from latent_sweep.sweep.config import Sweep
from latent_sweep.sweep.plan import Trial
from latent_sweep.sweep.planning import plan_sweep
from latent_sweep.sweep.schema import RunSettings
from latent_sweep.tracking.addresses import ray_address


@dataclass(frozen=True)
class Part:
    """Checks that are printed together."""

    title: str
    checks: Sequence[tuple[str, Check]]
    """Each with a word for what it looks at."""
    in_turn: bool = False
    """Whether each needs those before it: a fault ends them, as it would be found again."""


def examine(
    path: str | None, overrides: Sequence[str], device: str, address: str | None, tell: Callable[[str], None]
) -> list[Finding]:
    """Look at this machine, at the cluster where there is one, and at the sweep where one is given.

    Args:
        path: a sweep file.
        overrides: `path=value`, as after `--set`.
        device: `auto`, `cpu` or `cuda`.
        address: of a Ray cluster; None is RAY_ADDRESS, and without that there is none.
        tell: prints a text.

    Returns:
        All findings.

    Raises:
        ConfigError: the sweep file is not valid, or LATENT_SWEEP_STORAGE can name no storage.
    """
    began, read = time.monotonic(), _read(path, overrides)
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    tell(f"latent-sweep doctor on {hostname()}")
    found: list[Finding] = []
    for part in _parts(read, device):
        tell(f"\n{part.title}")
        for what, check in part.checks:
            findings = examined(what, check)
            found += findings
            if findings:
                tell("\n".join(finding.text() for finding in findings))
            if part.in_turn and any(finding.mark == "fault" for finding in findings):
                break
    tell(f"\n{counted(found)} ({time.monotonic() - began:.0f} s)")
    return found


def _read(path: str | None, overrides: Sequence[str]) -> tuple[Sweep, Sequence[Trial]] | None:
    if path is None:
        return None
    plan = plan_sweep(path, overrides, check=False)
    return plan.sweep, plan.trials


def _parts(read: tuple[Sweep, Sequence[Trial]] | None, asked: str) -> Iterator[Part]:
    run = read[0].run if read else RunSettings(storage=default_place())
    needed = ["deepspeed"] if run.engine.name == "deepspeed" else []
    yield Part("packages", _packages(needed))
    device, storage = _device(asked), _opened(run.storage)
    alone = read is not None and ray_address() is None  # then `run` has this machine, and no other
    room = [("resources", partial(check_resources, run.resources))] if alone else []
    yield Part(f"this machine (device {device})", [*_machine(device, storage), *room])
    yield Part("storage", [("storage", partial(_storage, run.storage)), ("caches", check_caches)])
    if storage is not None and ray_address() is not None:
        asked_for = (storage, needed, run.allow_insecure, run.resources)
        yield Part("cluster", [("cluster", partial(check_nodes, *asked_for))])
    yield Part("tracker", [("tracker", partial(check_tracker, run.tracking.uri, run.allow_insecure, read is not None))])
    yield Part(f"methods, on {device}", _methods(device))
    if read is not None and storage is not None:
        yield Part(f"sweep {read[0].name}", _of_sweep(Subject(*read, storage), asked), in_turn=True)


def _opened(place: str) -> Storage | None:
    try:
        return open_storage(place)
    except LatentSweepError:  # the check of the storage says so
        return None


def _storage(place: str) -> Iterator[Finding]:
    yield from check_storage(open_storage(place))


def _packages(needed: Sequence[str]) -> list[tuple[str, Check]]:
    return [("packages", partial(check_packages, needed)), ("imports", partial(check_imports, needed))]


def _machine(device: str, storage: Storage | None) -> list[tuple[str, Check]]:
    folders = {"caches": cache_folder()} | ({"storage": storage.folder} if storage else {})
    disks = [("disk", partial(check_disk, what, folder)) for what, folder in folders.items()]
    return [("GPU", partial(check_gpus, device)), ("CPU", check_cpu), *disks]


def _device(asked: str) -> str:
    try:
        return chosen_device(asked)
    except Exception:  # torch is missing or broken, as the packages have said
        return "cpu"


def _methods(device: str) -> list[tuple[str, Check]]:
    try:
        there = has_device(device)
    except Exception:  # as above
        there = True
    return method_checks(device) if there else [("methods", _no_device)]


def _no_device() -> Iterator[Finding]:
    yield fault("methods", "not tried: there is no GPU", advice="`--device cpu` tries them on the CPU")


def _of_sweep(subject: Subject, asked: str) -> list[tuple[str, Check]]:
    gpus = subject.sweep.run.resources.gpus
    device = subject.trials[0].settings.backbone.device if asked == "auto" else asked
    device = _device(device) if gpus or asked != "auto" else "cpu"  # a trial without a GPU sees none
    return [
        ("sweep", lambda: check_plan(subject)),
        ("first step", lambda: check_first_step(subject, device)),
    ]
