"""RMS norms in one kernel each way on a GPU; transformers' own launch eight forward and some twelve backward."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm

FUSIBLE = {
    "t5": "T5LayerNorm",
    "mt5": "MT5LayerNorm",
    "umt5": "UMT5LayerNorm",
    "llama": "LlamaRMSNorm",
    "mistral": "MistralRMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "phi3": "Phi3RMSNorm",
    "granite": "GraniteRMSNorm",
    "smollm3": "SmolLM3RMSNorm",
}
"""Norms, by `model_type`, that compute `weight * (x / rms(x))` with the inner result rounded to the type of `x`.

Gemma's multiply by `1 + weight` and OLMo-2's round after the multiplication, so they are not listed.
"""


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
