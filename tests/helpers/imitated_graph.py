"""A CUDA graph that is not there: the operators of a function, recorded once and repeated on the same memory.

As a GPU's: Python does not run again, what it knew at the capture stays as it was, results land where they landed, and
an operator that makes the host wait, or copies from its memory, is an error. So a captured function can be compared
with an eager one, to the bit, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "is_pinned"}
"""Operators whose result the host needs."""

FACTORIZES = {"_linalg_svd", "_linalg_eigh", "linalg_qr"}
"""Operators that tell the host whether they succeeded."""
DRAWS = {"bernoulli", "bernoulli_", "normal_", "uniform_", "native_dropout", "rand", "randn", "randint", "randperm"}
"""Operators that draw random numbers, which a replay would draw again."""
FROM_HOST = {"lift_fresh", "_pin_memory"}
"""Operators that bring a number or a list of Python's to the device."""


class ImitatedGraph:
    def __init__(self) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor], bool]] = []
        self.replays = 0

    def capture(self, function: Callable[[], Any]) -> Any:
        with mock.patch.object(torch, "from_numpy", _refuse), _Recording(self._calls):
            return function()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for operator, args, kwargs, results, fresh in self._calls:
            again = operator(*args, **kwargs)
            if fresh:
                for kept, new in zip(results, _tensors(again), strict=True):
                    if _storage(kept) != _storage(new):
                        kept.copy_(new)

    def __len__(self) -> int:
        """Return the number of operators."""
        return len(self._calls)


def _refuse(*_: Any) -> Any:
    raise RuntimeError("from_numpy: operation not permitted when stream is capturing")


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list[Any]):
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, operator._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if by_mask or name in WAITS | FACTORIZES | DRAWS | FROM_HOST:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        read = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        result = operator(*args, **kwargs)
        results = _tensors(result)
        fresh = any(_storage(tensor) not in read for tensor in results)
        if fresh or operator._schema.is_mutable:  # others are views, which follow their base
            self._calls.append((operator, args, kwargs, results, fresh))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
