"""The weights that methods read, straight from the safetensors files of a checkpoint: no model is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from latent_sweep.backbones.architectures import device_of
from latent_sweep.backbones.families import refusal
from latent_sweep.backbones.files import checkpoint_file, embedded_folder, tensor_files
from latent_sweep.backbones.outlines import outline
from latent_sweep.backbones.registry import EMBEDDED, BackboneSettings, BackboneSpec, describe

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)

# --- weights without a model -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointProjection:
    """An adapted projection that lies in a checkpoint: its weight is mapped when it is asked for, and never kept."""

    file: Path
    name: str
    """Of the tensor in the file."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    device: str

    @property
    def weight(self) -> torch.Tensor:
        """Read the weight, (out, in), in the type and on the device in which the loaded backbone has it."""
        return read_weight(self.file, self.name).to(self.device, self.dtype)


@dataclass(frozen=True)
class CheckpointWeights:
    """The weights of a backbone that the methods read, in the safetensors files of its checkpoint: no model is loaded.

    They are the loaded backbone's bit for bit: loading casts every weight to `backbone.dtype` and no further.
    """

    projections: Mapping[str, CheckpointProjection]
    """Adapted projections by module name, in the order of `target_shapes`."""
    embedding_file: Path
    embedding_name: str
    dtype: torch.dtype

    @cached_property
    def weights_digest(self) -> str:
        """Compute `Backbone.weights_digest` from one weight at a time."""
        return digest_of_weights(self._weights())

    @property
    def embedding_table(self) -> torch.Tensor:
        """The input embedding table, (vocabulary, d), mapped from its file."""
        return read_weight(self.embedding_file, self.embedding_name).to(self.dtype)

    def _weights(self) -> Iterator[torch.Tensor]:
        yield self.embedding_table
        for projection in self.projections.values():
            yield projection.weight


def checkpoint_weights(settings: BackboneSettings) -> CheckpointWeights | None:
    """The weights of a backbone on this machine, in a local folder or the hub's cache; reads names, no weight.

    Returns:
        None where there is no checkpoint in safetensors, e.g. one of `.bin` files, or where its names are others than
        the model's; then the log says so.

    Raises:
        ConfigError: a local folder is no checkpoint of a model that is supported, or the device is not there.
    """
    import torch

    known = describe(settings)
    if known is not None and known.source == "config":
        return None
    if settings.name == EMBEDDED:
        source = str(embedded_folder(settings.dtype))
    else:
        source = known.source if known else settings.name
    if known is None:
        known = _described_by_cache(source, settings.revision)
    files = tensor_files(source, settings.revision)
    if known is None or not files:
        log.info("%s has no safetensors files here; its weights are read from the loaded model", source)
        return None
    shapes = known.adapted(settings)
    # a projection's weight is called by its module's name
    wanted = [outline(known.family, known.config).embedding, *(f"{name}.weight" for name in shapes)]
    if missing := [name for name in wanted if name not in files]:
        log.info("%s holds no %s in its safetensors files; weights are read from the loaded model", source, missing[0])
        return None
    dtype, device = getattr(torch, settings.dtype), device_of(settings)
    projections = {
        name: CheckpointProjection(files[f"{name}.weight"], f"{name}.weight", *shape, dtype, device)
        for name, shape in shapes.items()
    }
    return CheckpointWeights(projections, files[wanted[0]], wanted[0], dtype)


def read_weight(file: Path, name: str) -> torch.Tensor:
    """One tensor of a safetensors file, mapped."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def _described_by_cache(source: str, revision: str | None) -> BackboneSpec | None:
    path = checkpoint_file(source, "config.json", revision)
    config = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    kind = config.get("model_type")
    return BackboneSpec(kind, source, config) if isinstance(kind, str) and not refusal(kind, config) else None


def digest_of_weights(weights: Iterable[torch.Tensor]) -> str:
    """Content hash of weights in this order, with their shapes and types."""
    import torch

    digest = hashlib.sha256()
    for weight in weights:
        digest.update(f"{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
