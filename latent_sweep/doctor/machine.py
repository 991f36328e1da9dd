"""What this machine computes with: GPUs as torch sees them, cores, memory, disk, and what limits a container sets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from latent_sweep.doctor.findings import Finding, fault, ok, warning
from latent_sweep.sweep.memory import GIB, RESERVE

LEAST_RAM = 2 * GIB
"""Free memory below which even the embedded backbone may not load."""
LEAST_DISK = 5 * GIB
"""Free disk below which a sweep's snapshots and caches are soon in the way."""
OLDEST_BFLOAT16 = (8, 0)
"""Compute capability from which tensor cores compute in bfloat16; older cards imitate it, slowly."""

CGROUP = Path("/sys/fs/cgroup")
DRIVER = Path("/proc/driver/nvidia/version")
NO_LIMIT = 1 << 60
"""What a cgroup of the first version says where there is no limit is about 2^63."""


def chosen_device(asked: str) -> str:
    """Return `cpu` or `cuda` for what was asked for; `auto` is the GPU where there is one."""
    import torch

    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def has_device(device: str) -> bool:
    """Whether torch can compute there."""
    import torch

    return device != "cuda" or torch.cuda.is_available()


# --- GPUs ------------------------------------------------------------------------------------------------------------


def check_gpus(device: str) -> Iterator[Finding]:
    """Find the GPUs that torch sees, and have each compute something; that there are none is a fault for `cuda`."""
    import torch

    if not torch.cuda.is_available():
        if device == "cuda":
            yield fault("GPU", f"torch sees none: {why_no_gpu()}", "one, for --device cuda", no_gpu_advice())
        else:
            yield ok("GPU", f"none ({why_no_gpu()}); everything is computed on the CPU")
        return
    if driver := _driver_version():
        yield ok("driver", f"NVIDIA {driver}, torch is built for CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)


def _gpu(index: int) -> Iterator[Finding]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability, what = (properties.major, properties.minor), f"GPU {index}"
    free, total = torch.cuda.mem_get_info(index)
    said = f"{properties.name}, {_gib(free)} of {_gib(total)} free, compute capability {capability[0]}.{capability[1]}"
    said += f", bf16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
    x = torch.ones(64, 64, device=f"cuda:{index}")
    if float((x @ x).sum()) != 64.0**3:
        yield fault(what, f"{said}; a product of two matrices comes out wrong", advice="take the card out of use")
    elif capability < OLDEST_BFLOAT16:
        advice = "use backbone.dtype: float32, or a newer card"
        yield warning(what, said, "capability 8.0 or more, which computes in bfloat16", advice)
    elif free < RESERVE:
        yield warning(what, said, f"{_gib(RESERVE)} free for CUDA alone", "end what else computes there (`nvidia-smi`)")
    else:
        yield ok(what, said)


def why_no_gpu() -> str:
    """Say what most likely keeps torch from seeing a GPU."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs"
    if not DRIVER.exists() and shutil.which("nvidia-smi") is None:
        return "there is no NVIDIA driver here"
    supported = _driver_cuda()
    if supported and supported < _version(torch.version.cuda):
        return f"the driver knows CUDA {supported[0]}.{supported[1]}, torch is built for {torch.version.cuda}"
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible} names none that is here"
    return f"the driver {_driver_version() or 'of an unknown version'} shows none"


def no_gpu_advice() -> str:
    """Say what to do about it."""
    import torch

    if torch.version.cuda is None:
        return "install a CUDA build: `make clean setup TORCH=...`, as the README says, or use --device cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return "`unset CUDA_VISIBLE_DEVICES`, or have the scheduler give this process a GPU"
    return (
        "see what `nvidia-smi` says here; in a container, start it with its GPUs (`--gpus all`); with a driver that is "
        "too old, update it or install a torch that is built for its CUDA version (`make clean setup TORCH=...`)"
    )


def _driver_cuda() -> tuple[int, int] | None:
    """The CUDA version that the driver knows, where torch can ask it."""
    import torch

    try:
        number = int(torch._C._cuda_getDriverVersion())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None
    return (number // 1000, number % 1000 // 10) if number else None


def _driver_version() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


# --- cores and memory ------------------------------------------------------------------------------------------------


def check_cpu() -> Iterator[Finding]:
    """Find cores and memory, and what a container may have of them."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup_cpus()
    said = f"{os.cpu_count()} cores, {cores} for this process, torch uses {torch.get_num_threads()} threads"
    if limit is not None:
        said += f", a cgroup allows {limit:.3g}"
    if limit is not None and torch.get_num_threads() > max(1.0, limit):
        advice = (
            f"set OMP_NUM_THREADS={max(1, int(limit))} and run.resources.cpus to no more: threads wait for each other"
        )
        yield warning("CPU", said, "no more threads than the cgroup allows", advice)
    else:
        yield ok("CPU", said)
    yield _ram()


def _ram() -> Finding:
    found = memory()
    if found is None:
        return warning("RAM", "not known: this system has no /proc/meminfo", advice="see that there are some GiB")
    said = f"{_gib(found[0])} of {_gib(found[1])} free"
    room, used = cgroup_memory()
    if room is not None:
        said += f", a cgroup allows {_gib(room)}, of which {_gib(room - used)} are free"
    free = free_ram()
    if free is not None and free < LEAST_RAM:
        return warning(
            "RAM", said, f"{_gib(LEAST_RAM)} free", "end what else runs here, or raise the container's limit"
        )
    return ok("RAM", said)


def free_ram() -> int | None:
    """Return the bytes of RAM that may still be taken, of the machine or of a container's share; None if not known."""
    found, (room, used) = memory(), cgroup_memory()
    if found is None:
        return None
    return found[0] if room is None else min(found[0], room - used)


def memory() -> tuple[int, int] | None:
    """Return free and all bytes of RAM; None where the system does not say so in the way of Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return sizes["MemAvailable"], sizes["MemTotal"]


def cgroup_cpus() -> float | None:
    """Return how many cores the cgroup allows; None without a limit."""
    quota, period = ([*_read("cpu.max").split(), "", ""])[:2]
    if not quota:
        quota, period = _read("cpu/cpu.cfs_quota_us"), _read("cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def cgroup_memory() -> tuple[int | None, int]:
    """Return the bytes that the cgroup allows, None without a limit, and those in use that cannot be reclaimed."""
    room = _read("memory.max") or _read("memory/memory.limit_in_bytes")
    if not room.isdecimal() or int(room) >= NO_LIMIT:
        return None, 0
    used = _read("memory.current") or _read("memory/memory.usage_in_bytes")
    stat = dict(line.split()[:2] for line in (_read("memory.stat") or _read("memory/memory.stat")).splitlines())
    files = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
    return int(room), max(0, int(used or 0) - files)


def _read(name: str) -> str:
    try:
        return (CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""


# --- disk ------------------------------------------------------------------------------------------------------------


def check_disk(what: str, folder: Path) -> Iterator[Finding]:
    """Find how much is free where a folder is, or will be."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_DISK:
        advice = "free some, or put it elsewhere: run.storage for results, LATENT_SWEEP_CACHE for backbones"
        yield warning("disk", f"{_gib(free)} free for {what} ({folder})", f"{_gib(LEAST_DISK)} or more", advice)
    else:
        yield ok("disk", f"{_gib(free)} free for {what} ({folder})")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
