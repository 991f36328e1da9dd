"""A trial in its own Ray process, or in several Ray workers together, placed all at once in its placement group.

The trial's process then starts them, passes on what the first of them reports, and ends them all when one is lost or
fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from latent_sweep.security import log_without_secrets
from latent_sweep.storage.failures import failure_kind
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.sweep.plan import Pack
from latent_sweep.sweep.schema import ResourceSettings, RunSettings
from latent_sweep.training.memory_housekeeping import loading_modules
from latent_sweep.training.worker_group import ALONE, WorkerGroup, join, listen

POLL_SECONDS = 0.5
CONTEXT = 3 * 2**28
"""Bytes of a GPU that a process takes beside torch's allocator: kernels that it has loaded, handles of libraries."""
PATIENCE_SECONDS = 20.0
"""How long to look for the cause when a worker says no more than that another one is gone."""

Measures = dict[str, float]


def keep_to_share(resources: ResourceSettings) -> None:
    """Have this process see no GPU where it asked for none, and take no more of a GPU's memory than it asked for.

    Called before anything asks CUDA what there is. Ray leaves a worker without a GPU all that its node has, and counts
    shares of one without holding anybody to them.
    """
    if resources.gpus == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif resources.gpus < 1:
        import torch

        if torch.cuda.is_available():
            # torch keeps what it hands out to that, and not what CUDA takes for itself in every process
            own = CONTEXT / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(max(resources.gpus - own, resources.gpus / 2))


def run_part(
    pack: Pack,
    sweep: SweepFolder,
    run: RunSettings,
    report: Callable[[Measures], None],
    group: WorkerGroup = ALONE,
) -> None:
    """Run a pack in this process, alone or with the others of its group; `report` gets the measures of every stage."""
    from latent_sweep.monitor.progress import ProgressWriter
    from latent_sweep.training.events import Begun, StageDone, Step

    progress = ProgressWriter(sweep, pack, group.size)
    with progress if group.leads else nullcontext():
        if group.leads:
            progress.write(Begun("starting"))

        # not at the top: who only watches a group needs no torch; nor before that was said: loading it takes seconds
        with loading_modules():
            from latent_sweep.backbones.architectures import free_memory
            from latent_sweep.execution.engines import engine_of
            from latent_sweep.sweep.memory import decided
            from latent_sweep.training.pack import run_pack

        def emit(event: Begun | Step | StageDone) -> None:
            if isinstance(event, StageDone):
                report(event.measures())
            else:
                progress.write(event)

        engine = engine_of(run.engine, group)
        pack = decided(pack, run, lambda backbone: group.first(partial(free_memory, backbone)))
        run_pack(pack, sweep, emit, max(1, int(run.resources.cpus)), engine, run.keep_answers)


def lost_errors() -> tuple[type[Exception], ...]:
    """Ray's errors that tell of a lost worker; that of the host's memory killer is no `RayActorError`."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    return RayActorError, OutOfMemoryError


def run_group(pack: Pack, sweep: SweepFolder, run: RunSettings, report: Callable[[Measures], None]) -> None:
    """Run a pack with `run.resources.workers` workers; `report` gets the measures of every stage.

    Raises:
        ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError: a worker was lost.
        ray.exceptions.RayTaskError: a worker failed; it holds that worker's traceback.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources, placement = run.resources, ray.util.get_current_placement_group()
    worker = ray.remote(_Worker)
    workers = [
        worker.options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            max_concurrency=2,  # a worker that computes still answers for its reports
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank),
        ).remote(rank, resources.workers)
        for rank in range(resources.workers)
    ]
    try:
        meeting = ray.get(workers[0].listen.remote())
        ends = [each.run.remote(*meeting, pack, sweep, run) for each in workers]
        seen, going = 0, list(ends)
        while going:
            ended, going = ray.wait(going, timeout=POLL_SECONDS)
            try:
                for measures in ray.get(workers[0].reports.remote(seen)):
                    seen += 1
                    report(measures)
                ray.get(ended)
            except ray.exceptions.RayError as error:
                raise _cause(ends, error) from None
    finally:
        for each in workers:
            ray.kill(each)


def _cause(ends: Sequence[Any], first: Exception) -> Exception:
    """Find what ended the group: a worker that is lost before one that failed, and neither a connection that broke."""
    import ray

    deadline, errors = time.monotonic() + PATIENCE_SECONDS, [first]
    while time.monotonic() < deadline:
        for end in ray.wait(list(ends), num_returns=len(ends), timeout=POLL_SECONDS)[0]:
            try:
                ray.get(end)
            except ray.exceptions.RayError as error:
                errors.append(error)
        lost = [error for error in errors if isinstance(error, lost_errors())]
        own = [error for error in errors if not _tells_of_another(error)]
        if lost or own:
            return (lost or own)[0]
    return first


def _tells_of_another(error: Exception) -> bool:
    """Whether the worker only noticed that another one is gone."""
    text = str(error)
    return failure_kind(error) == "error" and any(
        mark in text for mark in ("gloo", "NCCL", "DistNetworkError", "DistBackendError")
    )


class _Worker:
    """One worker of a group, in a process of its own."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._reports: list[Measures] = []
        self._listening: Any = None

    def listen(self) -> tuple[str, int]:
        """Open the address where the workers meet: one of this node, with a free port."""
        import ray

        host = ray.util.get_node_ip_address()
        self._listening = listen(host)
        return host, self._listening.getsockname()[1]

    def reports(self, seen: int) -> list[Measures]:
        """The measures of the stages after the first `seen`."""
        return self._reports[seen:]

    def run(self, host: str, port: int, pack: Pack, sweep: SweepFolder, run: RunSettings) -> None:
        """Do this worker's part of the pack."""
        log_without_secrets()
        keep_to_share(run.resources)
        group = join(self._rank, self._size, host, port, self._listening)
        run_part(pack, sweep, run, self._reports.append, group)
