"""Loads a backbone: the frozen model, its tokenizer, and the projections that get adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_sweep.backbones.architectures import device_of, empty_model, random_model, set_dropout
from latent_sweep.backbones.files import WEIGHTS, embedded_folder, hide_progress_bars, local_folder
from latent_sweep.backbones.known import EMBEDDED, BackboneSettings, Family, describe, target_shapes
from latent_sweep.backbones.stored import StoredBackbone, StoredProjection, digest_of_weights, stored_backbone
from latent_sweep.backbones.tokenizers import digest_of_tokenizer, load_tokenizer
from latent_sweep.errors import ConfigError

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)


def _nothing() -> None:
    """Do nothing: all weights are at hand already."""


@dataclass(frozen=True)
class Backbone:
    """A frozen model, ready for adapters."""

    family: Family
    model: Any
    """The transformers model (`T5ForConditionalGeneration` or `LlamaForCausalLM`), parameters frozen, dropout off."""
    tokenizer: Any
    targets: Mapping[str, torch.nn.Linear]
    """Adapted projections by module name, in the order of `target_shapes`."""
    device: torch.device
    """Where it computes."""
    stored: StoredBackbone | None
    """The checkpoint's files; None where there are none."""
    tokenizer_digest: str
    """Content hash of the tokenizer and its special tokens: what token caches and answers are keyed by."""
    weights_digest: str
    """Content hash of the embedding table and the adapted projections: what factors and embeddings are keyed by."""
    whole: bool = True
    """Whether this process has all weights at hand; otherwise what the methods read comes from `stored`."""
    before_answering: Callable[[], None] = _nothing
    """Brings the weights to where answers are generated."""

    @property
    def projections(self) -> Mapping[str, StoredProjection] | Mapping[str, torch.nn.Linear]:
        """The weights of `targets` to be read one at a time: from the checkpoint's files where it has some."""
        return self.stored.projections if self.stored else self.targets

    @property
    def prompt_embedding(self) -> torch.nn.Module:
        """The module that embeds prompts: of T5 the encoder's own, which shares its table with the decoder's."""
        return (self.model.encoder if self.family == "t5" else self.model).get_input_embeddings()

    @property
    def embedding_table(self) -> torch.Tensor:
        """The frozen input embedding table, (vocabulary, d): all that the router reads."""
        if self.stored and not self.whole:
            return self.stored.embedding_table.to(self.device)
        return self.model.get_input_embeddings().weight

    @property
    def pad_id(self) -> int:
        """Padding token id; masks are always passed, so its value never matters."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else self.tokenizer.eos_token_id

    @property
    def eos_id(self) -> int:
        """The token that ends an answer."""
        return self.tokenizer.eos_token_id

    @contextmanager
    def dropout(self, rate: float) -> Iterator[None]:
        """Have the model drop out at this rate within the block, wherever its architecture does.

        It does so as long as it is in training mode; masks come from torch's own random state.

        Raises:
            ConfigError: the architecture has no dropout, and the rate is not 0.
        """
        if rate and self.family != "t5":
            raise ConfigError(
                f"training.backbone_dropout: found {rate:g}, but {self.family} has no dropout of its own; leave it out"
            )
        before = set_dropout(self.model, rate)
        try:
            yield
        finally:
            set_dropout(self.model, before)


def load_backbone(settings: BackboneSettings) -> Backbone:
    """Load the whole model and its tokenizer, frozen and with dropout off; the embedded one is converted once, mapped.

    Raises:
        ConfigError: the backbone cannot be found or is of another family; the message says what to do.
    """
    import torch

    hide_progress_bars()
    dtype, device, known = getattr(torch, settings.dtype), device_of(settings), describe(settings)
    if known is not None and known.source == "config":
        # drawing billions of weights takes minutes, so where a GPU is to have them they are kept: the same bits
        model = random_model(known.family, known.config, dtype) if device == "cpu" else _mapped(local_folder(settings))
    elif settings.name == EMBEDDED:
        model = _mapped(embedded_folder(settings.dtype))
    else:
        model = _load_pretrained(known.source if known else settings.name, settings, dtype)
    if device != "cpu":
        model.to(device)
    return assemble(settings, model, stored_backbone(settings))


def assemble(
    settings: BackboneSettings,
    model: Any,
    stored: StoredBackbone | None,
    whole: bool = True,
    before_answering: Callable[[], None] = _nothing,
) -> Backbone:
    """Put a loaded model, frozen and with dropout off, together with its tokenizer; see `Backbone` for the rest."""
    import torch

    from latent_sweep.backbones.layouts import ATTENTION

    set_dropout(model, 0.0)
    model.set_attn_implementation(ATTENTION)
    model.requires_grad_(False)
    model.eval()
    family: Family = model.config.model_type
    targets = {name: model.get_submodule(name) for name in target_shapes(family, model.config.to_dict())}
    tokenizer = load_tokenizer(settings)
    if stored is not None:
        digest = stored.weights_digest
    else:
        digest = digest_of_weights([model.get_input_embeddings().weight, *(t.weight for t in targets.values())])
    return Backbone(
        family=family,
        model=model,
        tokenizer=tokenizer,
        targets=targets,
        device=torch.device(device_of(settings)),
        stored=stored,
        tokenizer_digest=digest_of_tokenizer(tokenizer),
        weights_digest=digest,
        whole=whole,
        before_answering=before_answering,
    )


def _load_pretrained(source: str, settings: BackboneSettings, dtype: torch.dtype) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoConfig, LlamaForCausalLM, T5ForConditionalGeneration

    try:
        config = AutoConfig.from_pretrained(source, revision=settings.revision, trust_remote_code=False)
        if config.model_type not in ("t5", "llama"):
            raise ConfigError(
                f"backbone.name: {source!r} is a {config.model_type!r} model; supported families are t5 and llama"
            )
        architecture = T5ForConditionalGeneration if config.model_type == "t5" else LlamaForCausalLM
        return architecture.from_pretrained(source, revision=settings.revision, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"backbone.name: {source!r} could not be loaded from the hub or a folder: {error}\n"
            "Check the name, log in with `hf auth login` if the model is gated, or give a local folder"
        ) from error


def _mapped(folder: Path) -> Any:
    """A model whose weights stay in the page cache, shared by every process that maps the same file."""
    import torch
    from safetensors.torch import load_file

    model = empty_model(folder)
    _, unexpected = model.load_state_dict(load_file(folder / WEIGHTS), strict=False, assign=True)
    model.tie_weights()
    left = [name for name, p in model.named_parameters() if p.device == torch.device("meta")]
    if left or unexpected:
        raise ConfigError(f"{folder}: the cached weights lack {left} or hold unknown {unexpected}; delete the folder")
    return model
