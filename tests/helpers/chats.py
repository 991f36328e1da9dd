"""A tokenizer with a chat template, for the tiny backbones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latent_sweep.backbones.tokenizers import byte_tokenizer


def chatting_tokenizer(folder: Path) -> Any:
    """Bytes with a template whose turns end otherwise than with EOS, saved to a folder.

    They end with a token that the bytes have: tiny models know no other.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<unk>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
