"""Benchmark settings, tasks and encoded prompts for tests of data."""

from __future__ import annotations

from typing import Any

from latent_sweep.backbones.tokenizers import byte_tokenizer
from latent_sweep.data.schema import BenchmarkSettings, BenchmarkSpec, TaskSpec


def settings_of(name: object = "builtin", **changes: Any) -> BenchmarkSettings:
    """Return settings that name a benchmark, with the limits of T5."""
    limits = {"max_source_length": 512, "max_target_length": 50}
    return BenchmarkSettings.model_validate({"name": str(name), **limits, **changes})


def task_of(spec: BenchmarkSpec, name: str) -> TaskSpec:
    """Return the task of this name."""
    return next(task for task in spec.tasks if task.name == name)


def bos_tokenizer() -> Any:
    """Return the byte tokenizer of the tiny models, which here starts every text with BOS, as Llama's does."""
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer
