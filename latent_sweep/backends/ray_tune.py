"""Ray Tune runs packs wherever there is room. The only importer of ray.

Tune places packs, caps their number, stops configurations early, and starts a pack again whose worker was lost. It
keeps no state of ours: what a restarted pack has to do follows from the store.
"""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latent_sweep.config import ResourceSettings, RunSettings
from latent_sweep.errors import ConfigError
from latent_sweep.plan import Pack
from latent_sweep.tracking import Journal, stages, status

log = logging.getLogger(__name__)


def run_on_ray(packs: Sequence[Pack], storage: Path, sweep_folder: Path, run: RunSettings) -> None:
    """Run packs on the cluster this process belongs to, or on one started here for as long as it takes.

    A pack that fails says so in its trials' journals and does not disturb the others.

    Raises:
        ConfigError: no node of the cluster can ever hold a pack.
    """
    started_here = _connect()
    import ray
    from ray import tune

    try:
        _check_fits(run.resources, started_here)
        if run.pack == "auto":
            packs = _measured(packs, storage, run.resources)
        by_id = {pack.pack_id: pack for pack in packs}
        trainable = tune.with_parameters(
            _run_in_worker, packs=by_id, storage=storage, sweep_folder=sweep_folder, cpus=run.resources.cpus
        )
        tuner = tune.Tuner(
            tune.with_resources(trainable, _placement(run.resources)),
            param_space={"pack_id": tune.grid_search(list(by_id))},
            tune_config=tune.TuneConfig(
                metric="AP",
                mode="max",
                scheduler=_scheduler(run, max(len(pack.tasks) for pack in packs)),
                max_concurrent_trials=run.max_concurrent,
                trial_dirname_creator=lambda trial: trial.config["pack_id"],
                reuse_actors=False,
            ),
            run_config=tune.RunConfig(
                name="ray",
                storage_path=str(sweep_folder.resolve()),
                failure_config=tune.FailureConfig(max_failures=run.max_failures),
                verbose=0,
            ),
        )
        results = tuner.fit()
        for result in results:
            if result.config is not None:
                _close(by_id[result.config["pack_id"]], sweep_folder, result.error)
    finally:
        if started_here:
            ray.shutdown()


def _run_in_worker(
    config: dict[str, Any], packs: dict[str, Pack], storage: Path, sweep_folder: Path, cpus: float
) -> None:
    """One Tune trial: a pack."""
    from ray import tune

    from latent_sweep.progress import ProgressWriter
    from latent_sweep.trial import StageDone, Step, run_pack

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    pack = packs[config["pack_id"]]
    progress = ProgressWriter(sweep_folder, pack)

    def emit(event: Step | StageDone) -> None:
        if isinstance(event, Step):
            progress.write(event)
        else:
            measures = {"AP": event.average_performance, "FM": event.forgetting}
            tune.report({"tasks_seen": event.tasks_seen, **measures})

    try:
        run_pack(pack, storage, sweep_folder, emit, threads=max(1, int(cpus)))
    except Exception:
        # journaled by run_pack. A fault of the trial itself would happen again: only a lost worker, which never gets
        # here, is worth a retry
        log.exception("pack %s failed", pack.pack_id)


def _measured(packs: Sequence[Pack], storage: Path, resources: ResourceSettings) -> list[Pack]:
    """Packs of the size that is fastest where they will run, as far as there are slots for no more of them."""
    import ray

    from latent_sweep.packing import best_size, measure, split

    options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": 0}
    if resources.accelerator:
        options["accelerator_type"] = resources.accelerator
    threads = max(1, int(resources.cpus))
    remote = ray.remote(measure).options(**options)
    timings = ray.get([remote.remote(pack, storage, threads) for pack in packs])
    have = ray.cluster_resources()
    slots = have.get("CPU", 0) // resources.cpus
    if resources.gpus:
        slots = min(slots, have.get("GPU", 0) // resources.gpus)
    return [part for p, found in zip(packs, timings, strict=True) for part in split(p, best_size(found), int(slots))]


def _connect() -> bool:
    """Join the cluster that RAY_ADDRESS names (a job inherits it), or start one here; whether it was started here.

    A cluster of our own listens on the loopback interface only and asks for a token that this process made up.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Tune's own result files and tables say nothing that the journal does not
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    # without a GPU asked for, a trial must see none
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # Tune would catch Ctrl-C and return as if all had ended, and an interrupted trial would look stopped early
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    here = "RAY_ADDRESS" not in os.environ
    if here:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on Linux too: every socket on 127.0.0.1
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import ray

        if ray.is_initialized():
            return False
        ray.init(
            address="local" if here else None,
            include_dashboard=False if here else None,
            logging_level=logging.ERROR,
            log_to_driver=True,
        )
    return here


def _placement(resources: ResourceSettings) -> Any:
    from ray import tune

    bundle: dict[str, float] = {"CPU": resources.cpus, "GPU": resources.gpus}
    if resources.accelerator:
        bundle[f"accelerator_type:{resources.accelerator}"] = 0.001
    return tune.PlacementGroupFactory([bundle])


def _check_fits(resources: ResourceSettings, started_here: bool) -> None:
    """Say at once that a pack cannot be placed here, or, on a cluster that may grow, what it is waiting for."""
    import ray

    accelerator = f"accelerator_type:{resources.accelerator}" if resources.accelerator else None
    fits = any(
        node["Alive"]
        and node["Resources"].get("CPU", 0) >= resources.cpus
        and node["Resources"].get("GPU", 0) >= resources.gpus
        and (accelerator is None or accelerator in node["Resources"])
        for node in ray.nodes()
    )
    if fits:
        return
    total = ray.cluster_resources()
    wanted = f"{resources.cpus:g} CPU and {resources.gpus:g} GPU" + (
        f" ({resources.accelerator})" if accelerator else ""
    )
    have = f"{total.get('CPU', 0):g} CPU and {total.get('GPU', 0):g} GPU"
    message = f"run.resources: a trial asks for {wanted} on one node; the cluster has {have}"
    if started_here:
        raise ConfigError(
            f"{message}. Ask for less, e.g. --set run.resources.gpus=0, or submit to a cluster that has them"
        )
    log.warning("%s. Waiting for a node to join; if the cluster does not scale up, ask for less", message)


def _scheduler(run: RunSettings, n_tasks: int) -> Any:
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    if run.scheduler.name == "fifo":
        return FIFOScheduler()
    # one more than there are tasks: at max_t Tune stops a trial inside its last report
    return ASHAScheduler(
        time_attr="tasks_seen",
        max_t=n_tasks + 1,
        grace_period=min(run.scheduler.grace_tasks, n_tasks),
        reduction_factor=run.scheduler.reduction_factor,
    )


def _close(pack: Pack, sweep_folder: Path, error: Exception | None) -> None:
    """Say in the journals what only Tune knows: a trial was stopped early, or its worker was lost too often."""
    for trial in pack.trials:
        journal = Journal(sweep_folder / "trials" / trial.trial_id / "journal.jsonl")
        events = journal.read()
        if status(events) not in ("running", "pending"):
            continue
        seen = len(stages(events))
        if error is None and events:
            journal.append("stopped", tasks_seen=seen, reason="stopped early by the scheduler: others had a higher AP")
        else:
            message = "the worker was lost more often than run.max_failures allows" if error is None else str(error)
            journal.append("failed", kind="lost", message=message[-2000:], task=None, step=None)
