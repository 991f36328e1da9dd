"""What a model of transformers is made of, without its weights: its class, its linear projections, its embedding table.

Families in the table of `latent_sweep.backbones.families` are known without this file; of the others a model is made on
the meta device, once, where torch and transformers load for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from latent_sweep.backbones.families import FAMILIES, Shapes, family_of_type, linear_shapes, refusal
from latent_sweep.errors import ConfigError
from latent_sweep.settings import canonical_json

SUPPORTED = (
    f"supported are 't5' and 'llama' with their kin ({', '.join(sorted(FAMILIES))}), and other causal models and "
    "encoder-decoders of transformers that keep keys and values"
)

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
"""What transformers calls layers that keep keys and values."""

TOLD = ("is_decoder", "use_bidirectional_attention", "quantization_config")
"""Settings that say whether a model writes, and whether its weights are numbers."""


@dataclass(frozen=True)
class Outline:
    """What adapters and methods must know of a model before it is loaded."""

    linears: Shapes
    """Linear projections by module name, all but the output head."""
    embedding: str
    """The input embedding table's name in a checkpoint."""


def outline(model_type: str, config: Mapping[str, Any]) -> Outline:
    """Outline a model by its family's tables, or else by the model itself without weights.

    Raises:
        ConfigError: no model that adapters could be added to can be made of it.
        KeyError, TypeError, ZeroDivisionError: the configuration lacks a size.
    """
    family = family_of_type(model_type, config)
    if family.stacks:
        return Outline(linear_shapes(family, config), family.embedding)
    return _of_empty_model(model_type, canonical_json(dict(config)))


@lru_cache(maxsize=16)
def _of_empty_model(model_type: str, config: str) -> Outline:
    import torch

    found = model_config(model_type, json.loads(config))
    architecture = model_class(found)
    try:
        with torch.device("meta"):
            model = architecture(found)
    except Exception as error:  # whatever sizes that do not fit together raise
        raise ConfigError(
            f"model_type {model_type!r}, of which transformers makes no model with this configuration: {error!r}; copy "
            "the checkpoint's config.json again"
        ) from error
    linears = linears_of(model)
    if not linears:
        others = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.startswith("Conv")})
        instead = f"its projections are {' and '.join(others)}" if others else "it has none"
        raise ConfigError(
            f"model_type {model_type!r}; adapters are added to projections of the type nn.Linear, and {instead}. Take "
            "a model whose projections are nn.Linear, e.g. one of the families gpt_neo, gpt_neox, opt or llama"
        )
    return Outline(linears, embedding_name(model))


def model_config(model_type: str, config: Mapping[str, Any]) -> Any:
    """The transformers configuration object of a family; what is raised begins with the family.

    Raises:
        ConfigError: transformers does not know the family, or takes no such configuration.
    """
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model_type {model_type!r}, which transformers {transformers.__version__} does not know; install the "
            "version that its model card names, or take another backbone"
        )
    try:
        return transformers.CONFIG_MAPPING[model_type](
            **{name: value for name, value in config.items() if name not in ("model_type", "transformers_version")}
        )
    except Exception as error:  # whatever its checks raise, which differ from family to family
        raise ConfigError(
            f"model_type {model_type!r}, and transformers takes no such configuration of one: {error}; copy the "
            "checkpoint's config.json again"
        ) from error


def model_class(config: Any) -> Any:
    """The class of the model that reads and writes text with this transformers configuration; errors as above.

    Raises:
        ConfigError: there is none, or it is none that adapters can be added to here.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    found = mapping.get(type(config), None)
    if isinstance(found, tuple):
        found = found[0]
    why = refusal(config.model_type, {name: getattr(config, name, False) for name in TOLD})
    if why or config.model_type in FAMILIES:
        pass
    elif found is None:
        why = "it does not write text by itself"
    elif config.get_text_config() is not config and not config.is_encoder_decoder:
        why = "it is made of several models; give a checkpoint of text alone"
    elif getattr(found, "_is_stateful", False) or set(getattr(config, "layer_types", None) or ()) - ATTENDING:
        why = "it answers from a state instead of keys and values"
    if why:
        raise ConfigError(f"model_type {config.model_type!r}; {SUPPORTED}; {why}")
    return found


def linears_of(model: Any) -> dict[str, tuple[int, int]]:
    """Names and shapes (out, in) of a model's linear projections but the output head, in the order of its modules."""
    import torch

    head = model.get_output_embeddings()
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def embedding_name(model: Any) -> str:
    """The name of the input embedding table among a model's parameters."""
    table = model.get_input_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is table)
