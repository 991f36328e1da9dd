"""CUDA graphs: the kernels of a function, recorded once and launched together by each replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A function's kernels. A replay repeats them on the same memory: Python does not run, and nothing is allocated."""

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record the kernels of a function and return its result; RuntimeError if it waits for the device."""
        ...

    def replay(self) -> None: ...


NewGraph = Callable[[], Graph]
NewPool = Callable[[], NewGraph]
"""Reserves memory for the intermediate results of several graphs, of which one is replayed at a time."""


class CudaGraph:
    """A graph of CUDA.

    Args:
        pool: memory that several graphs share, from `torch.cuda.graph_pool_handle()`; None is memory of its own.
        warm_up: times that the function runs before the capture, on another stream, as libraries initialize then.
    """

    def __init__(self, pool: Any = None, warm_up: int = 2):
        self._graph, self._pool, self._warm_up = torch.cuda.CUDAGraph(), pool, warm_up

    def capture(self, function: Callable[[], Any]) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._warm_up):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        # other threads of the process may use the device meanwhile
        with torch.cuda.graph(self._graph, self._pool, stream, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self._graph.replay()


def cuda_pool(warm_up: int = 2) -> NewGraph:
    return partial(CudaGraph, torch.cuda.graph_pool_handle(), warm_up)
