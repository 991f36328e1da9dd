"""Batched decoding with a key-value cache and one adapter per row.

Logits at the last position only; keys and values are written into room made for them beforehand; rows that have
finished leave the batch; what all prompts begin with is read once; and generation ends at the benchmark's stop strings.

On a GPU the host only queues work: tokens are chosen there, and stay there, and the host waits for them every few
tokens to see which answers have ended. What such a row has written past its end is cut, so answers do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicLayer

from latent_sweep.adapters.bank import Adaptation, AdapterBank
from latent_sweep.backbones.batches import common_tokens, last_positions, pad_prompts, placed, positions
from latent_sweep.backbones.layouts import ALIGNED
from latent_sweep.backbones.loading import Backbone
from latent_sweep.backbones.sharing import pays_for_prompts
from latent_sweep.metrics import cut_answer

WORTHWHILE_TOKENS = 64
"""What prompts share is read once where that saves so many tokens: on CPU a pass more costs as much as 20 to 50."""

ROOM = 64
"""Tokens by which the key-value cache grows at once, up to the longest answer: all of most answers.

Room for the longest answer from the start would be mostly unused, since answers end early and their rows leave: for 64
rows and 512 tokens of a 13B model, 25 GiB instead of 3. Growing copies what is there, once in so many tokens.
"""

LOOK_EVERY = 4
"""Tokens after which the host looks at what a GPU has written; on a CPU it looks at each.

A look costs the GPU the time in which the host reads tokens and launches the next pass: less than a pass. Looking later
saves little more, and every token that a batch writes after its last answer has ended is a pass for nothing: 1.5 of
them with 4, 3.5 with 8, of the few that labels and short sentences take. Which rows share a batch follows from it, and
in bfloat16 a near tie of two tokens can hang on that: whoever changes it raises `store.versions.DECODING`.
"""

Choice = Callable[[Tensor, Tensor], Tensor]
"""Next token ids, (rows,), from logits (rows, vocabulary) and these rows' answers so far, (rows, tokens).

All are on the device. Where the host does not look at every token, rows that have ended since then are among them.
"""


def greedy(logits: Tensor, answers: Tensor) -> Tensor:
    """The likeliest token of every row."""
    return logits.argmax(-1)


@dataclass(frozen=True)
class Sampler:
    """Draws every row's next token from its `top_k` likeliest ones.

    What it draws for a row depends on the rows before it: for the same draws everywhere, a row must leave the batch as
    soon as it ends, so the host looks at every token. It waits for every token anyway, to draw it.

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

    def __call__(self, logits: Tensor, answers: Tensor) -> Tensor:
        """Choose a token for every row, as a `Choice` does; the logits stay as they are."""
        logits = logits.float()
        scores = logits.gather(1, answers)
        lowered = torch.where(scores > 0, scores / self.repetition_penalty, scores * self.repetition_penalty)
        values, tokens = logits.scatter(1, answers, lowered).topk(min(self.top_k, logits.shape[-1]))
        drawn = torch.multinomial(values.softmax(-1).cpu(), 1, generator=self.generator)
        return tokens.gather(1, drawn.to(tokens.device))[:, 0]


def generate(
    backbone: Backbone,
    bank: AdapterBank,
    prompts: Sequence[Sequence[int]],
    adaptation: Adaptation,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    shared: int = 0,
    choose: Choice = greedy,
    look_every: int | None = None,
) -> list[list[int]]:
    """Answers, without their end-of-sequence token.

    Args:
        prompts: token ids of each row's prompt.
        adaptation: what the backbone gets, row by row in the order of `prompts`.
        max_new_tokens: longest answer, in tokens.
        stop: an answer ends where one of these strings appears after some text; `answer_text` cuts there.
        shared: tokens that all prompts begin with, fewer than any of them has, which a causal model reads once. Not
            0 only where the adaptation holds for every row of any batch; `shared_tokens` counts them.
        choose: picks every next token.
        look_every: tokens after which the host looks for answers that have ended; None for what suits the device.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # rows of the batch that are still answering
    look_every = look_every or _tokens_between_looks(backbone.device, choose)
    seen = 0
    backbone.before_answering()
    with torch.inference_mode(), bank.active(adaptation):
        decoder = _decoder(backbone, prompts, max_new_tokens, shared)
        written = torch.empty(len(prompts), max_new_tokens, dtype=torch.long, device=backbone.device)
        for place in range(max_new_tokens):
            if place:
                decoder.feed(written[:, place - 1])
            written[:, place] = choose(decoder.next_logits(), written[:, :place])
            if place + 1 in (seen + look_every, max_new_tokens):
                new = written[:, seen : place + 1].tolist()
                seen = place + 1
                going = [i for i, row in enumerate(rows) if _extend(answers[row], new[i], backbone, stop)]
                if not going or seen == max_new_tokens:
                    break
                if len(going) < len(rows):
                    kept = torch.tensor(going, device=backbone.device)
                    rows = [rows[i] for i in going]
                    written = written[kept]
                    decoder.select(going, kept)
                    bank.select(kept)
    return answers


def shared_tokens(backbone: Backbone, prompts: Sequence[Sequence[int]], together: int) -> int:
    """Count the tokens that all prompts begin with, as far as reading them once pays; each keeps its last token.

    On a GPU another pass must pay as well, by the mean length of the prompts.

    Args:
        together: prompts of a batch, at most. That a batch has fewer changes nothing: then how a prompt is read would
            hang on its neighbours.
    """
    count, rows = common_tokens(prompts), min(together, len(prompts))
    if count * (rows - 1) < WORTHWHILE_TOKENS:
        return 0
    tokens = rows * sum(map(len, prompts)) // len(prompts)
    return count if backbone.device.type == "cpu" or pays_for_prompts(backbone, tokens, count, rows) else 0


def answer_text(backbone: Backbone, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The answer as text, cut at the first stop string; blanks before its first line stay, see `cut_answer`."""
    return cut_answer(backbone.tokenizer.decode(list(ids), skip_special_tokens=True), stop)


def _has_stopped(backbone: Backbone, ids: Sequence[int], stop: Sequence[str]) -> bool:
    text = backbone.tokenizer.decode(list(ids), skip_special_tokens=True).lstrip()
    return any(mark in text for mark in stop)


def _extend(answer: list[int], tokens: Sequence[int], backbone: Backbone, stop: Sequence[str]) -> bool:
    """Append new tokens to an answer, up to its end; returns whether it goes on."""
    eos = backbone.eos_id
    for token in tokens:
        if token == eos:
            return False
        answer.append(token)
        if stop and _has_stopped(backbone, answer, stop):
            return False
    return True


def _tokens_between_looks(device: torch.device, choose: Choice) -> int:
    return 1 if device.type == "cpu" or isinstance(choose, Sampler) else LOOK_EVERY


class _StaticLayer(DynamicLayer):
    """Keys and values of one layer, written into room made beforehand; transformers' own copies all for every token.

    They are the filled part of a buffer (2, rows, heads, tokens and room, width).

    Args:
        read: tokens of the prompts.
        later: tokens that may come after them.
    """

    def __init__(self, read: int, later: int):
        super().__init__()
        self._read, self._later, self._filled = read, later, 0

    def update(self, keys: Tensor, values: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values, (rows, heads, new, width); returns all of them."""
        start, new = self._filled, keys.shape[-2]
        self._filled += new
        if not start:
            self._hold(self._room_for(keys))
            self.is_initialized = True
        elif self._filled > self._buffer.shape[-2]:
            filled = self._buffer[..., :start, :]
            self._hold(self._room_for(keys))
            self._buffer[..., :start, :] = filled
        self._all_keys.narrow(-2, start, new).copy_(keys)
        self._all_values.narrow(-2, start, new).copy_(values)
        self._show()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Count the tokens whose keys and values are there."""
        return self._filled

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._hold(self._buffer.index_select(1, indices))
        self._show()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row so many times."""
        self._hold(self._buffer.repeat_interleave(repeats, dim=1))
        self._show()

    def _room_for(self, keys: Tensor) -> Tensor:
        """Make room for what is there with these keys, and for more to come."""
        steps = max(1, math.ceil((self._filled - self._read) / ROOM))
        room = self._read + min(self._later, steps * ROOM)
        return keys.new_empty(2, *keys.shape[:-2], room, keys.shape[-1])

    def _hold(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._all_keys, self._all_values = buffer

    def _show(self) -> None:
        """Give the model what is filled."""
        self.keys = self._all_keys.narrow(-2, 0, self._filled)
        self.values = self._all_values.narrow(-2, 0, self._filled)


class _Decoder(Protocol):
    """Reads prompts, then a token of every row at a time."""

    def next_logits(self) -> Tensor:
        """Logits of the tokens to come, (rows, vocabulary)."""
        ...

    def feed(self, tokens: Tensor) -> None:
        """Have every row's next token, (rows,), be read next."""
        ...

    def select(self, going: Sequence[int], kept: Tensor) -> None:
        """Keep these rows: the host knows them from `going`, the device from `kept`."""
        ...


class _CausalDecoder:
    """Prompts are padded on the left; the first pass reads them, later ones a token each."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], longest: int, shared: int):
        self._model, self._backbone = backbone.model, backbone
        lays_out = backbone.lays_out(max(map(len, prompts)) + longest)
        shared = shared if lays_out else 0
        self._ids, mask = pad_prompts([prompt[shared:] for prompt in prompts], backbone)
        mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)  # padding stands after the prefix
        self._padding: _Masks = (_Padding if lays_out else _Plain)(backbone, prompts, mask, longest - 1)
        self._mask = self._padding.and_what_comes(shared)
        found = positions(mask)
        self._positions = found[:, shared:]
        self._later_positions = found[:, -1:] + torch.arange(1, longest, device=backbone.device)
        self._keep: Tensor | int = last_positions(self._ids, 1)
        self._cache = Cache(layer_class_to_replicate=partial(_StaticLayer, mask.shape[1], longest - 1))
        if shared:
            prefix = torch.tensor([list(prompts[0][:shared])], device=backbone.device)
            self._model.base_model(input_ids=prefix, use_cache=True, **{backbone.cache_name: self._cache})
            self._cache.batch_repeat_interleave(len(prompts))

    def next_logits(self) -> Tensor:
        keep = {"logits_to_keep": self._keep} if "logits_to_keep" in self._backbone.accepts else {}
        return self._model(
            input_ids=self._ids,
            attention_mask=self._mask,
            **placed(self._backbone, self._positions),
            use_cache=True,
            **{self._backbone.cache_name: self._cache},
            **keep,
        ).logits[:, -1]

    def feed(self, tokens: Tensor) -> None:
        self._ids, self._keep = tokens[:, None], 0  # which is all of them
        self._positions, self._later_positions = self._later_positions.tensor_split([1], dim=1)
        self._mask = self._padding.of(self._cache.get_seq_length() + 1)

    def select(self, going: Sequence[int], kept: Tensor) -> None:
        self._cache.batch_select_indices(kept)
        self._later_positions = self._later_positions[kept]
        self._padding.select(going, kept)


class _DecoderBehindEncoder:
    """The encoder runs once; the decoder reads its own last token, and cross-attention keys are cached."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], longest: int):
        self._model, self._backbone = backbone.model, backbone
        ids, mask = pad_prompts(prompts, backbone)
        self._read = ids.shape[1]
        masks: Any = _Padding if backbone.traits.laid_out else _Plain
        self._padding: _Masks = masks(backbone, prompts, mask)
        self._encoded = self._model.get_encoder()(input_ids=ids, attention_mask=self._padding.of(self._read))
        start = backbone.model.config.decoder_start_token_id
        self._ids = torch.full((len(prompts), 1), start, device=backbone.device)
        self._cache = EncoderDecoderCache(
            Cache(layer_class_to_replicate=partial(_StaticLayer, 1, longest - 1)),
            Cache(layer_class_to_replicate=partial(_StaticLayer, self._read, 0)),
        )

    def next_logits(self) -> Tensor:
        return self._model(
            encoder_outputs=self._encoded,
            attention_mask=self._padding.of(self._read),
            decoder_input_ids=self._ids,
            use_cache=True,
            **{self._backbone.cache_name: self._cache},
        ).logits[:, -1]

    def feed(self, tokens: Tensor) -> None:
        self._ids = tokens[:, None]

    def select(self, going: Sequence[int], kept: Tensor) -> None:
        self._cache.self_attention_cache.batch_select_indices(kept)
        self._cache.cross_attention_cache.batch_select_indices(kept)
        self._encoded.last_hidden_state = self._encoded.last_hidden_state[kept]
        self._padding.select(going, kept)


def _decoder(backbone: Backbone, prompts: Sequence[Sequence[int]], longest: int, shared: int) -> _Decoder:
    if backbone.traits.encoder_decoder:
        return _DecoderBehindEncoder(backbone, prompts, longest)
    return _CausalDecoder(backbone, prompts, longest, shared)


class _Masks(Protocol):
    """What models are told of padding."""

    def of(self, keys: int) -> Tensor | None:
        """The attention mask for so many keys."""
        ...

    def and_what_comes(self, shared: int) -> Tensor | None:
        """The attention mask of the pass over prompts, behind the tokens that are shared."""
        ...

    def select(self, going: Sequence[int], kept: Tensor) -> None:
        """Keep these rows."""
        ...


class _Plain:
    """Masks as any model of transformers takes them, (rows, keys), 1 where there is a token; nothing is shared.

    Args:
        mask: of the prompts.
        later: tokens that may come after them.
    """

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], mask: Tensor, later: int = 0):
        self._read = mask.shape[1]
        self._mask = torch.cat([mask, mask.new_ones(len(mask), later)], dim=1)

    def of(self, keys: int) -> Tensor:
        return self._mask[:, :keys]

    def and_what_comes(self, shared: int) -> Tensor:
        return self.of(self._read)

    def select(self, going: Sequence[int], kept: Tensor) -> None:
        self._mask = self._mask[kept]


class _Padding:
    """What is added to attention scores so that no token looks at padding.

    transformers takes masks of four dimensions as they are. Of others it would ask the device whether they hide
    anything, in every pass, and every layer would make numbers of their truth values again.

    Args:
        mask: (rows, keys), 0 where there is padding.
        later: tokens that may come after them.
    """

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], mask: Tensor, later: int = 0):
        self._padded = [len(prompt) < mask.shape[1] for prompt in prompts]  # the host knows without the device
        self._hidden = (mask == 0)[:, None, None]
        self._dtype = backbone.model.dtype
        self._added = self._lowest_where(self._hidden, later)

    def of(self, keys: int) -> Tensor | None:
        """What every query adds to its scores of so many keys, (rows, 1, 1, keys); None where there is no padding."""
        return self._added[..., :keys] if any(self._padded) else None

    def and_what_comes(self, shared: int) -> Tensor | None:
        """The same for each of a prompt's tokens behind the shared ones, which do not see those after themselves.

        Returns:
            (rows, 1, tokens, keys), or None where transformers knows what to hide.
        """
        if not shared and not any(self._padded):
            return None
        keys = self._hidden.shape[-1]
        places = torch.arange(keys, device=self._hidden.device)
        return self._lowest_where(self._hidden | (places > places[shared:, None]))[..., :keys]

    def select(self, going: Sequence[int], kept: Tensor) -> None:
        self._padded = [self._padded[row] for row in going]
        self._added = self._added[kept]

    def _lowest_where(self, hidden: Tensor, later: int = 0) -> Tensor:
        """The lowest number where a key is hidden, (..., keys), and else 0; there are more keys than that."""
        keys = hidden.shape[-1]
        wide = ALIGNED * math.ceil((keys + later) / ALIGNED)
        added = torch.zeros(*hidden.shape[:-1], wide, dtype=self._dtype, device=hidden.device)
        added[..., :keys].masked_fill_(hidden, torch.finfo(self._dtype).min)
        return added
