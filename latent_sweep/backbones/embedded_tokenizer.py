"""Read the embedded backbone's tokenizer from its package, without torch, transformers or a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_sweep.backbones.files import EMBEDDED_FILE, embedded_package, embedded_version
from latent_sweep.backbones.registry import EMBEDDED
from latent_sweep.errors import ConfigError
from latent_sweep.storage.files import cache_folder, write_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = 3
"""GGUF's type of control tokens."""


def embedded_tokenizer_file() -> Path | None:
    """Return the embedded backbone's tokenizer.json, written on first use; None if its package is missing."""
    try:
        folder = cache_folder() / f"{EMBEDDED}-{embedded_version()}-tokenizer"
    except ConfigError:
        return None
    path = folder / "tokenizer.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, read_tokenizer(embedded_package() / EMBEDDED_FILE).to_str(pretty=True).encode())
    return path


def read_tokenizer(path: Path) -> Tokenizer:
    """Build the same tokenizer as transformers does from a GGUF file."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    fields: Any = GGUFReader(path).fields
    tokens, types, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocabulary, pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer
