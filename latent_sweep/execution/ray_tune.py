"""Ray Tune runs packs wherever there is room. With `ray_group` and `ray_nodes`, the only importer of ray.

Tune places packs, caps their number, stops configurations early, and starts a pack again whose worker was lost. It
keeps no state of ours: what a restarted pack has to do follows from the store. So it gets packs one by one, as there is
room, and forgets those that have ended: what a pack costs does not depend on how many there are.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from latent_sweep.errors import ConfigError, LatentSweepError, StoreError
from latent_sweep.execution.ray_nodes import check_every_node_sees, connect
from latent_sweep.execution.retries import LossKind, has_failed, journal_lengths, say_lost, still_to_try, unfinished
from latent_sweep.monitor.progress import MEASURING, say_driving
from latent_sweep.security import log_without_secrets, redact, redact_error, traceback_text
from latent_sweep.storage.failures import failure_facts, failure_kind, let_go
from latent_sweep.storage.folders import TUNES_OWN, SweepFolder
from latent_sweep.storage.journal import stages
from latent_sweep.storage.storage import Storage, question, sees, unseen_message
from latent_sweep.sweep.plan import Pack
from latent_sweep.sweep.schema import ResourceSettings, RunSettings
from latent_sweep.training.memory_housekeeping import loading_modules

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""How often to look whether trials that wait can be placed at all."""
TELL_SECONDS = 60.0
"""How often to say what they wait for."""
LETTING_GO_SECONDS = "60"
"""How long the next pack waits for the one that a scheduler has stopped in its process, which gives back its leases.
Tune's own two seconds are too few for an object store, and it gives up the next pack then."""
FAILED_SECONDS = 1.0
"""How often to look whether a trial has failed, where that ends the sweep."""

TUNE: Mapping[str, str] = {
    "TUNE_GLOBAL_CHECKPOINT_S": "inf",  # nobody restores a run of Tune: the store knows what is done
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # five files for each pack, of what its journals tell
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # what nobody judges reports nothing
}
"""Tune's settings that it takes from the environment alone; what a user has set there stays."""
WAITING = 200
"""Packs that wait for room at the same time, or a tenth more than there are CPUs: as many as Tune lets of a grid, so
that a cluster that grows sees what is asked of it."""


def run_on_ray(packs: Sequence[Pack], sweep: SweepFolder, run: RunSettings, fail_fast: bool = False) -> None:
    """Run packs on the cluster this process belongs to, or on one started here for as long as it takes.

    A pack that fails says so in its trials' journals and does not disturb the others.

    Raises:
        ConfigError: no node of the cluster can ever hold a pack, or a node does not see the storage.
    """
    say_driving(sweep, "starting Ray")
    started_here = connect()
    import ray
    from ray import tune

    storage, asking = sweep.storage, ExitStack()
    try:
        _check_fits(run.resources, started_here)
        say_driving(sweep, "asking every node whether it sees the storage")
        asked = asking.enter_context(question(storage))
        check_every_node_sees(storage, asked)
        if run.pack == "auto":
            say_driving(sweep, MEASURING)
            packs = _measured(packs, storage, run)
        by_id = {pack.pack_id: pack for pack in packs}
        stopper = _failure_stopper(sweep, run) if fail_fast else None
        ended: dict[str, Exception | None] = {}
        stopped: set[str] = set()
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(_run_in_worker, sweep=sweep, asked=asked, run=run), _placement(run.resources)
            ),
            tune_config=tune.TuneConfig(
                metric="AP",
                mode="max",
                search_alg=_stream(packs, sweep),
                num_samples=len(packs),
                scheduler=_scheduler(run, max(len(pack.tasks) for pack in packs), stopped.add),
                max_concurrent_trials=run.max_concurrent,
                trial_dirname_creator=lambda trial: trial.config["pack_id"],
                reuse_actors=True,  # a worker that goes on to its next pack has its backbone loaded already
            ),
            run_config=tune.RunConfig(
                name=TUNES_OWN,
                storage_path=str(sweep.path),
                failure_config=tune.FailureConfig(max_failures=-1),  # the worker decides, from its trials' journals
                stop=stopper if fail_fast else None,
                verbose=0,
            ),
        )
        say_driving(sweep, "waiting for workers")
        _take_killed_for_lost()
        callbacks = [_placement_watch(run.resources), _loss_recorder(sweep, run), *([stopper] if fail_fast else [])]
        _control_otherwise(callbacks, lambda trial: ended.update({trial.config["pack_id"]: _end_of(trial)}))
        for name, value in {**TUNE, "TUNE_MAX_PENDING_TRIALS_PG": _waiting()}.items():
            os.environ.setdefault(name, value)
        try:
            _fit(tuner)
        finally:  # what the scheduler has decided stands, however the others end: the next run begins no such pack
            storage.pull(sweep.path)
            for pack_id in stopped:
                _close(by_id[pack_id], sweep, None)
        if stopper is not None and stopper.stopped:
            log.warning("a trial has failed, and the sweep ends here; run it again for the others")
            return
        for pack_id, error in ended.items():
            _close(by_id[pack_id], sweep, error)
    finally:
        asking.close()
        if started_here:
            ray.shutdown()


def _take_killed_for_lost() -> None:
    """Make Tune take a worker that the host's memory killer has ended for one that was lost.

    Ray tells of it by an error that Tune (2.60, 2.61) does not know, and that ends the whole run.
    """
    from ray.air.execution._internal import actor_manager
    from ray.tune.execution import tune_controller

    from latent_sweep.execution.ray_workers import lost_errors

    for module in (actor_manager, tune_controller):
        module.RayActorError = lost_errors()


def _control_otherwise(callbacks: Sequence[Any], tell: Callable[[Any], None]) -> None:
    """Change some habits of Tune's controller (2.60, 2.61).

    Callbacks that come to it through Tune are counted on the way, for Ray's statistics of usage, even where those are
    off, and all of MLflow is imported for that: ours do not come that way. Tune's own that prints what each trial has
    reported last, nothing or what journals tell, is left out. At each step it walks through all trials that it knows:
    now it forgets those that have ended. And it gives a worker whose trial has ended the next trial in the queue, even
    if that trial's own worker is starting, which it then ends: where trials take less time than a worker to start, a
    node that joins would never have one.

    Args:
        callbacks: what it calls before the others that Tune adds.
        tell: gets each trial that has ended; of one that it could not even begin Tune tells no callback.
    """
    from ray.tune import tune
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.progress_reporter import TrialProgressCallback

    class Controller(TuneController):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            others = [each for each in options["callbacks"] if not isinstance(each, TrialProgressCallback)]
            super().__init__(*arguments, **{**options, "callbacks": [*callbacks, *others]})

        def step(self) -> None:
            super().step()
            if ended := self._stopped_trials | self._failed_trials:
                self._trials: list[Any] = [trial for trial in self._trials if trial not in ended]
                for trial in ended:
                    tell(trial)
                    self._trial_metadata.pop(trial.trial_id, None)
                for known in (self._live_trials, self._trials_to_cache, self._stopped_trials, self._failed_trials):
                    known.difference_update(ended)

        def _maybe_reuse_cached_actor(self, trial: Any) -> bool:
            if self._trial_to_actor.get(trial) in self._actor_manager.live_actors:
                # of the trials that no node has room for, the first in the queue: all ask for the same
                pending = (self._actor_to_trial.get(actor) for actor in self._actor_manager.pending_actors)
                trial = next(filter(None, pending), trial)
            reused: bool = super()._maybe_reuse_cached_actor(trial)
            return reused

    tune.TuneController = Controller


def _stream(packs: Sequence[Pack], sweep: SweepFolder) -> Any:
    """A searcher of Tune that gives one pack after the other: an object of Ray with the pack and its journals' lengths.

    Each worker gets its own pack alone, and who asks for it again, in the driver, finds it there.
    """
    import ray
    from ray.tune.search import Searcher

    class Stream(Searcher):
        def __init__(self) -> None:
            super().__init__()
            self.left = iter(packs)

        def suggest(self, trial_id: str) -> Any:
            pack = next(self.left, None)
            if pack is None:
                return Searcher.FINISHED
            return {"pack_id": pack.pack_id, "work": ray.put((pack, journal_lengths([pack], sweep)))}

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            pass

        def save_to_dir(self, checkpoint_dir: str, session_str: str = "") -> None:
            pass  # it holds what is left to do, and the store tells that

    return Stream()


def _waiting() -> str:
    """The number of packs that may wait for room, for Tune's environment."""
    import ray

    return str(max(WAITING, int(1.1 * ray.cluster_resources().get("CPU", 0))))


def _work(trial: Any) -> tuple[Pack, Mapping[str, int]]:
    """What a trial of Tune is to do: a pack, and the length of its trials' journals before it was handed out."""
    import ray

    return ray.get(trial.config["work"])


def _fit(tuner: Any) -> None:
    """Run the tuner; a fault of ours that Tune has wrapped is raised as it was."""
    try:
        tuner.fit()
    except Exception as error:
        ours: BaseException | None = error
        while ours is not None and not isinstance(ours, LatentSweepError):
            ours = ours.__cause__ or ours.__context__
        if ours is None:
            raise
        raise ours from None


def _run_in_worker(config: dict[str, Any], sweep: SweepFolder, asked: str, run: RunSettings) -> None:
    """Run one Tune trial: a pack, or what is left of it to be tried again."""
    import ray
    from ray import tune

    # who stops trials early judges them by what they report, and nobody else asks: each report costs the driver
    # milliseconds, and a worker waits for its answer
    report = tune.report if run.scheduler.name == "asha" else _report_nothing
    os.environ.setdefault("TUNE_FUNCTION_THREAD_TIMEOUT_S", LETTING_GO_SECONDS)
    pack, launched = ray.get(config["work"])
    _run_work(pack, launched, sweep, asked, run, report)


def _report_nothing(measures: Mapping[str, float]) -> None:
    pass


def _run_work(
    pack: Pack,
    launched: Mapping[str, int],
    sweep: SweepFolder,
    asked: str,
    run: RunSettings,
    report: Callable[[dict[str, float]], None],
) -> None:
    """Run what is left of a pack in this process, or with a group of workers."""
    from latent_sweep.execution.ray_workers import keep_to_share, lost_errors, run_group, run_part

    log_without_secrets()
    keep_to_share(run.resources)
    storage = sweep.storage
    if not sees(storage, asked):  # a node that has joined since the start
        raise ConfigError(unseen_message(storage, [socket.gethostname()]))
    _bring_journals(pack, sweep)
    left = still_to_try(pack, sweep, launched, run)
    if left is None:
        return
    run_here = run_group if run.resources.workers > 1 else run_part
    try:
        run_here(left, sweep, run, report)
    except Exception as error:
        if isinstance(error, (*lost_errors(), StoreError)) or failure_kind(error) == "device_lost":
            redact_error(error)  # Ray prints it
            raise  # a worker or its GPU was lost, or its storage is full or away: worth another try, in a new process
        log.exception("pack %s failed", left.pack_id)  # and run_pack has said so in the journals
        if run.resources.workers > 1:  # it may have been another worker than the one that writes
            _bring_journals(left, sweep)
            _journal_failure(left, sweep, failure_facts(error))
        let_go(error)  # or the next pack of this process would find the backbone and activations of this one in its way
        if still_to_try(left, sweep, launched, run) is not None:
            redact_error(error)
            raise


def _bring_journals(pack: Pack, sweep: SweepFolder) -> None:
    """Have the journals of a pack's trials here as they are where all nodes read them."""
    for trial in pack.trials:
        sweep.storage.bring_journal(sweep.journal(trial.trial_id).path)


def _pull_trials(pack: Pack, sweep: SweepFolder) -> None:
    """Have all files of a pack's trials here: who has a journal alone takes its end for one that was brought whole."""
    for trial in pack.trials:
        sweep.storage.pull(sweep.journal(trial.trial_id).path.parent)


def _failure_stopper(sweep: SweepFolder, run: RunSettings) -> Any:
    """A Tune stopper, and callback, that ends the sweep when a trial has failed for good."""
    from ray.tune import Callback, Stopper

    class FailureStopper(Callback, Stopper):
        looked, stopped = 0.0, False

        def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return self.stopped

        def on_step_end(self, iteration: int, trials: Sequence[Any], **info: Any) -> None:
            if not self.stopped and time.monotonic() - self.looked > FAILED_SECONDS:
                self.looked = time.monotonic()
                self.look(*(trial for trial in trials if trial.status == "RUNNING"))

        def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
            _pull_trials(_work(trial)[0], sweep)  # it is not among those that run any more
            self.look(trial)

        def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
            self.on_trial_complete(iteration, trials, trial)

        def look(self, *trials: Any) -> None:
            """Stop where one of these packs has failed."""
            work = map(_work, trials)
            self.stopped = self.stopped or any(has_failed(pack, sweep, launched, run) for pack, launched in work)

    return FailureStopper()


def _loss_recorder(sweep: SweepFolder, run: RunSettings) -> Any:
    """A Tune callback that says in the journals why a worker was lost, before its trials are tried again."""
    from ray.tune import Callback

    class LossRecorder(Callback):
        def on_trial_recover(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
            error = _error_of(trial)
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ConfigError):
                raise cause  # it holds for every trial
            pack, launched = _work(trial)
            _pull_trials(pack, sweep)
            say_lost(pack, sweep, _loss_kind(cause), str(cause or "it ended, and Ray does not say why"))
            if still_to_try(pack, sweep, launched, run) is None:
                trial.max_failures = 0  # a worker that cannot even begin would be started for ever

    return LossRecorder()


def _error_of(trial: Any) -> Exception | None:
    """Read the error that ended a Tune trial's worker. Tune's own `get_error` looks where it is copied to later."""
    from ray import cloudpickle

    path = trial.pickled_error_file
    return cloudpickle.loads(Path(path).read_bytes()) if path and Path(path).is_file() else None


def _end_of(trial: Any) -> Exception | None:
    """Return what ended a Tune trial before its end; None where nothing did, or a scheduler has stopped it."""
    if trial.status != "ERROR":
        return None
    text = Path(trial.error_file) if trial.error_file else None
    return _error_of(trial) or RuntimeError(text.read_text(encoding="utf-8") if text else "Ray Tune does not say why")


def _loss_kind(cause: Exception | None) -> LossKind:
    """Tell why a worker was lost, from Ray's error."""
    from ray.exceptions import ActorUnavailableError

    text = str(cause)
    if isinstance(cause, StoreError):
        return "storage"
    if getattr(cause, "preempted", False):
        return "preempted"
    if isinstance(cause, ActorUnavailableError):  # of a worker's own death its node would have told
        return "node_lost"
    if "node has died" in text or "node was terminated" in text or "NodeDiedError" in text:
        return "node_lost"
    if "OutOfMemory" in text or "low on memory" in text or "memory pressure" in text:  # Ray's, of the host
        return "out_of_memory"
    return "worker_died"


def _measured(packs: Sequence[Pack], storage: Storage, run: RunSettings) -> list[Pack]:
    """Split packs to the size that is fastest where they will run, as far as there are slots for no more of them."""
    import ray

    from latent_sweep.training.packing import best_size, split

    resources = run.resources
    options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_retries": 0}
    if resources.accelerator:
        options["accelerator_type"] = resources.accelerator
    # given here and not by `options`: so a process that has used a GPU ends with its task, and keeps none of its memory
    remote = ray.remote(**options)(_measure_there)
    timings = ray.get([remote.remote(pack, storage, run) for pack in packs])
    have = ray.cluster_resources()
    slots = have.get("CPU", 0) // resources.cpus
    if resources.gpus:
        slots = min(slots, have.get("GPU", 0) // resources.gpus)
    return [part for p, found in zip(packs, timings, strict=True) for part in split(p, best_size(found), int(slots))]


def _measure_there(pack: Pack, storage: Storage, run: RunSettings) -> Sequence[Any]:
    """Run `packing.measure` on a node, which has a folder of its own for an object store."""
    from latent_sweep.execution.ray_workers import keep_to_share

    with loading_modules():
        from latent_sweep.backbones.architectures import free_memory
        from latent_sweep.sweep.memory import decided
        from latent_sweep.training.packing import measure

    keep_to_share(run.resources)
    return measure(decided(pack, run, free_memory), storage, max(1, int(run.resources.cpus)))


def _placement(resources: ResourceSettings) -> Any:
    """Ask Ray for a trial's own bundle, or for one for every worker of its group: placed together, or not at all."""
    from ray import tune

    bundles = [_bundle(resources)] * resources.workers
    if resources.workers == 1:
        return tune.PlacementGroupFactory(bundles)
    # the trial's own process only watches: its bundle is empty
    return tune.PlacementGroupFactory([{}, *bundles], strategy="PACK")


def _bundle(resources: ResourceSettings) -> dict[str, float]:
    """Return the resources that one worker asks for."""
    bundle = {"CPU": resources.cpus, "GPU": resources.gpus}
    if resources.accelerator:
        bundle[f"accelerator_type:{resources.accelerator}"] = 0.001
    return bundle


def _check_fits(resources: ResourceSettings, started_here: bool) -> None:
    """Say at once that a trial cannot be placed here, or, on a cluster that may grow, what it is waiting for."""
    if _fits(resources):
        return
    message = f"{wanted_text(resources)}; {_have_text()}"
    if started_here:
        raise ConfigError(
            f"{message}. Ask for less, {less_text(_nodes(), resources)}, or submit to a cluster that has it"
        )
    log.warning("%s. Waiting for nodes to join", message)


def _fits(resources: ResourceSettings) -> bool:
    """Whether the cluster as it is could hold a trial, if nothing else ran."""
    return has_room(_nodes(), resources)


def _nodes() -> list[Mapping[str, float]]:
    """The resources of each node of the cluster, by Ray's names."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def has_room(nodes: Sequence[Mapping[str, float]], resources: ResourceSettings) -> bool:
    """Whether empty nodes that have these resources, by Ray's names, could hold a trial."""
    return sum(_workers_on(node, resources) for node in nodes) >= resources.workers


def _workers_on(node: Mapping[str, float], resources: ResourceSettings) -> int:
    """Count the workers of a trial that fit on an empty node."""
    if resources.accelerator and f"accelerator_type:{resources.accelerator}" not in node:
        return 0
    rooms = [node.get("CPU", 0) / resources.cpus]
    if resources.gpus:
        rooms.append(node.get("GPU", 0) / resources.gpus)
    return int(min(rooms))


def wanted_text(resources: ResourceSettings) -> str:
    """Say what a trial asks for."""
    each = f"{resources.cpus:g} CPU and {resources.gpus:g} GPU"
    each += f" ({resources.accelerator})" if resources.accelerator else ""
    if resources.workers == 1:
        return f"run.resources: a trial asks for {each} on one node"
    return f"run.resources: a trial asks for {resources.workers} workers at once, each with {each}"


def less_text(nodes: Sequence[Mapping[str, float]], resources: ResourceSettings) -> str:
    """Say by which settings a trial would fit on one of these nodes, or its workers on all of them."""
    largest = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in ("CPU", "GPU")}
    less: dict[str, str] = {}
    if resources.cpus > largest["CPU"]:
        less["cpus"] = f"{largest['CPU']:g}"
    if resources.gpus > largest["GPU"]:
        less["gpus"] = f"{largest['GPU']:g}"
    if resources.accelerator and all(f"accelerator_type:{resources.accelerator}" not in node for node in nodes):
        less["accelerator"] = "null"
    if not less:  # each of the workers fits, but not so many of them; or no node has all that one asks for
        fitting = sum(_workers_on(node, resources) for node in nodes)
        less = {"workers": str(fitting)} if fitting else {"cpus": "1"}
    return "e.g. " + " ".join(f"--set run.resources.{name}={value}" for name, value in less.items())


def _have_text() -> str:
    nodes = _nodes()
    total = {kind: sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}
    types = sorted({key.partition(":")[2] for node in nodes for key in node if key.startswith("accelerator_type:")})
    found = f"the cluster has {total['CPU']:g} CPU and {total['GPU']:g} GPU on {len(nodes)} nodes"
    return f"{found}, of type {', '.join(types)}" if types else found


def _placement_watch(resources: ResourceSettings) -> Any:
    """A Tune callback that says what trials wait for, and ends the sweep where they would wait for ever."""
    from ray.tune import Callback

    class PlacementWatch(Callback):
        looked = told = time.monotonic()
        hopeless = 0
        """Looks in a row that found no way: a single one may fall between a node's launch and its arrival."""

        def on_step_end(self, iteration: int, trials: Sequence[Any], **info: Any) -> None:
            now = time.monotonic()
            if now - self.looked < LOOK_SECONDS or any(trial.status == "RUNNING" for trial in trials):
                return
            self.looked = now
            self.hopeless = self.hopeless + 1 if _can_never_come(resources) else 0
            if self.hopeless == 2:
                raise ConfigError(
                    f"{wanted_text(resources)}; {_have_text()}, and its autoscaler has no node type that could add "
                    f"it. Ask for less, {less_text(_nodes(), resources)}, or add such a node type to the cluster's "
                    "configuration"
                )
            if now - self.told > TELL_SECONDS and not _fits(resources):
                self.told = now
                log.warning("%s; %s. Still waiting for nodes", wanted_text(resources), _have_text())

    return PlacementWatch()


def _can_never_come(resources: ResourceSettings) -> bool:
    """Whether no node has room for a trial, none is on its way, and the autoscaler says that it can add none.

    It says so of every trial beyond its largest cluster, too; that one waits for another's end.
    """
    import ray
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    reply = GetClusterStatusReply()
    reply.ParseFromString(ray._raylet.GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status())
    state = reply.autoscaling_state
    if _fits(resources) or state.pending_instance_requests or state.pending_instances:
        return False
    groups = [request for group in state.infeasible_gang_resource_requests for request in group.requests]
    wanted = {kind: amount for kind, amount in _bundle(resources).items() if amount}
    found = [dict(request.resources_bundle) for request in [*state.infeasible_resource_requests, *groups]]
    return any({kind: other.get(kind, 0) for kind in wanted} == wanted for other in found)


def _scheduler(run: RunSettings, n_tasks: int, tell: Callable[[str], None]) -> Any:
    """Make the scheduler of packs with at most so many tasks; `tell` gets the id of each pack that it stops."""
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    if run.scheduler.name == "fifo":
        return FIFOScheduler()

    class WhileTasksAreLeft(ASHAScheduler):
        """Stops nobody who has learned all tasks: that is a result like any other, and its costs are spent."""

        def on_trial_result(self, tune_controller: Any, trial: Any, result: Mapping[str, Any]) -> str:
            if not result.get("tasks_left", 1):
                return str(self.CONTINUE)
            decision = str(super().on_trial_result(tune_controller, trial, result))
            if decision == self.STOP:
                tell(trial.config["pack_id"])
            return decision

    return WhileTasksAreLeft(
        time_attr="tasks_seen",
        max_t=n_tasks,
        grace_period=min(run.scheduler.grace_tasks, n_tasks),
        reduction_factor=run.scheduler.reduction_factor,
    )


def _close(pack: Pack, sweep: SweepFolder, error: Exception | None) -> None:
    """Say in the journals what only Tune knows: what ended a trial before its end."""
    if error is not None:
        facts = {"kind": "lost", "message": redact(str(error))[-2000:], "traceback": traceback_text(error)}
        _journal_failure(pack, sweep, facts)
        return
    for journal, events in unfinished(pack, sweep):
        if events:
            seen, reason = len(stages(events)), "stopped early by the scheduler: others had a higher AP"
            journal.append("stopped", tasks_seen=seen, reason=reason)


def _journal_failure(pack: Pack, sweep: SweepFolder, facts: Mapping[str, str]) -> None:
    """Say in the journals of a pack's unfinished trials what ended them."""
    for journal, _ in unfinished(pack, sweep):
        journal.append("failed", **facts, task=None, step=None)
