"""Models by their configuration, with random weights or none, and the device that holds them."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from latent_sweep.backbones.outlines import embedding_name, model_class, model_config
from latent_sweep.backbones.registry import BackboneSettings
from latent_sweep.errors import ConfigError

if TYPE_CHECKING:
    import torch

WITHOUT_BFLOAT16 = ("DEFAULT", "NO AVX", "AVX2")
"""What torch computes with on processors of Intel and AMD that multiply no bfloat16, as torch names it."""


def device_of(settings: BackboneSettings) -> Literal["cpu", "cuda"]:
    """Choose where `backbone.device` puts a model on this machine.

    Raises:
        ConfigError: a GPU was asked for, and there is none.
    """
    import torch

    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "backbone.device: cuda was asked for but torch sees no GPU; install a CUDA build or use `auto`"
        )
    return settings.device


def slow_bfloat16(settings: BackboneSettings) -> str:
    """Say what to do where a backbone is to compute in bfloat16 on a processor without instructions for it.

    Returns:
        What was found and what is better; an empty text where there is nothing to say.
    """
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    lacking = platform.machine() in ("x86_64", "AMD64") and capability in WITHOUT_BFLOAT16
    if settings.dtype != "bfloat16" or device_of(settings) != "cpu" or not lacking:
        return ""
    return (
        f"backbone.dtype: bfloat16, for which this processor has no instructions (it computes with {capability}): a "
        "step takes ten times as long as in float32, or more. Use `dtype: float32`, or a GPU"
    )


def avoid_cudnn_attention() -> None:
    """Have this process attend by torch's own kernels, where on Hopper it would take cuDNN's (torch 2.11 and later).

    Theirs plan tens of milliseconds for each shape that is new, which is every token of an answer and most batches;
    and their gradients were seen to be NaN behind a mask (pytorch/pytorch#196678).
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def free_memory(settings: BackboneSettings) -> float:
    """Bytes that this process can have for itself where the model computes; without limit in a host's memory."""
    import torch

    if device_of(settings) != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info()
    share = torch.cuda.get_per_process_memory_fraction() * total
    return min(free + torch.cuda.memory_reserved(), share)  # what it holds by now will be of use


def device_name(device: torch.device) -> str:
    """Name the device that computes: `cpu`, or the GPU's name."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def random_model(family: str, config: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> Any:
    """Make a model with random weights of these shapes: the tiny models, which come with the package.

    They are drawn on the CPU, wherever they compute: a GPU would draw others, and nothing that names a backbone says
    what has drawn it.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _made(family, config, dtype)


def drawn_model(family: str, config: Mapping[str, Any], dtype: torch.dtype, device: str) -> Any:
    """Make a model with random weights of full shapes on the device that computes: the same bits on every device.

    On a GPU that takes seconds for 13 billion weights, which a CPU draws for minutes.
    """
    import torch
    from accelerate import init_empty_weights

    from latent_sweep.backbones.random_weights import portable_random

    with portable_random(), torch.device(device):
        model = _made(family, config, dtype)
    with init_empty_weights(include_buffers=False):
        host = _made(family, config, dtype)
    with torch.no_grad():  # frequencies of rotary positions, whose last digits a GPU computes otherwise
        for mine, computed in zip(model.buffers(), host.buffers(), strict=True):
            mine.copy_(computed)
    return model


def _made(family: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    import torch

    found = model_config(family, config)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a large model would not fit in float32 first
    try:
        model = model_class(found)(found)
        if config.get("tie_word_embeddings") is False:
            _draw_head(model)
        return model
    finally:
        torch.set_default_dtype(usual)


def _draw_head(model: Any) -> None:
    """Give a head a weight of its own where transformers ties it, whatever the configuration says: T5's."""
    import torch

    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is table.weight:
        head.weight = torch.nn.Parameter(torch.empty_like(table.weight, requires_grad=False).normal_())


def separate_head(model: Any, stored: Mapping[str, torch.Tensor]) -> bool:
    """Give the head an empty weight of its own where a checkpoint holds one: so has FLAN-T5, as transformers finds out.

    Its configuration of T5 ties the head, and only its own loading looks at what a checkpoint has.

    Args:
        stored: the checkpoint's tensors by name; only the head and the embedding table are looked up.

    Returns:
        Whether the checkpoint has a head of its own that the model, without weights, had tied.
    """
    import torch

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
    """The model of a checkpoint folder without its weights: parameters are on the meta device, buffers are there."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = model_class(config)(config)
    model.tie_weights()
    return model


def forget_dropout(config: Any) -> None:
    """Set every rate of dropout in a model's configuration to 0."""
    for name, value in list(vars(config).items()):
        if "drop" in name and type(value) is float:
            setattr(config, name, 0.0)


def set_dropout(model: Any, rate: float) -> float:
    """Give all dropout of a model one rate, and return the one before.

    By rate and not by mode, because gradient checkpointing needs training mode, where nothing may wake up (A28).
    """
    import torch

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
