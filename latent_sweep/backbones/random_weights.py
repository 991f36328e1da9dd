"""Random weights with the same bits on every device and in every version of torch.

Torch's own generators differ between GPU and CPU, and for bfloat16 between versions. Here, number i of the sequence is
a hash of i (splitmix64; Steele, Lea & Flood, 2014), by integer arithmetic. The sum of its four 16-bit parts is close
enough to normal for frozen weights; it ends at 3.46 standard deviations. A weight is that sum scaled in float32, with
one rounding to the weight's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_STEP, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of splitmix64 as signed 64-bit numbers, whose products wrap around alike."""

_MEAN, _DEVIATION = 4 * 65535 / 2, (4 * (65536**2 - 1) / 12) ** 0.5
"""Of a sum of four numbers from 0 to 65,535."""

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers drawn at once: fits a CPU's cache, and keeps a GPU busy with 128 MiB."""


def normal_values(first: int, like: Tensor) -> Tensor:
    """Return the sequence's numbers from `first` on, (count,), in float32, with mean 0 and deviation 1."""
    z = torch.ones_like(like, dtype=torch.int64).cumsum_(0).add_(first).mul_(_STEP)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z.bitwise_xor_(_logical_shift(z, shift)).mul_(factor)
    z.bitwise_xor_(_logical_shift(z, 31))
    total = z & 65535
    for shift in (16, 32, 48):
        total += (z >> shift) & 65535
    return total.float().sub_(_MEAN).mul_(1 / _DEVIATION)


def _logical_shift(z: Tensor, shift: int) -> Tensor:
    return (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)


class _PortableRandom(TorchDispatchMode):
    """Fills tensors with normal numbers. Uniform ones are skipped: transformers overwrites those of `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = 0
        self.unfilled: dict[int, Tensor] = {}
        """Tensors awaiting values, by address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "uniform_":
            self.unfilled[args[0].data_ptr()] = args[0]
            return args[0]
        if name == "normal_":
            mean, deviation = (args + (0.0, 1.0)[len(args) - 1 :])[1:]
            self.unfilled.pop(args[0].data_ptr(), None)
            return self._fill(args[0], mean, deviation)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"random weights: expected normal or uniform numbers, found {name}")
        return func(*args, **(kwargs or {}))

    def _fill(self, tensor: Tensor, mean: float, deviation: float) -> Tensor:
        numbers, chunk = tensor.view(-1), CHUNK[tensor.device.type]
        for start in range(0, numbers.numel(), chunk):
            part = numbers[start : start + chunk]
            part.copy_(normal_values(self._drawn + start, part).mul_(deviation).add_(mean))
        self._drawn += numbers.numel()
        return tensor


@contextmanager
def portable_random() -> Iterator[None]:
    """Fill modules created in the block. Raises NotImplementedError if a tensor keeps other random numbers."""
    with _PortableRandom() as mode:
        yield
    if mode.unfilled:
        raise NotImplementedError(f"random weights: expected normal numbers; {len(mode.unfilled)} tensors stay uniform")
