"""Rows of token ids as batches, and one pass of the frozen model over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latent_sweep.adapters.bank import Adaptation, AdapterBank
from latent_sweep.backbones.layouts import Indices, Padded, Shared, aligned, moved
from latent_sweep.backbones.loading import Backbone
from latent_sweep.backbones.outputs import Example, Outputs
from latent_sweep.backbones.sharing import pays_in_a_step

WORTHWHILE = 0.95
"""Sharing must bring the tokens down to this part: moving them for attention costs some 5 % of a small model's step."""

Reading = Callable[[Tensor | None, Tensor | None], AbstractContextManager[None]]
"""Watches what projections read within its block."""


@dataclass(frozen=True)
class Batch:
    """Rows ready for the backbone, those of one member after those of another."""

    inputs: Mapping[str, Any]
    """Arguments of the model's forward pass."""
    labels: Tensor
    """(targets,) token ids of all targets, row after row."""
    keep: Tensor
    """(targets,) where the model predicts them, sequences and tokens counted together."""
    counts: Sequence[int]
    """How many sequences of the model's input belong to each member."""
    standing_for: Indices
    """(sequences, tokens) how many tokens of rows each token stands for: 0 is padding; with an encoder, of prompts."""
    standing_for_target: Indices | None = None
    """The same of the decoder behind an encoder."""


def collate(members: Sequence[Sequence[Example]], backbone: Backbone, alike: bool = False) -> Batch:
    """Make one batch of the members' rows.

    Args:
        alike: whether each member's adaptation is the same for all of its rows: then a causal model reads what they
            begin with once, where that is worth while.
    """
    if backbone.traits.encoder_decoder:
        return _of_encoder_decoder(members, backbone)
    longest = max(len(row["prompt_ids"]) + len(row["target_ids"]) for rows in members for row in rows)
    if alike and backbone.lays_out(longest):
        layout = _shared(members, backbone)
        if _is_worthwhile(layout.members * layout.tokens, longest * sum(map(len, members)), backbone):
            return _sharing(members, layout, backbone)
    return _padded(members, backbone)


def _is_worthwhile(shared: int, padded: int, backbone: Backbone) -> bool:
    """Whether a step with so many tokens in its input is faster where rows share than where they are padded."""
    if shared > WORTHWHILE * padded:
        return False
    return backbone.device.type == "cpu" or pays_in_a_step(backbone, padded, shared)


def _padded(members: Sequence[Sequence[Example]], backbone: Backbone) -> Batch:
    """A sequence for every row: prompt, target, padding."""
    rows = [row for of_member in members for row in of_member]
    ids, real = _rectangle([[*row["prompt_ids"], *row["target_ids"]] for row in rows], backbone.pad_id)
    starts = np.arange(len(rows)) * ids.shape[1]
    inputs: dict[str, Any] = {"input_ids": moved(ids, backbone.device)}
    if backbone.lays_out(ids.shape[1]):
        # four dimensions: transformers leaves such a mask alone, and does not ask the device what is in it
        inputs |= {"attention_mask": torch.empty(1, 1, 1, 1, device=backbone.device), "layout": Padded()}
    else:
        inputs |= {"attention_mask": moved(real.astype(np.int64), backbone.device)}
    return _batch(rows, inputs, starts, 0, list(map(len, members)), real.astype(np.int64), backbone)


def _shared(members: Sequence[Sequence[Example]], backbone: Backbone) -> Shared:
    """Lay out members' rows with what each one's have in common in front, as many tokens for all of them.

    Every row keeps the last token of its prompt to itself: that is where its answer begins.
    """
    shared = min(common_tokens([row["prompt_ids"] for row in rows]) for rows in members)
    rests = [[len(row["prompt_ids"]) + len(row["target_ids"]) - shared for row in rows] for rows in members]
    return Shared(shared, rests, backbone.device)


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with, without the last one of the shortest."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _sharing(members: Sequence[Sequence[Example]], layout: Shared, backbone: Backbone) -> Batch:
    """One sequence for every member."""
    n, rows = layout.shared, [row for of_member in members for row in of_member]
    ids = np.full((layout.members, layout.tokens), backbone.pad_id, np.int64)
    for place, of_member in zip(ids, members, strict=True):
        tokens = [t for row in of_member for t in (*row["prompt_ids"][n:], *row["target_ids"])]
        place[: n + len(tokens)] = [*of_member[0]["prompt_ids"][:n], *tokens]
    inputs = {
        "input_ids": moved(ids, backbone.device),
        "position_ids": moved(layout.positions, backbone.device),
        "attention_mask": torch.empty(1, 1, 1, 1, device=backbone.device),  # see above
        "layout": layout,
    }
    return _batch(rows, inputs, layout.starts, n, [1] * len(members), layout.standing_for, backbone)


def _batch(
    rows: Sequence[Example],
    inputs: Mapping[str, Any],
    starts: Indices,
    before: int,
    counts: Sequence[int],
    standing_for: Indices,
    backbone: Backbone,
) -> Batch:
    """Find the labels, and where they are predicted: each by the token before it.

    Args:
        starts: where each row begins in the input, without its first `before` tokens.
    """
    first = [start + len(row["prompt_ids"]) - before - 1 for start, row in zip(starts, rows, strict=True)]
    keep = [start + np.arange(len(row["target_ids"])) for start, row in zip(first, rows, strict=True)]
    labels = np.array([token for row in rows for token in row["target_ids"]], np.int64)
    targets = moved(labels, backbone.device), moved(np.concatenate(keep), backbone.device)
    return Batch(inputs, *targets, counts, standing_for)


def _of_encoder_decoder(members: Sequence[Sequence[Example]], backbone: Backbone) -> Batch:
    """An encoder-decoder: prompts padded behind; the decoder reads the targets, one token late."""
    rows = [row for of_member in members for row in of_member]
    ids, real = _rectangle([row["prompt_ids"] for row in rows], backbone.pad_id)
    start = backbone.model.config.decoder_start_token_id
    said, real_targets = _rectangle([[start, *row["target_ids"][:-1]] for row in rows], backbone.pad_id)
    inputs: dict[str, Any] = {"input_ids": moved(ids, backbone.device)}
    inputs |= {"decoder_input_ids": moved(said, backbone.device)}
    if backbone.traits.laid_out:
        inputs |= {"attention_mask": moved(real[:, None, None, :], backbone.device)}
        inputs |= {"layout": Padded(backbone.traits.shared_bias)}
    else:
        inputs |= {"attention_mask": moved(real.astype(np.int64), backbone.device)}
    labels = np.array([token for row in rows for token in row["target_ids"]], np.int64)
    targets = moved(labels, backbone.device), moved(np.flatnonzero(real_targets), backbone.device)
    counts = [len(of_member) for of_member in members]
    return Batch(inputs, *targets, counts, real.astype(np.int64), real_targets.astype(np.int64))


def read(
    backbone: Backbone, rows: Sequence[Example], adaptation: Adaptation, bank: AdapterBank, reading: Reading
) -> None:
    """Run the backbone over rows for what its projections read.

    Args:
        reading: watches the pass; it is told how many tokens each token stands for, (sequences, tokens), of the
            prompts' side and of T5's decoder.
    """
    batch = collate([rows], backbone, adaptation.uniform)
    told = (batch.standing_for, batch.standing_for_target)
    counts = [None if found is None else moved(found, backbone.device) for found in told]
    with reading(*counts), bank.active(adaptation), _keeping(backbone, batch.keep[:1]):
        backbone.model(**batch.inputs, use_cache=False)


def read_padded(
    backbone: Backbone,
    rows: Sequence[Example],
    adaptation: Adaptation,
    bank: AdapterBank,
    reading: Reading,
    released: bool = False,
) -> None:
    """Run it as trainers do that pad a causal model's rows in front, with padding counted as tokens.

    Args:
        released: pad with GainLoRA's tokens, as transformers 4.30 does: a decoder behind an encoder reads EOS and then
            padding behind a short target, since labels are shifted after they were padded; a causal model reads BOS, if
            its tokenizer has one, and padding attends to all tokens of its row alike.
    """
    if backbone.traits.encoder_decoder:
        inputs = dict(collate([rows], backbone).inputs)
        if released:
            inputs |= {"decoder_input_ids": _shifted_after_padding(rows, backbone)}
    else:
        bos = backbone.tokenizer.bos_token_id if released else None
        ids, mask = pad_prompts([[*row["prompt_ids"], *row["target_ids"]] for row in rows], backbone, bos)
        inputs = {"input_ids": ids, "attention_mask": mask, **placed(backbone, positions(mask))}
        if released and backbone.lays_out(ids.shape[1]):
            inputs |= {"attention_mask": _masked_by_a_minimum(mask, backbone.model.dtype)}
    one = torch.zeros(1, dtype=torch.long, device=backbone.device)
    with reading(None, None), bank.active(adaptation), _keeping(backbone, one):
        backbone.model(**inputs, use_cache=False)


def _rectangle(sequences: Sequence[Sequence[int]], value: int, in_front: bool = False) -> tuple[Indices, Any]:
    """Token ids padded behind, or in front, (rows, longest), and which of them are no padding."""
    lengths = np.array(list(map(len, sequences)))
    longest = lengths.max()
    real = np.arange(longest) >= longest - lengths[:, None] if in_front else np.arange(longest) < lengths[:, None]
    ids = np.full(real.shape, value, np.int64)
    ids[real] = [token for sequence in sequences for token in sequence]
    return ids, real


def _shifted_after_padding(rows: Sequence[Example], backbone: Backbone) -> Tensor:
    """Return what a decoder reads, (B, longest target), whole targets with their EOS."""
    longest, start = max(len(row["target_ids"]) for row in rows), backbone.model.config.decoder_start_token_id
    ids, _ = _rectangle([[start, *row["target_ids"]][:longest] for row in rows], backbone.pad_id)
    return moved(ids, backbone.device)


def _masked_by_a_minimum(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask, (B, 1, tokens, tokens), of a causal model whose rows have this mask of padding.

    What is not attended to has the smallest finite number. Padding in front attends to nothing, so that all its scores
    round to that number, and it reads the mean of its row.
    """
    seen = mask[:, None, None, :].bool() & torch.ones_like(mask[0]).bool().expand(mask.shape[1], -1).tril()
    return aligned(torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min))


def pad_prompts(
    prompts: Sequence[Sequence[int]], backbone: Backbone, padding: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, (B, longest): padded on the left, or on the right where an encoder reads them.

    Args:
        padding: token id to pad with; None is the backbone's.
    """
    padding = backbone.pad_id if padding is None else padding
    ids, real = _rectangle(prompts, padding, in_front=not backbone.traits.encoder_decoder)
    return moved(ids, backbone.device), moved(real.astype(np.int64), backbone.device)


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its own row, whatever padding stands before it."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def placed(backbone: Backbone, positions: Tensor) -> dict[str, Tensor]:
    """Return the argument that says where tokens stand, of models that take one; the others count by their masks."""
    return {"position_ids": positions} if "position_ids" in backbone.accepts else {}


def last_positions(ids: Tensor, count: int) -> Tensor:
    """Indices of the last `count` columns, for `logits_to_keep`.

    A tensor and not a number, because a slice of the hidden states is not contiguous, and the language-model head
    would copy its weight for every row: that was half of a training step on CPU.
    """
    return torch.arange(ids.shape[1] - count, ids.shape[1], device=ids.device)


def label_logits(backbone: Backbone, batch: Batch) -> Tensor:
    """Logits where there are labels, (targets, vocabulary): the language-model head runs nowhere else."""
    with _keeping(backbone, batch.keep):
        return backbone.model(**batch.inputs, use_cache=False).logits[0]


@contextmanager
def _keeping(backbone: Backbone, keep: Tensor) -> Iterator[None]:
    """Have the language-model head see these tokens alone, as one sequence."""

    def kept(head: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (states,) = inputs
        return (states.flatten(0, 1).index_select(0, keep)[None],)

    handle = backbone.model.get_output_embeddings().register_forward_pre_hook(kept)
    try:
        yield
    finally:
        handle.remove()


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
    batch = collate([rows], backbone, adaptation.uniform)
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
