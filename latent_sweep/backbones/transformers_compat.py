"""What differs between the supported versions of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute_activations(model: PreTrainedModel, on: bool) -> None:
    """Turn activation checkpointing on or off; its methods are called `gradient_...` before transformers 5.23."""
    prefix = _prefix(model)
    if on:
        getattr(model, f"{prefix}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{prefix}_checkpointing_disable")()


def _prefix(model: PreTrainedModel) -> str:
    return "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
