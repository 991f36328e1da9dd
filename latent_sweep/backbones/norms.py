"""RMS norms in one kernel each way on a GPU; transformers' own launch eight forward and some twelve backward."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm

from latent_sweep.backbones.families import FUSIBLE


def fuse_norms(model: Any) -> None:
    """Compute a model's norms by `torch.nn.functional.rms_norm`, which rounds bfloat16 once instead of twice.

    Only modules of exactly a class in `FUSIBLE` change, and only their class: parameters, names and hooks stay.
    """
    for module in model.modules():
        kind: Any = type(module)
        package, _, family = kind.__module__.rpartition(".modeling_")
        if package == f"transformers.models.{family}" and FUSIBLE.get(family) == kind.__name__:
            module.__class__ = _fused(kind)


@cache
def _fused(kind: Any) -> type:
    """Return a subclass of a norm with another forward pass, (..., width) to the same shape."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # not supported by the fused kernel
            return kind.forward(self, x)
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward, "__doc__": f"{kind.__name__} as one kernel."})
