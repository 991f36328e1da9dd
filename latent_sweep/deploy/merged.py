"""Export a model merged into its backbone: a transformers folder with weights, configuration and tokenizer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from latent_sweep.backbones.packaged import WEIGHTS
from latent_sweep.deploy.adapters import adapter_for
from latent_sweep.deploy.card import card, front_matter, prompts_end, provenance
from latent_sweep.deploy.folder import new_folder
from latent_sweep.errors import ConfigError
from latent_sweep.storage.files import committing, write_file

if TYPE_CHECKING:
    from latent_sweep.deploy.adapters import Adapter
    from latent_sweep.deploy.model import ContinualModel


def export_merged(model: ContinualModel, folder: str | Path, task: str | None = None) -> Path:
    """Write the backbone with a task's adapter, or the only one, added to its weights.

    Raises ConfigError if the adapter is ambiguous or no LoRA adapter, or the folder is not empty; StorageError.
    """
    backbone = model.context.backbone
    if not backbone.whole:
        raise ConfigError("backbone: its weights are sharded over several workers; merge it where one holds them all")
    adapter = adapter_for(model, task)
    path = new_folder(folder)
    weights = {name: weight.detach() for name, weight in backbone.model.named_parameters()}  # a tied one once
    for name, update in zip(backbone.targets, adapter.updates(), strict=True):
        W = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = (W.float() + update).to(W.dtype)
    kept = backbone.model.state_dict().keys()  # persistent buffers, e.g. BART's vocabulary bias
    weights |= {name: buffer for name, buffer in backbone.model.named_buffers() if name in kept}
    # the model's own method looks for accelerators and prints about them
    config = backbone.model.config.to_dict()
    config |= {"architectures": [type(backbone.model).__name__], "dtype": model.trial.settings.backbone.dtype}
    # transformers' T5 always says that the head is tied
    config["tie_word_embeddings"] = (
        backbone.model.get_output_embeddings().weight is backbone.model.get_input_embeddings().weight
    )
    write_file(path / "config.json", json.dumps(config, indent=2, sort_keys=True).encode())
    with committing(path):
        save_file({n: w.cpu().contiguous() for n, w in weights.items()}, path / WEIGHTS, metadata={"format": "pt"})
        generation = copy.deepcopy(backbone.model.generation_config)
        if model.context.chat is not None:  # training ended answers there, not at the base model's EOS
            eos = generation.eos_token_id
            ends = eos if isinstance(eos, list) else [eos] if eos is not None else []
            generation.eos_token_id = [*ends, *({model.context.chat.end} - {*ends})]
        generation.save_pretrained(path)
        backbone.tokenizer.save_pretrained(path)
    write_file(path / "README.md", _card(model, adapter))
    return path


def _card(model: ContinualModel, adapter: Adapter) -> bytes:
    dtype = model.trial.settings.backbone.dtype
    rounding = (
        "Merged weights are rounded to bfloat16, unlike a separate adapter: a near tie of two tokens can go the other "
        "way. "
        if dtype == "bfloat16"
        else ""
    )
    return card(
        front_matter(model.content, "transformers"),
        f"# {model.trial.settings.method.name}, merged {adapter.learned}",
        f"The backbone with the adapter `{adapter.name}` added to its weights: no adapter needs to be loaded. "
        f"{rounding}{prompts_end(model.context)}",
        *provenance(model.content, model.context),
    )
