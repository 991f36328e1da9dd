"""Rows of token ids as padded batches, and one pass of the frozen model over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from latent_sweep.adapters.bank import Adaptation, AdapterBank
from latent_sweep.backbones.loading import Backbone
from latent_sweep.backbones.outputs import IGNORED, Example, Outputs


@dataclass(frozen=True)
class Batch:
    """Rows ready for the backbone. B rows, L target positions (the longest target of the batch)."""

    inputs: Mapping[str, Tensor]
    """Arguments of the model's forward pass."""
    labels: Tensor
    """(B, L) token ids, IGNORED where a shorter target has none."""


def collate(examples: Sequence[Example], backbone: Backbone) -> Batch:
    """Prompts and targets as one padded batch.

    Llama: prompt and target are one sequence, padded on the left, so that all targets end in the last column and
    logits are needed at the last L + 1 positions only. T5: prompts padded on the right; the decoder reads the targets.
    """
    prompts = [list(example["prompt_ids"]) for example in examples]
    targets = [list(example["target_ids"]) for example in examples]
    longest = max(map(len, targets))
    on_the_left = backbone.family == "llama"
    labels = _pad(targets, IGNORED, longest, on_the_left)
    if on_the_left:
        ids, mask = pad_prompts([p + t for p, t in zip(prompts, targets, strict=True)], backbone)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
        inputs["logits_to_keep"] = last_positions(ids, longest + 1)
    else:
        ids, mask = pad_prompts(prompts, backbone)
        start = backbone.model.config.decoder_start_token_id
        decoder_ids = _pad([[start, *target[:-1]] for target in targets], backbone.pad_id, longest, False)
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids.to(backbone.device)}
    return Batch(inputs, labels.to(backbone.device))


def pad_prompts(prompts: Sequence[Sequence[int]], backbone: Backbone) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, (B, longest): padded on the left for Llama, on the right for T5."""
    longest = max(map(len, prompts))
    on_the_left = backbone.family == "llama"
    ids = _pad(prompts, backbone.pad_id, longest, on_the_left)
    mask = _pad([[1] * len(prompt) for prompt in prompts], 0, longest, on_the_left)
    return ids.to(backbone.device), mask.to(backbone.device)


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its own row, whatever padding stands before it."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def last_positions(ids: Tensor, count: int) -> Tensor:
    """Indices of the last `count` columns, for `logits_to_keep`.

    A tensor and not a number, because a slice of the hidden states is not contiguous, and the language-model head
    would copy its weight for every row: that was half of a training step on CPU.
    """
    return torch.arange(ids.shape[1] - count, ids.shape[1], device=ids.device)


def _pad(sequences: Sequence[Sequence[int]], value: int, length: int, on_the_left: bool) -> Tensor:
    padded = [[value] * (length - len(s)) for s in sequences]
    rows = [p + list(s) if on_the_left else list(s) + p for p, s in zip(padded, sequences, strict=True)]
    return torch.tensor(rows, dtype=torch.long)


def label_logits(backbone: Backbone, batch: Batch) -> Tensor:
    """Logits at the label positions, (B, L, vocabulary): the language-model head runs nowhere else."""
    logits = backbone.model(**batch.inputs, use_cache=False).logits
    return logits[:, :-1] if backbone.family == "llama" else logits


def forward(
    backbone: Backbone,
    bank: AdapterBank,
    rows: Sequence[Example],
    adaptation: Adaptation,
    denominator: float = 1.0,
    drop_out: bool | None = None,
) -> Outputs:
    """Run the backbone over rows under an adaptation: for a teacher, for statistics of a task, for validation.

    Args:
        drop_out: whether the backbone's own dropout acts, where it is on: if not said, where gradients are needed.
    """
    batch = collate(rows, backbone)
    acts = torch.is_grad_enabled() if drop_out is None else drop_out
    with bank.active(adaptation), nullcontext() if acts else backbone.dropout(0.0):
        return Outputs(rows, label_logits(backbone, batch), batch.labels, denominator)


def chunked(batches: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[int]]:
    """Yield every batch in parts of at most `size` rows, none of them of two batches."""
    for batch in batches:
        yield from (batch[start : start + size] for start in range(0, len(batch), size))


def epoch_batches(
    lengths: Sequence[int], batch_size: int, generator: torch.Generator, group_by_length: bool
) -> list[list[int]]:
    """Row indices of one epoch's batches; the last may be smaller.

    With `group_by_length`, rows are shuffled, sorted by length within stretches of eight batches, and the batches
    shuffled: little padding, and still another composition every epoch.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    if not group_by_length:
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    stretch = 8 * batch_size
    batches = []
    for start in range(0, len(order), stretch):
        rows = sorted(order[start : start + stretch], key=lambda row: lengths[row])
        batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
