"""Batched decoding with a key-value cache and one adapter per row.

Logits at the last position only; rows that have finished leave the cache; what all prompts begin with is read once;
and generation ends at the benchmark's stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicLayer

from latent_sweep.adapters.bank import Adaptation, AdapterBank
from latent_sweep.backbones.batches import last_positions, pad_prompts, positions
from latent_sweep.backbones.loading import Backbone

WORTHWHILE_TOKENS = 64
"""What prompts share is read once where that saves so many tokens: on CPU a pass more costs as much as 20 to 50."""

ROOM = 64
"""Tokens by which the key-value cache grows at once."""

Choice = Callable[[Tensor, Sequence[Sequence[int]]], Tensor]
"""Next token ids, (rows,), from logits (rows, vocabulary) and these rows' answers so far."""


def greedy(logits: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
    """The likeliest token of every row."""
    return logits.argmax(-1)


@dataclass(frozen=True)
class Sampler:
    """Draws every row's next token from its `top_k` likeliest ones.

    Raises:
        ValueError: no token or a penalty that is not positive was asked for.
    """

    top_k: int
    """Tokens to draw from."""
    repetition_penalty: float
    """Logits of tokens in the answer so far are divided by this where positive, else multiplied (CTRL); 1 is none."""
    generator: torch.Generator
    """Source of the draws, on the CPU: the same on every device."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k: found {self.top_k}, expected at least one token to draw from")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty: found {self.repetition_penalty}, expected more than 0; 1 is none")

    def __call__(self, logits: Tensor, answers: Sequence[Sequence[int]]) -> Tensor:
        """Choose a token for every row, as a `Choice` does; the logits stay as they are."""
        logits = logits.float().clone()
        for row, answer in zip(logits, answers, strict=True):
            seen = torch.tensor(sorted(set(answer)), dtype=torch.long, device=logits.device)
            scores = row[seen]
            row[seen] = torch.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
        values, tokens = logits.topk(min(self.top_k, logits.shape[-1]))
        drawn = torch.multinomial(values.softmax(-1).cpu(), 1, generator=self.generator)
        return tokens.gather(1, drawn.to(tokens.device))[:, 0]


def generate(
    backbone: Backbone,
    bank: AdapterBank,
    prompts: Sequence[Sequence[int]],
    adaptation: Adaptation,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    alike: bool = False,
    choose: Choice = greedy,
) -> list[list[int]]:
    """Answers, without their end-of-sequence token.

    Args:
        prompts: token ids of each row's prompt.
        adaptation: what the backbone gets, row by row in the order of `prompts`.
        max_new_tokens: longest answer, in tokens.
        stop: an answer ends where one of these strings appears after some text; `answer_text` cuts there.
        alike: the adaptation holds for every row of any batch; what all prompts begin with is then read once.
        choose: picks every next token.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # rows of the batch that are still answering
    backbone.before_answering()
    with torch.inference_mode(), bank.active(adaptation):
        decoder = _decoder(backbone, prompts, alike)
        for _ in range(max_new_tokens):
            tokens = choose(decoder.next_logits(), [answers[row] for row in rows])
            going = []
            for index, token in enumerate(tokens.tolist()):
                if token == backbone.eos_id:
                    continue
                answers[rows[index]].append(token)
                if not stop or not _has_stopped(backbone, answers[rows[index]], stop):
                    going.append(index)
            if not going:
                break
            if len(going) < len(rows):
                kept = torch.tensor(going, device=backbone.device)
                rows = [rows[index] for index in going]
                tokens = tokens[kept]
                decoder.select(kept)
                bank.select(kept)
            decoder.feed(tokens)
    return answers


def answer_text(backbone: Backbone, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The answer as text, cut at the first stop string, without surrounding blanks."""
    text = backbone.tokenizer.decode(list(ids), skip_special_tokens=True).lstrip()
    for mark in stop:
        text = text.partition(mark)[0]
    return text.strip()


def _has_stopped(backbone: Backbone, ids: Sequence[int], stop: Sequence[str]) -> bool:
    text = backbone.tokenizer.decode(list(ids), skip_special_tokens=True).lstrip()
    return any(mark in text for mark in stop)


class _RoomyLayer(DynamicLayer):
    """Keys and values of one layer with room for tokens to come; transformers' own copies all of them for every token.

    They are the filled part of a buffer (2, rows, heads, tokens and room, width).
    """

    def update(self, keys: Tensor, values: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values, (rows, heads, new, width); returns all of them."""
        new = torch.stack([keys, values])
        start = self.get_seq_length()
        end = start + new.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self._buffer = new[..., :0, :]
        if end > self._buffer.shape[-2]:
            room = new.new_empty(*new.shape[:-2], end - start + ROOM, new.shape[-1])
            self._buffer = torch.cat([self._buffer[..., :start, :], room], dim=-2)
        self._buffer[..., start:end, :] = new
        self.keys, self.values = self._buffer[..., :end, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._buffer = self._buffer[:, indices]
        self.keys, self.values = self._buffer[..., : self.get_seq_length(), :]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row so many times."""
        self._buffer = self._buffer.repeat_interleave(repeats, dim=1)
        self.keys, self.values = self._buffer[..., : self.get_seq_length(), :]


class _LlamaDecoder:
    """Prompts are padded on the left; the first pass reads them, later ones a token each."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], alike: bool):
        self._model = backbone.model
        self._cache = Cache(layer_class_to_replicate=_RoomyLayer)
        shared = _shared_tokens(prompts) if alike else 0
        self._ids, mask = pad_prompts([prompt[shared:] for prompt in prompts], backbone)
        if shared:
            prefix = torch.tensor([list(prompts[0][:shared])], device=backbone.device)
            self._model.model(input_ids=prefix, past_key_values=self._cache, use_cache=True)
            self._cache.batch_repeat_interleave(len(prompts))
        self._mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)  # padding stands after the prefix
        self._positions = positions(self._mask)[:, shared:]

    def next_logits(self) -> Tensor:
        return self._model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=last_positions(self._ids, 1),
        ).logits[:, -1]

    def select(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def feed(self, tokens: Tensor) -> None:
        self._ids = tokens[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1


class _T5Decoder:
    """The encoder runs once; the decoder reads its own last token, and cross-attention keys are cached."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]]):
        self._model = backbone.model
        ids, self._mask = pad_prompts(prompts, backbone)
        self._encoded = self._model.encoder(input_ids=ids, attention_mask=self._mask)
        config = backbone.model.config
        self._ids = torch.full((len(prompts), 1), config.decoder_start_token_id, device=backbone.device)
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def next_logits(self) -> Tensor:
        return self._model(
            encoder_outputs=self._encoded,
            attention_mask=self._mask,
            decoder_input_ids=self._ids,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    def select(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]
        self._encoded.last_hidden_state = self._encoded.last_hidden_state[rows]

    def feed(self, tokens: Tensor) -> None:
        self._ids = tokens[:, None]


def _decoder(backbone: Backbone, prompts: Sequence[Sequence[int]], alike: bool) -> _LlamaDecoder | _T5Decoder:
    return _T5Decoder(backbone, prompts) if backbone.family == "t5" else _LlamaDecoder(backbone, prompts, alike)


def _shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Count the tokens that all prompts begin with, as far as reading them once pays; each keeps its last token."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    count = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return count if count * (len(prompts) - 1) >= WORTHWHILE_TOKENS else 0
