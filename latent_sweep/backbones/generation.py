"""Batched decoding with a key-value cache and one adapter per row.

Only the last position's logits are computed, keys and values are written into preallocated buffers, finished rows leave
the batch, a common prefix is read once, and generation ends at the benchmark's stop strings.

On a GPU the host only queues work: tokens are chosen and kept there, and the host checks every few tokens which answers
have ended. Tokens after an answer's end are cut, so answers do not depend on these checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.cache_utils import Cache, DynamicLayer

from latent_sweep.adapters.bank import Adaptation, AdapterBank
from latent_sweep.backbones.batches import common_tokens, last_positions, pad_prompts, position_argument, positions
from latent_sweep.backbones.layouts import ALIGNED
from latent_sweep.backbones.loading import Backbone
from latent_sweep.backbones.recorded_token import ReadPrompts
from latent_sweep.backbones.sharing import pays_for_prompts
from latent_sweep.backbones.token_graphs import Comparison, TokenGraphs
from latent_sweep.metrics.answers import cut_answer

WORTHWHILE_TOKENS = 64
"""Tokens that sharing a prefix must save: on a CPU another pass costs as much as 20 to 50 tokens."""

ROOM = 64
"""Tokens by which the key-value cache grows. A full-size buffer of 64 rows and 512 tokens of a 13B model would take
25 GiB instead of 3."""

LOOK_EVERY = 4
"""Tokens between the host's checks of a GPU's answers; on a CPU it checks each token.

With 8, twice as many passes would be wasted after the last answer has ended. The interval decides which rows share a
batch, which in bfloat16 can break near ties of two tokens: changing it requires a new `storage.versions.DECODING`.
"""

Choice = Callable[[Tensor, Tensor], Tensor]
"""Chooses the next token ids, (rows,), from logits (rows, vocabulary) and answers so far (rows, tokens), on the device.
Rows that have ended since the host's last check are still among them."""


def greedy(logits: Tensor, answers: Tensor) -> Tensor:
    return logits.argmax(-1)


@dataclass(frozen=True)
class Sampler:
    """Draws each row's next token from its `top_k` most likely ones.

    A draw depends on the rows before it. For the same draws on every device a row must leave the batch as soon as it
    ends, so the host checks every token.
    """

    top_k: int
    repetition_penalty: float
    """Logits of tokens in the answer so far are divided by this if positive, else multiplied (CTRL); 1 is none."""
    generator: torch.Generator
    """On the CPU, so that draws are the same on every device."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k: found {self.top_k}, expected at least one token to draw from")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty: found {self.repetition_penalty}, expected more than 0; 1 is none")

    def __call__(self, logits: Tensor, answers: Tensor) -> Tensor:
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
    graphs: TokenGraphs | None = None,
) -> list[list[int]]:
    """Return the answers as token ids, without their end-of-sequence token.

    Args:
        stop: strings that end an answer if they follow some text; `answer_text` cuts there.
        shared: length of a common prefix, which a causal model reads once; see `shared_tokens`. Must be 0 unless the
            adaptation is the same for every row.
        look_every: tokens between checks for ended answers; None suits the device.
        graphs: generate greedy answers after their first tokens, where they can.
    """
    extend = partial(_extend, backbone=backbone, stop=stop)
    comparison: Comparison | None = None
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # rows still in the batch
    look_every = look_every or _tokens_between_looks(backbone.device, choose)
    seen = 0
    backbone.before_answering()
    with torch.inference_mode(), bank.active(adaptation):
        decoder = _decoder(backbone, prompts, max_new_tokens, shared)
        written = torch.empty(len(prompts), max_new_tokens, dtype=torch.long, device=backbone.device)
        for step in range(max_new_tokens):
            if step:
                decoder.feed(written[:, step - 1])
            written[:, step] = choose(decoder.next_logits(), written[:, :step])
            if graphs is not None and choose is greedy and not step:
                with_graphs = graphs.answers(decoder.read(), written[:, 0], bank, max_new_tokens, extend)
                if isinstance(with_graphs, list):
                    return with_graphs
                if with_graphs is not None:
                    comparison, choose = with_graphs, with_graphs.choose
            if step + 1 in (seen + look_every, max_new_tokens):
                new = written[:, seen : step + 1].tolist()
                seen = step + 1
                active = [i for i, row in enumerate(rows) if extend(answers[row], new[i])]
                if not active or seen == max_new_tokens:
                    break
                if len(active) < len(rows):
                    kept = torch.tensor(active, device=backbone.device)
                    rows = [rows[i] for i in active]
                    if comparison is not None:
                        comparison.rows = rows
                    written = written[kept]
                    decoder.select(active, kept)
                    bank.select(kept)
    if graphs is not None and comparison is not None:
        graphs.check(comparison, answers)
    return answers


def shared_tokens(backbone: Backbone, prompts: Sequence[Sequence[int]], together: int) -> int:
    """Return the length of the common prefix of all prompts if reading it once pays off, else 0.

    The decision is for batches of `together` rows. Smaller ones are treated alike, so that how a prompt is read does
    not depend on its neighbors.
    """
    count, rows = common_tokens(prompts), min(together, len(prompts))
    if count * (rows - 1) < WORTHWHILE_TOKENS:
        return 0
    tokens = rows * sum(map(len, prompts)) // len(prompts)
    return count if backbone.device.type == "cpu" or pays_for_prompts(backbone, tokens, count, rows) else 0


def answer_text(backbone: Backbone, ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Decode an answer and cut it at the first stop string; see `cut_answer`."""
    return cut_answer(backbone.tokenizer.decode(list(ids), skip_special_tokens=True), stop)


def _extend(answer: list[int], tokens: Sequence[int], backbone: Backbone, stop: Sequence[str]) -> bool:
    eos = backbone.eos_id
    for token in tokens:
        if token == eos:
            return False
        answer.append(token)
        if stop:
            text = backbone.tokenizer.decode(answer, skip_special_tokens=True).lstrip()
            if any(mark in text for mark in stop):
                return False
    return True


def _tokens_between_looks(device: torch.device, choose: Choice) -> int:
    return 1 if device.type == "cpu" or isinstance(choose, Sampler) else LOOK_EVERY


class _StaticLayer(DynamicLayer):
    """Keys and values of one layer in a preallocated buffer, (2, rows, heads, capacity, width).

    transformers' own copies all for every token. `read` counts the prompts' tokens, `later` those that may follow.
    """

    def __init__(self, read: int, later: int):
        super().__init__()
        self._read, self._later, self._filled = read, later, 0

    def update(self, keys: Tensor, values: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values of new tokens, (rows, heads, new, width); return all of them."""
        start, new = self._filled, keys.shape[-2]
        self._filled += new
        if not start:
            self._hold(self._allocated(keys))
            self.is_initialized = True
        elif self._filled > self._buffer.shape[-2]:
            filled = self._buffer[..., :start, :]
            self._hold(self._allocated(keys))
            self._buffer[..., :start, :] = filled
        self._all_keys.narrow(-2, start, new).copy_(keys)
        self._all_values.narrow(-2, start, new).copy_(values)
        self._expose()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._filled

    def batch_select_indices(self, indices: Tensor) -> None:
        self._hold(self._buffer.index_select(1, indices))
        self._expose()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._hold(self._buffer.repeat_interleave(repeats, dim=1))
        self._expose()

    def _allocated(self, keys: Tensor) -> Tensor:
        steps = max(1, math.ceil((self._filled - self._read) / ROOM))
        capacity = self._read + min(self._later, steps * ROOM)
        return keys.new_empty(2, *keys.shape[:-2], capacity, keys.shape[-1])

    def _hold(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._all_keys, self._all_values = buffer

    def _expose(self) -> None:
        self.keys = self._all_keys.narrow(-2, 0, self._filled)
        self.values = self._all_values.narrow(-2, 0, self._filled)


def _decoder(
    backbone: Backbone, prompts: Sequence[Sequence[int]], longest: int, shared: int
) -> _EncoderDecoder | _CausalDecoder:
    if backbone.traits.encoder_decoder:
        return _EncoderDecoder(backbone, prompts, longest)
    return _CausalDecoder(backbone, prompts, longest, shared)


class _CausalDecoder:
    """Pads prompts on the left; the first pass reads them, each later pass one token."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], longest: int, shared: int):
        self._model, self._backbone = backbone.model, backbone
        lays_out = backbone.lays_out(max(map(len, prompts)) + longest)
        shared = shared if lays_out else 0
        self._ids, mask = pad_prompts([prompt[shared:] for prompt in prompts], backbone)
        mask = torch.cat([mask.new_ones(len(prompts), shared), mask], dim=1)  # padding follows the prefix
        masks: type[_Padding | _Plain] = _Padding if lays_out else _Plain
        self._padding = masks(backbone, prompts, mask, longest - 1)
        self._mask = self._padding.of_prompts(shared)
        token_positions = positions(mask)
        self._positions = token_positions[:, shared:]
        self._later_positions = token_positions[:, -1:] + torch.arange(1, longest, device=backbone.device)
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
            **position_argument(self._backbone, self._positions),
            use_cache=True,
            **{self._backbone.cache_name: self._cache},
            **keep,
        ).logits[:, -1]

    def read(self) -> ReadPrompts | None:
        """Return the state after the prompts; None if the model makes its own masks."""
        if isinstance(self._padding, _Plain):
            return None
        return ReadPrompts(self._cache, self._padding.hidden, self._later_positions[:, :1])

    def feed(self, tokens: Tensor) -> None:
        self._ids, self._keep = tokens[:, None], 0  # transformers' code for all tokens
        self._positions, self._later_positions = self._later_positions.tensor_split([1], dim=1)
        self._mask = self._padding.of(self._cache.get_seq_length() + 1)

    def select(self, active: Sequence[int], kept: Tensor) -> None:
        self._cache.batch_select_indices(kept)
        self._later_positions = self._later_positions[kept]
        self._padding.select(active, kept)


class _EncoderDecoder:
    """Runs the encoder once; the decoder reads its own last token, and cross-attention keys are cached."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], longest: int):
        self._model, self._backbone = backbone.model, backbone
        ids, mask = pad_prompts(prompts, backbone)
        self._read = ids.shape[1]
        masks: type[_Padding | _Plain] = _Padding if backbone.traits.laid_out else _Plain
        self._padding = masks(backbone, prompts, mask)
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

    def read(self) -> ReadPrompts | None:
        """As of `_CausalDecoder`; the decoder has read its first token."""
        if isinstance(self._padding, _Plain):
            return None
        both = self._cache
        return ReadPrompts(both.self_attention_cache, self._padding.hidden, across=both.cross_attention_cache)

    def feed(self, tokens: Tensor) -> None:
        self._ids = tokens[:, None]

    def select(self, active: Sequence[int], kept: Tensor) -> None:
        self._cache.self_attention_cache.batch_select_indices(kept)
        self._cache.cross_attention_cache.batch_select_indices(kept)
        self._encoded.last_hidden_state = self._encoded.last_hidden_state[kept]
        self._padding.select(active, kept)


class _Plain:
    """Masks for any transformers model, (rows, keys), 1 for a token; nothing is shared."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], mask: Tensor, later: int = 0):
        self._read = mask.shape[1]
        self._mask = torch.cat([mask, mask.new_ones(len(mask), later)], dim=1)

    def of(self, keys: int) -> Tensor:
        return self._mask[:, :keys]

    def of_prompts(self, shared: int) -> Tensor:
        return self.of(self._read)

    def select(self, active: Sequence[int], kept: Tensor) -> None:
        self._mask = self._mask[kept]


class _Padding:
    """Additive masks that hide padding: four-dimensional, so that transformers neither checks nor converts them."""

    def __init__(self, backbone: Backbone, prompts: Sequence[Sequence[int]], mask: Tensor, later: int = 0):
        self._padded = [len(prompt) < mask.shape[1] for prompt in prompts]  # without asking the device
        self.hidden = (mask == 0)[:, None, None]
        self._dtype = backbone.model.dtype
        self._added = self._lowest_where(self.hidden, later)

    def of(self, keys: int) -> Tensor | None:
        """Return what every query adds to its scores, (rows, 1, 1, keys); None without padding."""
        return self._added[..., :keys] if any(self._padded) else None

    def of_prompts(self, shared: int) -> Tensor | None:
        """Return the causal mask, (rows, 1, tokens, keys); None if transformers' own suffices."""
        if not shared and not any(self._padded):
            return None
        keys = self.hidden.shape[-1]
        positions = torch.arange(keys, device=self.hidden.device)
        return self._lowest_where(self.hidden | (positions > positions[shared:, None]))[..., :keys]

    def select(self, active: Sequence[int], kept: Tensor) -> None:
        self._padded = [self._padded[row] for row in active]
        self._added = self._added[kept]

    def _lowest_where(self, hidden: Tensor, later: int = 0) -> Tensor:
        """Return the lowest number for hidden keys, else 0, with aligned memory for later keys."""
        keys = hidden.shape[-1]
        wide = ALIGNED * math.ceil((keys + later) / ALIGNED)
        added = torch.zeros(*hidden.shape[:-1], wide, dtype=self._dtype, device=hidden.device)
        added[..., :keys].masked_fill_(hidden, torch.finfo(self._dtype).min)
        return added
