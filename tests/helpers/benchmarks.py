"""Benchmark settings, tasks and encoded prompts for tests of data."""

from __future__ import annotations

from typing import Any

from latent_sweep.data.schema import BenchmarkSettings, BenchmarkSpec, TaskSpec


def settings_of(name: object = "builtin", **changes: Any) -> BenchmarkSettings:
    """Return settings that name a benchmark, with the limits of T5."""
    limits = {"max_source_length": 512, "max_target_length": 50}
    return BenchmarkSettings.model_validate({"name": str(name), **limits, **changes})


def task_of(spec: BenchmarkSpec, name: str) -> TaskSpec:
    """Return the task of this name."""
    return next(task for task in spec.tasks if task.name == name)


def starting_with_bos(tokenizer: Any) -> Any:
    """Return a tokenizer changed to start every text with BOS, as Llama's does."""
    from tokenizers import processors

    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    template = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer
