"""Runs packs one after another in this process: for debuggers, tests, and machines without Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from latent_sweep.backbones.architectures import free_memory
from latent_sweep.errors import ConfigError, DeviceLost, LatentSweepError, StoreError
from latent_sweep.execution.engines import engine_of
from latent_sweep.execution.retries import has_failed, journal_lengths, say_lost, still_to_try
from latent_sweep.monitor.progress import MEASURING, ProgressWriter, say_driving
from latent_sweep.storage.failures import failure_kind, let_go
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.sweep.memory import decided
from latent_sweep.sweep.plan import Pack
from latent_sweep.sweep.schema import RunSettings
from latent_sweep.training.events import Begun, StageDone, Step
from latent_sweep.training.pack import run_pack
from latent_sweep.training.packing import best_size, measure, split

log = logging.getLogger(__name__)


def run_here(
    packs: Sequence[Pack], sweep: SweepFolder, run: RunSettings, fail_fast: bool, tell: Callable[[str], None]
) -> None:
    """Run packs to their end; one that fails says so in its trials' journals and does not disturb the others.

    Args:
        fail_fast: end when a trial has failed.
        tell: prints a line.
    """
    if run.resources.workers > 1:
        raise ConfigError(
            f"run.resources.workers: found {run.resources.workers}, but --local runs in this process alone; leave "
            "--local out, or add --set run.resources.workers=1"
        )
    if run.scheduler.name != "fifo":
        tell(f"run.scheduler: {run.scheduler.name} takes Ray; with --local every trial learns all of its tasks")
    if run.pack == "auto":
        say_driving(sweep, MEASURING)
        sizes = [best_size(measure(decided(p, run, free_memory), sweep.storage)) for p in packs]
        packs = [part for p, size in zip(packs, sizes, strict=True) for part in split(p, size, slots=1)]
    launched = journal_lengths(packs, sweep)
    for p in packs:
        with ProgressWriter(sweep, p) as progress:

            def emit(event: Begun | Step | StageDone, progress: ProgressWriter = progress) -> None:
                if not isinstance(event, StageDone):
                    progress.write(event)

            left, tried = still_to_try(p, sweep, launched, run), None
            while left is not None and left != tried:  # tried again as it was, it would fail again
                try:
                    found = decided(left, run, free_memory)
                    run_pack(found, sweep, emit, engine=engine_of(run.engine), keep_answers=run.keep_answers)
                    break
                except LatentSweepError as error:
                    log.error("pack %s failed: %s", p.pack_id, error)
                    if isinstance(error, StoreError):
                        with suppress(StoreError):  # the disk may be too full even for that
                            say_lost(left, sweep, "storage", str(error))
                    let_go(error)
                except Exception as error:
                    log.exception("pack %s failed", p.pack_id)
                    if failure_kind(error) == "device_lost":
                        say_lost(left, sweep, "worker_died", str(error))
                        raise DeviceLost(
                            f"this process has lost its GPU, and CUDA refuses it all further work: {error}\nRun the "
                            "same command again: it goes on where this one ended. If it happens again at the same "
                            "place, run it with CUDA_LAUNCH_BLOCKING=1 to see which operation it is"
                        ) from None
                    let_go(error)  # or the next try would find the backbone and activations of this one in its way
                left, tried = still_to_try(p, sweep, launched, run), left
        if fail_fast and has_failed(p, sweep, launched, run):
            tell("a trial has failed, and the sweep ends here; run it again for the others, or without --fail-fast")
            return
