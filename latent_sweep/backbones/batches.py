"""Collate tokenized examples into batches, and run the frozen model over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latent_sweep.adapters.bank import Adaptation, AdapterBank
from latent_sweep.backbones.layouts import Indices, Padded, Shared, aligned, to_device
from latent_sweep.backbones.loading import Backbone
from latent_sweep.backbones.outputs import Example, Outputs
from latent_sweep.backbones.sharing import pays_in_a_step

WORTHWHILE = 0.95
"""Sharing must reduce tokens to this share: moving them for attention costs some 5 % of a small model's step."""

Reading = Callable[[Tensor | None, Tensor | None], AbstractContextManager[None]]


@dataclass(frozen=True)
class Batch:
    """Examples ready for the backbone, grouped by run."""

    inputs: Mapping[str, Any]
    """Arguments of the model's forward pass."""
    labels: Tensor
    """(targets,) token ids of all targets, example after example."""
    keep: Tensor
    """(targets,) indices of the tokens that predict them, in the flattened batch."""
    counts: Sequence[int]
    """Number of input sequences per run."""
    multiplicity: Indices
    """(sequences, tokens) number of examples that each token belongs to: 0 is padding; of an encoder's input."""
    target_multiplicity: Indices | None = None
    """The same for the decoder of an encoder-decoder."""


def collate(runs: Sequence[Sequence[Example]], backbone: Backbone, uniform: bool = False) -> Batch:
    """Make one batch of the examples of several runs.

    A causal model reads common prefixes once if that saves time and each run's adaptation is `uniform` over its rows.
    """
    if backbone.traits.encoder_decoder:
        return _encoder_decoder(runs, backbone)
    longest = max(len(row["prompt_ids"]) + len(row["target_ids"]) for rows in runs for row in rows)
    if uniform and backbone.lays_out(longest):
        layout = _shared_layout(runs, backbone)
        if _is_worthwhile(layout.runs * layout.tokens, longest * sum(map(len, runs)), backbone):
            return _shared(runs, layout, backbone)
    return _padded(runs, backbone)


def _is_worthwhile(shared: int, padded: int, backbone: Backbone) -> bool:
    if shared > WORTHWHILE * padded:
        return False
    return backbone.device.type == "cpu" or pays_in_a_step(backbone, padded, shared)


def _padded(runs: Sequence[Sequence[Example]], backbone: Backbone) -> Batch:
    rows = [row for of_run in runs for row in of_run]
    ids, real = _rectangle([[*row["prompt_ids"], *row["target_ids"]] for row in rows], backbone.pad_id)
    starts = np.arange(len(rows)) * ids.shape[1]
    inputs: dict[str, Any] = {"input_ids": to_device(ids, backbone.device)}
    if backbone.lays_out(ids.shape[1]):
        # transformers leaves four-dimensional masks alone and does not read them back from the device
        inputs |= {"attention_mask": torch.empty(1, 1, 1, 1, device=backbone.device), "layout": Padded()}
    else:
        inputs |= {"attention_mask": to_device(real.astype(np.int64), backbone.device)}
    return _batch(rows, inputs, starts, 0, list(map(len, runs)), real.astype(np.int64), backbone)


def _shared_layout(runs: Sequence[Sequence[Example]], backbone: Backbone) -> Shared:
    """Lay out each run's examples behind their common prefix, equally long for all runs."""
    shared = min(common_tokens([row["prompt_ids"] for row in rows]) for rows in runs)
    rests = [[len(row["prompt_ids"]) + len(row["target_ids"]) - shared for row in rows] for rows in runs]
    return Shared(shared, rests, backbone.device)


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens of the common prefix of all prompts, excluding the last token of the shortest."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _shared(runs: Sequence[Sequence[Example]], layout: Shared, backbone: Backbone) -> Batch:
    n, rows = layout.shared, [row for of_run in runs for row in of_run]
    ids = np.full((layout.runs, layout.tokens), backbone.pad_id, np.int64)
    for sequence, of_run in zip(ids, runs, strict=True):
        tokens = [t for row in of_run for t in (*row["prompt_ids"][n:], *row["target_ids"])]
        sequence[: n + len(tokens)] = [*of_run[0]["prompt_ids"][:n], *tokens]
    inputs = {
        "input_ids": to_device(ids, backbone.device),
        "position_ids": to_device(layout.positions, backbone.device),
        "attention_mask": torch.empty(1, 1, 1, 1, device=backbone.device),  # as in `_padded`
        "layout": layout,
    }
    return _batch(rows, inputs, layout.starts, n, [1] * len(runs), layout.multiplicity, backbone)


def _batch(
    rows: Sequence[Example],
    inputs: Mapping[str, Any],
    starts: Indices,
    before: int,
    counts: Sequence[int],
    multiplicity: Indices,
    backbone: Backbone,
) -> Batch:
    """Add the labels and the indices that predict them; `starts` index each row's first token after `before` tokens."""
    first = [start + len(row["prompt_ids"]) - before - 1 for start, row in zip(starts, rows, strict=True)]
    keep = [start + np.arange(len(row["target_ids"])) for start, row in zip(first, rows, strict=True)]
    labels = np.array([token for row in rows for token in row["target_ids"]], np.int64)
    targets = to_device(labels, backbone.device), to_device(np.concatenate(keep), backbone.device)
    return Batch(inputs, *targets, counts, multiplicity)


def _encoder_decoder(runs: Sequence[Sequence[Example]], backbone: Backbone) -> Batch:
    rows = [row for of_run in runs for row in of_run]
    ids, real = _rectangle([row["prompt_ids"] for row in rows], backbone.pad_id)
    start = backbone.model.config.decoder_start_token_id
    decoder_ids, real_targets = _rectangle([[start, *row["target_ids"][:-1]] for row in rows], backbone.pad_id)
    inputs: dict[str, Any] = {"input_ids": to_device(ids, backbone.device)}
    inputs |= {"decoder_input_ids": to_device(decoder_ids, backbone.device)}
    if backbone.traits.laid_out:
        inputs |= {"attention_mask": to_device(real[:, None, None, :], backbone.device)}
        inputs |= {"layout": Padded(backbone.traits.shared_bias)}
    else:
        inputs |= {"attention_mask": to_device(real.astype(np.int64), backbone.device)}
    labels = np.array([token for row in rows for token in row["target_ids"]], np.int64)
    targets = to_device(labels, backbone.device), to_device(np.flatnonzero(real_targets), backbone.device)
    counts = [len(of_run) for of_run in runs]
    return Batch(inputs, *targets, counts, real.astype(np.int64), real_targets.astype(np.int64))


def read(
    backbone: Backbone, rows: Sequence[Example], adaptation: Adaptation, bank: AdapterBank, reading: Reading
) -> None:
    """Run the backbone over rows within `reading`, which observes the inputs of its projections.

    It is called with the multiplicity of each token, (sequences, tokens), of prompts and of a decoder's input.
    """
    batch = collate([rows], backbone, adaptation.uniform)
    multiplicities = (batch.multiplicity, batch.target_multiplicity)
    counts = [None if each is None else to_device(each, backbone.device) for each in multiplicities]
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
    """Run the backbone as trainers do that pad a causal model's rows on the left and count padding as tokens.

    With `released`, pad as GainLoRA's code with transformers 4.30. A decoder reads EOS and then padding after a short
    target, since labels are shifted after padding. A causal model's padding is BOS and attends to its row alike.
    """
    if backbone.traits.encoder_decoder:
        inputs = dict(collate([rows], backbone).inputs)
        if released:
            inputs |= {"decoder_input_ids": _shifted_after_padding(rows, backbone)}
    else:
        bos = backbone.tokenizer.bos_token_id if released else None
        ids, mask = pad_prompts([[*row["prompt_ids"], *row["target_ids"]] for row in rows], backbone, bos)
        inputs = {"input_ids": ids, "attention_mask": mask, **position_argument(backbone, positions(mask))}
        if released and backbone.lays_out(ids.shape[1]):
            inputs |= {"attention_mask": _masked_by_a_minimum(mask, backbone.model.dtype)}
    first = torch.zeros(1, dtype=torch.long, device=backbone.device)
    with reading(None, None), bank.active(adaptation), _keeping(backbone, first):
        backbone.model(**inputs, use_cache=False)


def _rectangle(sequences: Sequence[Sequence[int]], value: int, in_front: bool = False) -> tuple[Indices, Any]:
    """Pad token ids, (rows, longest), on the right or left; also return which are not padding."""
    lengths = np.array(list(map(len, sequences)))
    longest = lengths.max()
    real = np.arange(longest) >= longest - lengths[:, None] if in_front else np.arange(longest) < lengths[:, None]
    ids = np.full(real.shape, value, np.int64)
    ids[real] = [token for sequence in sequences for token in sequence]
    return ids, real


def _shifted_after_padding(rows: Sequence[Example], backbone: Backbone) -> Tensor:
    """Return a decoder's input, (B, longest target), with whole targets and their EOS."""
    longest, start = max(len(row["target_ids"]) for row in rows), backbone.model.config.decoder_start_token_id
    ids, _ = _rectangle([[start, *row["target_ids"]][:longest] for row in rows], backbone.pad_id)
    return to_device(ids, backbone.device)


def _masked_by_a_minimum(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive causal mask, (B, 1, tokens, tokens): padding, all masked, reads the mean of its row."""
    seen = mask[:, None, None, :].bool() & torch.ones_like(mask[0]).bool().expand(mask.shape[1], -1).tril()
    return aligned(torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min))


def pad_prompts(
    prompts: Sequence[Sequence[int]], backbone: Backbone, padding: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, (B, longest), padded on the left, or on the right for an encoder."""
    padding = backbone.pad_id if padding is None else padding
    ids, real = _rectangle(prompts, padding, in_front=not backbone.traits.encoder_decoder)
    return to_device(ids, backbone.device), to_device(real.astype(np.int64), backbone.device)


def positions(mask: Tensor) -> Tensor:
    """Return each token's position in its own row, not counting left padding."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def position_argument(backbone: Backbone, positions: Tensor) -> dict[str, Tensor]:
    """Return the positions as an argument of the forward pass, for models that accept them."""
    return {"position_ids": positions} if "position_ids" in backbone.accepts else {}


def last_positions(ids: Tensor, count: int) -> Tensor:
    """Return the indices of the last `count` columns, for `logits_to_keep`.

    A number would make transformers slice the hidden states, and the head copy its weight for every row.
    """
    return torch.arange(ids.shape[1] - count, ids.shape[1], device=ids.device)


def label_logits(backbone: Backbone, batch: Batch) -> Tensor:
    """Return the logits that predict the labels, (targets, vocabulary); the head runs on no other tokens."""
    with _keeping(backbone, batch.keep):
        return backbone.model(**batch.inputs, use_cache=False).logits[0]


@contextmanager
def _keeping(backbone: Backbone, keep: Tensor) -> Iterator[None]:
    """Restrict the language-model head to these tokens, as one sequence."""

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
    """Run the backbone over rows under an adaptation: for a teacher, for a task's statistics, for validation.

    The backbone's own dropout is active with `drop_out`, or by default if gradients are enabled.
    """
    batch = collate([rows], backbone, adaptation.uniform)
    active = torch.is_grad_enabled() if drop_out is None else drop_out
    with bank.active(adaptation), nullcontext() if active else backbone.dropout(0.0):
        return Outputs(rows, label_logits(backbone, batch), batch.labels, denominator)


def chunked(batches: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[int]]:
    for batch in batches:
        yield from (batch[start : start + size] for start in range(0, len(batch), size))


def epoch_batches(
    lengths: Sequence[int], batch_size: int, generator: torch.Generator, group_by_length: bool
) -> list[list[int]]:
    """Return the row indices of one epoch's batches; the last batch may be smaller.

    With `group_by_length`, rows are shuffled, sorted within groups of eight batches, and the batches shuffled.
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


def mixed_batches(
    lengths: Sequence[int],
    replayed: Sequence[int],
    batch_size: int,
    generator: torch.Generator,
    group_by_length: bool,
) -> list[list[int]]:
    """Return the batches of an epoch with replayed rows spread evenly over them; the last batch may be smaller.

    Any batch of b rows has the share of `replayed` in all rows times b, rounded down or up. The other rows, with these
    lengths, are ordered as by `epoch_batches`.
    """
    total = len(lengths) + len(replayed)
    ends = [min(start + batch_size, total) for start in range(0, total, batch_size)]
    shares = [end * len(replayed) // total for end in ends]
    own = torch.randperm(len(lengths), generator=generator).tolist()
    batches, own_ends = [], [end - share for end, share in zip(ends, shares, strict=True)]
    if group_by_length:
        for start, end in pairwise([0, *own_ends[7::8], len(own)]):
            own[start:end] = sorted(own[start:end], key=lambda row: lengths[row])
    for (start, end), (first, last) in zip(pairwise([0, *own_ends]), pairwise([0, *shares]), strict=True):
        batches.append([*own[start:end], *replayed[first:last]])
    if group_by_length:
        batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
    return batches


def taking_turns(count: int, start: int, end: int, generator: Callable[[int], torch.Generator]) -> list[int]:
    """Return entries start to end of an endless sequence that shuffles `count` indices anew in each turn.

    Args:
        generator: returns the generator of a turn (0-based).
    """
    turns = range(start // count, -(-end // count))
    order = [i for turn in turns for i in torch.randperm(count, generator=generator(turn)).tolist()]
    return order[start - turns.start * count : end - turns.start * count]
