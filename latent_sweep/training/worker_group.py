"""Several workers of one trial: the first one decides, reads and writes, and all of them compute.

Rank 0 runs the trial as a worker alone would. Where the backbone is at work it first says what all of them do now, an
*order*, and everyone does its share. So every file has one writer, and what is decided is decided once.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

LOST_PEER_MINUTES = 30
"""How long a worker waits in the middle of a computation for another that is alive but silent."""


@dataclass(frozen=True)
class WorkerGroup:
    """A worker's place among the workers of its trial; as it stands, alone."""

    rank: int = 0
    size: int = 1
    channel: Any = None
    """Process group in which orders and answers travel. Without a time limit: the first worker may wait for another
    trial's training, and a worker that dies closes the connection."""

    @property
    def leads(self) -> bool:
        """Whether this worker decides, reads and writes."""
        return self.rank == 0

    def order(self, *what: Any) -> None:
        """Tell the others what all of them do now; anything that can be pickled. Only the first worker gives orders."""
        if self.size > 1:
            self._broadcast([what])

    def next_order(self) -> tuple[Any, ...]:
        """Wait for the first worker's next order."""
        return self._broadcast([None])[0]

    def _broadcast(self, box: list[Any]) -> list[Any]:
        import torch
        import torch.distributed as dist

        dist.broadcast_object_list(box, src=0, group=self.channel, device=torch.device("cpu"))
        return box

    def first(self, make: Callable[[], T]) -> T:
        """Have the first worker make a value and hand it to every worker."""
        if self.size == 1:
            return make()
        return self._broadcast([make() if self.leads else None])[0]

    def collect(self, mine: Any) -> list[Any]:
        """Gather every worker's value by rank, at the first worker; nothing at the others."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        answers = [None] * self.size if self.leads else None
        dist.gather_object(mine, answers, dst=0, group=self.channel)
        return answers or []

    def share(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's part of a batch: consecutive rows, as many as the others' or one less or more."""
        begin, end = (len(rows) * rank // self.size for rank in (self.rank, self.rank + 1))
        return rows[begin:end]

    def largest_share(self, rows: int) -> int:
        """Return the number of rows in the largest part of a batch of so many rows."""
        return -(-rows // self.size)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all workers into each tensor, in one message; all of one type and on one device."""
        if self.size == 1 or not tensors:
            return
        import torch
        import torch.distributed as dist

        together = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(together)
        parts = together.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


ALONE = WorkerGroup()
"""The group of one that every trial has unless it asks for more workers."""


def listen(host: str) -> socket.socket:
    """Open a socket on a free port of this address, for the workers of a trial to meet at."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.bind((host, 0))
    found.listen()
    return found


def join(rank: int, size: int, host: str, port: int, listening: socket.socket | None = None) -> WorkerGroup:
    """Meet the other workers of a trial; returns when all are there.

    Args:
        host, port: where the first worker listens.
        listening: its socket, at the first worker.

    Raises:
        torch.distributed.DistError: the others do not come within LOST_PEER_MINUTES.
    """
    import os

    import torch
    import torch.distributed as dist

    if host in ("127.0.0.1", "::1"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # workers of one machine talk to nobody else
    # what a library asks for that looks for the group in the environment; every worker sees one device only
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    patience = datetime.timedelta(minutes=LOST_PEER_MINUTES)
    handed = None if listening is None else listening.detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, and not declared so
        host, port, size, is_master=rank == 0, timeout=patience, master_listen_fd=handed
    )
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
    return WorkerGroup(rank, size, dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365)))
