"""Random weights that are the same bits on every device and in every version of torch.

Torch's own generators draw other numbers on a GPU than on a CPU, and for bfloat16 others from version to version.
Here the numbers come from integer arithmetic alone. Number i of the sequence is a hash of i (splitmix64; Steele, Lea &
Flood, 2014). The sum of its four 16-bit parts is close enough to normal for frozen weights: it ends at 3.46 standard
deviations. It becomes a weight by multiplications and an addition in float32 and one rounding to the weight's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_STEP, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Of splitmix64, as 64-bit numbers with a sign: products wrap around alike."""

_MEAN, _DEVIATION = 4 * 65535 / 2, (4 * (65536**2 - 1) / 12) ** 0.5
"""Of a sum of four numbers from 0 to 65,535."""

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers drawn at once: what a CPU's cache holds, and what keeps a GPU busy in 128 MiB."""


def normal_values(first: int, like: Tensor) -> Tensor:
    """Return the numbers of the sequence from `first` on, float32, of mean 0 and deviation 1.

    Args:
        like: a tensor of as many numbers, (count,), on the device wanted.
    """
    z = torch.ones_like(like, dtype=torch.int64).cumsum_(0).add_(first).mul_(_STEP)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z.bitwise_xor_(_shifted(z, shift)).mul_(factor)
    z.bitwise_xor_(_shifted(z, 31))
    total = z & 65535
    for shift in (16, 32, 48):
        total += (z >> shift) & 65535
    return total.float().sub_(_MEAN).mul_(1 / _DEVIATION)


def _shifted(z: Tensor, shift: int) -> Tensor:
    """Shift to the right with zeros coming in, as of numbers without a sign."""
    return (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)


class _Drawing(TorchDispatchMode):
    """Fills what asks for normal numbers, one tensor after another from one sequence.

    Uniform numbers are what `nn.Linear` begins with before transformers draws: they are left out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = 0
        self.empty: dict[int, Tensor] = {}
        """Tensors that nothing has filled yet, by address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "uniform_":
            self.empty[args[0].data_ptr()] = args[0]
            return args[0]
        if name == "normal_":
            mean, deviation = (args + (0.0, 1.0)[len(args) - 1 :])[1:]
            self.empty.pop(args[0].data_ptr(), None)
            return self._fill(args[0], mean, deviation)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(f"random weights: no numbers of ours for {name}")
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
    """Have modules that are made within the block be filled from the sequence, which begins anew.

    Raises:
        NotImplementedError: something asks for random numbers that are not normal, and keeps them.
    """
    with _Drawing() as drawing:
        yield
    if drawing.empty:
        raise NotImplementedError(f"random weights: {len(drawing.empty)} tensors are to be uniform, which none is here")
