"""Joins a Ray cluster, and asks each of its nodes something before work is trusted to it."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from latent_sweep.errors import ConfigError, Terminated
from latent_sweep.security import redact
from latent_sweep.storage.storage import Storage, has_answer, sees, unseen_message
from latent_sweep.tracking.addresses import check_listens, ray_address

log = logging.getLogger(__name__)

ANSWER_SECONDS = 180.0
"""How long a node may take to answer; it may have to unpack the job's working folder first."""


@dataclass(frozen=True, eq=False)
class Node:
    """A node of the cluster that was alive when it was asked."""

    node_id: str
    name: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What a node has answered."""

    value: Any = None
    error: Exception | None = None
    """Ray's, where there is no answer."""
    left: bool = False
    """Whether that is because the node has left the cluster."""


def check_cluster_answers() -> None:
    """Check that the cluster that RAY_ADDRESS names is there, before Ray waits for it for minutes.

    Raises:
        ConfigError: it has no port, no Ray cluster listens there, or `auto` finds none or several on this machine.
    """
    if (address := ray_address()) is not None:
        check_listens(_found_here() if address == "auto" else address)


def _found_here() -> str:
    """Return the address of the cluster on this machine that `RAY_ADDRESS=auto` means."""
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        return str(canonicalize_bootstrap_address_or_die("auto"))
    except ConnectionError as error:
        raise ConfigError(
            f"RAY_ADDRESS: found auto, the cluster that runs on this machine. {error} Start one, name its HOST:PORT, "
            "or unset RAY_ADDRESS to run without"
        ) from error


def connect() -> bool:
    """Join the cluster that RAY_ADDRESS names (a job inherits it), or start one; return whether it was started here.

    A cluster of our own listens on the loopback interface only and asks for a token that this process made up.

    Raises:
        ConfigError: that cluster cannot be joined.
        Terminated: SIGTERM has come in the meantime.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Tune's own result files and tables say nothing that the journal does not
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    # Tune would catch Ctrl-C and return as if all had ended, and an interrupted trial would look stopped early
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    here = ray_address() is None
    if here:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on Linux too: every socket on 127.0.0.1
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray would start a worker for each CPU; Tune's have an environment of their own, and are none of these
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import ray

        if ray.is_initialized():
            return False
        try:
            with _keeping_sigterm():
                ray.init(
                    address="local" if here else None,
                    include_dashboard=False if here else None,
                    logging_level=logging.ERROR,
                    log_to_driver=True,
                )
        except Exception as error:  # Ray raises one of many
            if here:
                raise
            raise ConfigError(
                f"RAY_ADDRESS: {redact(ray_address() or '')} cannot be joined: {type(error).__name__}: "
                f"{redact(str(error).strip()[-1000:])}\nCheck the address, its token (RAY_AUTH_TOKEN or "
                "~/.ray/auth_token), and that Python and Ray are the same there"
            ) from None
    return here


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Put back the handler of SIGTERM that Ray replaces while it starts.

    Ray's own handlers end the processes that it has started, and then raise SystemExit.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as ended:
        raise Terminated from ended
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def alive_nodes(without: Collection[str] = ()) -> list[Node]:
    """The nodes of the cluster as it is, but for those with these ids."""
    import ray

    nodes = [Node(n["NodeID"], n["NodeName"], n["Resources"]) for n in ray.nodes() if n["Alive"]]
    return [node for node in nodes if node.node_id not in without]


def ask(nodes: Collection[Node], function: Callable[..., Any], *arguments: Any) -> dict[Node, Answer]:
    """Call `function(*arguments, node_id)` on each of these nodes, all at once, without a CPU or GPU of their own."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    asked = {
        node: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            *arguments, node.node_id
        )
        for node in nodes
    }
    answers = {}
    for node, reference in asked.items():
        try:
            answers[node] = Answer(ray.get(reference, timeout=ANSWER_SECONDS))
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError) as error:
            answers[node] = Answer(error=error, left=True)
        except ray.exceptions.RayError as error:
            answers[node] = Answer(error=error)
    return answers


def check_every_node_sees(storage: Storage, asked: str) -> None:
    """Read on every other node what was written on this one, and here what they answer.

    Raises:
        ConfigError: naming the nodes that do not see it.
    """
    import ray

    others = alive_nodes(without=[ray.get_runtime_context().get_node_id()])
    unseen = []
    for node, answer in ask(others, sees, storage, asked).items():
        if answer.left:
            log.warning("node %s left the cluster before it could say whether it sees %s", node.name, storage.place)
        elif answer.error is not None:
            unseen.append(f"{node.name} ({type(answer.error).__name__}: {answer.error})")
        elif not (answer.value and has_answer(storage, asked, node.node_id)):
            unseen.append(node.name)
    if unseen:
        raise ConfigError(unseen_message(storage, unseen))


def disconnect() -> None:
    """Leave the cluster."""
    import ray

    ray.shutdown()


def resources_here() -> dict[str, float]:
    """Return what Ray takes this machine to have, by its names."""
    from ray._private.accelerators import get_accelerator_manager_for_resource
    from ray._private.utils import get_num_cpus

    gpus = get_accelerator_manager_for_resource("GPU")
    found = {"CPU": get_num_cpus(override_docker_cpu_warning=True), "GPU": _visible(gpus)}
    if kind := gpus.get_current_node_accelerator_type():
        found[f"accelerator_type:{kind}"] = 1
    return found


def _visible(gpus: Any) -> int:
    """Count the GPUs that this process may see."""
    seen = gpus.get_current_process_visible_accelerator_ids()
    there: int = gpus.get_current_node_num_accelerators()
    return there if seen is None else min(there, len(seen))
