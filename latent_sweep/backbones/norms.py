"""RMS norms in one kernel each way on a GPU, where transformers' own launch eight forward and some twelve back."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

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
"""Norms by `model_type` that compute `weight * (x / rms(x))`, with the inner result rounded to the type of `x`.

Gemma's multiply by `1 + weight`, OLMo-2's round after the multiplication, and a norm that none of these lists is left
as it is.
"""


def fuse_norms(model: Any) -> None:
    """Have the norms of a model be computed by `torch.nn.functional.rms_norm`.

    It computes in float32 throughout, so that in bfloat16 it rounds once where transformers' own rounds twice. Results
    differ in their last digits: on a CPU, where it is no faster, this is left out and all results stay what they were.

    Only modules of exactly a class in `FUSIBLE` change, and only their class: parameters, names and hooks stay.
    """
    for module in model.modules():
        kind: Any = type(module)
        if _is_fusible(kind):
            module.__class__ = _fused(kind)


def _is_fusible(kind: type) -> bool:
    package, _, home = kind.__module__.rpartition(".modeling_")
    return package == f"transformers.models.{home}" and FUSIBLE.get(home) == kind.__name__


@cache
def _fused(kind: Any) -> type:
    """Return the class of a norm with another forward pass, (..., width) to the same shape."""
    from torch.nn.functional import rms_norm

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # which the fused kernel does not take, and whose result has another type
            return kind.forward(self, x)
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward, "__doc__": f"{kind.__name__} as one kernel."})
