"""Build models from configurations, with random weights or none, and choose the device that holds them."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig

from latent_sweep.backbones.outlines import embedding_name, model_class, model_config
from latent_sweep.backbones.random_weights import portable_random
from latent_sweep.backbones.registry import BackboneSettings
from latent_sweep.errors import ConfigError

WITHOUT_BFLOAT16 = ("DEFAULT", "NO AVX", "AVX2")
"""CPU capabilities, as torch names them, without bfloat16 multiplication on Intel and AMD processors."""


def device_of(settings: BackboneSettings) -> Literal["cpu", "cuda"]:
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "backbone.device: cuda was asked for but torch sees no GPU; install a CUDA build or use `auto`"
        )
    return settings.device


def slow_bfloat16(settings: BackboneSettings) -> str:
    """Return a warning if a backbone would compute in bfloat16 on a processor without instructions for it."""
    capability = torch.backends.cpu.get_cpu_capability()
    lacking = platform.machine() in ("x86_64", "AMD64") and capability in WITHOUT_BFLOAT16
    if settings.dtype != "bfloat16" or device_of(settings) != "cpu" or not lacking:
        return ""
    return (
        f"backbone.dtype: bfloat16, for which this processor has no instructions (it computes with {capability}): "
        "a step takes ten times as long as in float32, or more. Use `dtype: float32`, or a GPU"
    )


def free_memory(settings: BackboneSettings) -> float:
    """Return the bytes this process can use on the model's device; infinite on a CPU."""
    if device_of(settings) != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info()
    share = torch.cuda.get_per_process_memory_fraction() * total
    return min(free + torch.cuda.memory_reserved(), share)  # reserved memory is reused


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def random_model(family: str, config: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> Any:
    """Create a tiny model with random weights, drawn on the CPU even for a GPU, whose generator differs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(family, config, dtype)


def portable_random_model(family: str, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> Any:
    """Create a full-size model with random weights on its device, with the same bits on every device."""
    with portable_random(), torch.device(device):
        model = _build(family, config, dtype)
    with init_empty_weights(include_buffers=False):
        host = _build(family, config, dtype)
    with torch.no_grad():  # a GPU computes rotary frequencies with other last digits
        for buffer, host_buffer in zip(model.buffers(), host.buffers(), strict=True):
            buffer.copy_(host_buffer)
    return model


def _build(family: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    full_config = model_config(family, config)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a large model would not fit in float32 first
    try:
        model = model_class(full_config)(full_config)
        head, table = model.get_output_embeddings(), model.get_input_embeddings()
        if config.get("tie_word_embeddings") is False and head.weight is table.weight:  # transformers always ties T5's
            head.weight = torch.nn.Parameter(torch.empty_like(table.weight, requires_grad=False).normal_())
        return model
    finally:
        torch.set_default_dtype(default_dtype)


def separate_head(model: Any, stored: Mapping[str, torch.Tensor]) -> bool:
    """Give the head an empty weight if the checkpoint has one although it is tied (FLAN-T5); return whether."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is head)
    if head.weight is not table.weight or name not in stored:
        return False
    shared = stored.get(embedding_name(model))
    if shared is None or shared.equal(stored[name]):
        return False
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    return True


def empty_model(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = model_class(config)(config)
    model.tie_weights()
    return model


def forget_dropout(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if "drop" in name and type(value) is float:
            setattr(config, name, 0.0)


def set_dropout(model: Any, rate: float) -> float:
    """Set all dropout rates of a model, not its mode (A28), and return the previous rate."""
    before = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            before, module.p = module.p, rate
            continue
        for name, value in list(vars(module).items()):
            if "drop" in name and type(value) in (int, float):
                before = value
                setattr(module, name, rate)
    return before
