"""How the rows of a batch lie in the model's input while something is learned, and attention for each such layout.

*Padded*: a sequence for every row. *Shared*: one sequence for all rows of a member, first what they all begin with,
then the rest of every row, one after another and without padding. What stands in front depends in a causal model on
nothing behind it, so it is computed once for all rows, with gradients, and each row's rest attends to it and to itself:
the same numbers to rounding, from fewer tokens.

Legend: P members, T tokens of the longest sequence, n shared tokens, B rows of all members, S tokens of the longest
rest, H heads of width D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "laid_out"
"""The name that models know the attention of this module by."""

ALIGNED = 8
"""Attention masks have rows of a multiple of so many numbers in memory: kernels for a GPU would copy others, always."""

Indices = npt.NDArray[np.int64]


def aligned(mask: Tensor) -> Tensor:
    """Return the same numbers, each row's one after another and the rows at multiples of `ALIGNED`.

    With any other mask a GPU's fused kernels refuse to attend, and what attends instead keeps every score. A CPU takes
    all masks.
    """
    *rows, keys = mask.shape
    room = mask.new_empty(*rows, ALIGNED * math.ceil(keys / ALIGNED))[..., :keys]
    return room.copy_(mask)


def moved(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Bring host values to the device; a GPU copies from pinned memory, while the host goes on."""
    found = torch.from_numpy(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def _attended_in(query: Tensor) -> torch.dtype:
    """The type that attention is computed in: float32 where bfloat16 is learned on a CPU, the tensors' own elsewhere.

    There torch takes three times as long for attention in bfloat16, gradients included, as in float32, while it
    multiplies matrices in bfloat16 far faster.
    """
    slow = query.dtype == torch.bfloat16 and query.device.type == "cpu" and torch.is_grad_enabled()
    return torch.float32 if slow else query.dtype


def _sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend by `scaled_dot_product_attention`; a mask is of the type that it is computed in."""
    given, kind = query.dtype, _attended_in(query)
    found, _ = sdpa_attention_forward(module, query.to(kind), key.to(kind), value.to(kind), attention_mask, **options)
    return found.to(given), None


class Padded:
    """A sequence for every row, padded behind: causal attention never sees the padding, so it needs no mask.

    Args:
        shared_bias: whether all layers have one position bias, if they have any.
    """

    def __init__(self, shared_bias: bool = True) -> None:
        self._shared_bias = shared_bias
        self._bias: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        """Attend as `scaled_dot_product_attention` does; tensors are (rows, H, tokens, D)."""
        bias = options.pop("position_bias", None)
        if bias is None:
            return _sdpa(module, query, key, value, None, is_causal=True, **options)
        return _sdpa(
            module, query, key, value, self._with(bias, mask, module.is_causal, _attended_in(query)), **options
        )

    def _with(self, bias: Tensor, mask: Tensor | None, causal: bool, kind: torch.dtype) -> Tensor:
        """Join a position bias, (1, H, queries, keys), with a mask: once for all layers that share the bias.

        Args:
            mask: true where attention is due; None is for all tokens, or all before where it is causal.
        """
        key = bias.data_ptr(), kind  # and not its `id`: recomputing meets the same numbers in another object
        if key in self._bias:
            return self._bias[key][1]
        joined = bias.detach()  # frozen; transformers asks for gradients under checkpointing all the same
        if mask is None and causal:
            mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
        if mask is not None:
            joined = torch.where(mask, joined, torch.finfo(bias.dtype).min)
        joined = aligned(joined.to(kind))  # T5 gives a bias whose heads lie side by side
        if self._shared_bias:
            self._bias[key] = bias, joined  # with the bias, whose place another would get once it is gone
        return joined


class Shared:
    """One sequence for all rows of a member.

    Args:
        shared: n.
        rests: tokens that every row has after them, row by row, for every member.
        device: of the model.
    """

    def __init__(self, shared: int, rests: Sequence[Sequence[int]], device: torch.device):
        self.shared, self.members = shared, len(rests)
        self.rows = [len(of_member) for of_member in rests]
        lengths = np.array([length for of_member in rests for length in of_member])
        totals = np.array([sum(of_member) for of_member in rests])
        self.tokens = shared + int(totals.max())
        self.longest = int(lengths.max())
        owner = np.repeat(np.arange(len(rests)), self.rows)
        before = np.cumsum(lengths) - lengths - (np.cumsum(totals) - totals)[owner]
        self.starts = owner * self.tokens + shared + before
        """Where each row's rest begins, (B,), sequences and tokens counted together."""
        steps = np.arange(self.longest)
        real = steps < lengths[:, None]
        self.rest: Indices = np.where(real, self.starts[:, None] + steps, self.starts[:, None])
        """Where each token of each row's rest lies, (B, S); padding repeats the rest's first token."""
        self._real = real
        self._owner, self._device = owner, device

    @property
    def positions(self) -> Indices:
        """Position of every token in its own row, (P, T)."""
        found = np.zeros(self.members * self.tokens, np.int64)
        found.reshape(self.members, -1)[:, : self.shared] = np.arange(self.shared)
        steps = np.broadcast_to(np.arange(self.longest), self._real.shape)
        found[self.rest[self._real]] = self.shared + steps[self._real]
        return found.reshape(self.members, -1)

    @property
    def standing_for(self) -> Indices:
        """How many rows' tokens every token stands for, (P, T): all rows' in front, 0 where it is padding."""
        found = np.zeros(self.members * self.tokens, np.int64)
        found.reshape(self.members, -1)[:, : self.shared] = np.array(self.rows)[:, None]
        found[self.rest[self._real]] = 1
        return found.reshape(self.members, -1)

    def _on_device(self, indices: Indices) -> Tensor:
        return moved(indices.reshape(-1), self._device)

    @cached_property
    def take_rest(self) -> Tensor:
        """(B * S,) tokens of the rests."""
        return self._on_device(self.rest)

    @cached_property
    def take_whole(self) -> Tensor:
        """(B * (n + S),) tokens of the rows, with what they share."""
        front = self._owner[:, None] * self.tokens + np.arange(self.shared)
        return self._on_device(np.concatenate([front, self.rest], axis=1))

    def _place(self, width: int) -> Tensor:
        """(P * T,) where each token of a rest lies in rows of `width` tokens; 0 for the others."""
        found = np.zeros(self.members * self.tokens, np.int64)
        rows = np.arange(len(self.rest))[:, None] * width + width - self.longest + np.arange(self.longest)
        found[self.rest[self._real]] = rows[self._real]
        return self._on_device(found)

    @cached_property
    def place_rest(self) -> Tensor:
        """(P * T,) where each token of a rest lies in `take_rest`."""
        return self._place(self.longest)

    @cached_property
    def place_whole(self) -> Tensor:
        """(P * T,) where each token of a rest lies in `take_whole`."""
        return self._place(self.shared + self.longest)

    @cached_property
    def rest_padding(self) -> Tensor | None:
        """Which entries of `take_rest` are padding; None where there is none."""
        return None if self._real.all() else self._on_device(np.flatnonzero(~self._real))

    @cached_property
    def padding(self) -> Tensor | None:
        """Which of the (P * T) tokens are padding; None where there is none."""
        found = np.flatnonzero(self.standing_for == 0)
        return self._on_device(found) if len(found) else None

    @cached_property
    def _masks(self) -> dict[torch.dtype, Tensor]:
        return {}

    def _mask(self, query: Tensor) -> Tensor:
        """Every token of a rest sees what is shared and its own row up to itself, (1, 1, S, n + S)."""
        if (kind := _attended_in(query)) not in self._masks:
            shape = self.longest, self.shared + self.longest
            hidden = torch.full(shape, torch.finfo(kind).min, dtype=kind, device=query.device)
            self._masks[kind] = aligned(hidden.triu(self.shared + 1)[None, None])
        return self._masks[kind]

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        """Attend within the shared tokens, and from every row's rest to them and itself; tensors are (P, H, T, D)."""

        width = query.shape[-1]

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, width)).transpose(1, 2)

        query, key, value = (x.transpose(1, 2).flatten(2) for x in (query, key, value))
        front, rest = rests(query, self)
        parts = [wholes(x, self) for x in (key, value)]
        (own_key, seen_key), (own_value, seen_value) = ([heads(x) for x in part] for part in parts)
        if self.shared:
            rest, _ = _sdpa(module, heads(rest), seen_key, seen_value, self._mask(query), **options)
            front, _ = _sdpa(module, heads(front), own_key, own_value, None, is_causal=True, **options)
        else:
            rest, _ = _sdpa(module, heads(rest), seen_key, seen_value, None, is_causal=True, **options)
        joined = together(front.flatten(2), rest.flatten(2), self)
        return joined.unflatten(-1, (-1, width)), None


# Tokens are moved by three functions with gradients of their own: autograd's for `index_select` adds up in any order on
# a GPU, and over tokens that are padding. Each maps tokens (P, T, C) to what all rows share, (P, n, C), and rows.


def _split_front(gradient: Tensor, layout: Shared) -> Tensor:
    """Add up what the rows of each member say of the shared tokens: (B, n, C) to (P, n, C)."""
    if len(set(layout.rows)) == 1:
        return gradient.unflatten(0, (layout.members, -1)).sum(1)
    return torch.stack([part.sum(0) for part in gradient.split(layout.rows)])


def _gathered(rows: Tensor, place: Tensor, front: Tensor | None, layout: Shared) -> Tensor:
    """Tokens (P, T, C) from those of rows, at `place`, and of what they share; padding is zero."""
    found = rows.flatten(0, 1).index_select(0, place)
    if layout.padding is not None:
        found.index_fill_(0, layout.padding, 0)
    found = found.view(layout.members, layout.tokens, -1)
    if front is not None:
        found[:, : layout.shared] = front
    return found


class _Rest(torch.autograd.Function):
    """The shared tokens, and the rests as rows (B, S, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Shared) -> tuple[Tensor, Tensor]:
        ctx.layout = layout
        rest = x.flatten(0, 1).index_select(0, layout.take_rest)
        return x[:, : layout.shared], rest.view(-1, layout.longest, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, front: Tensor, rest: Tensor) -> tuple[Tensor, None]:
        return _gathered(rest, ctx.layout.place_rest, front, ctx.layout), None


class _Whole(torch.autograd.Function):
    """The shared tokens, and whole rows (B, n + S, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Shared) -> tuple[Tensor, Tensor]:
        ctx.layout = layout
        whole = x.flatten(0, 1).index_select(0, layout.take_whole)
        width = layout.shared + layout.longest
        return x[:, : layout.shared], whole.view(-1, width, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, front: Tensor, whole: Tensor) -> tuple[Tensor, None]:
        layout = ctx.layout
        front = front + _split_front(whole[:, : layout.shared], layout)
        return _gathered(whole, layout.place_whole, front, layout), None


class _Together(torch.autograd.Function):
    """Tokens (P, T, C) from the shared ones and the rests."""

    @staticmethod
    def forward(ctx: Any, front: Tensor, rest: Tensor, layout: Shared) -> Tensor:
        ctx.layout = layout
        return _gathered(rest, layout.place_rest, front, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, None]:
        layout = ctx.layout
        rest = x.flatten(0, 1).index_select(0, layout.take_rest)
        if layout.rest_padding is not None:
            rest.index_fill_(0, layout.rest_padding, 0)
        return x[:, : layout.shared], rest.view(-1, layout.longest, x.shape[-1]), None


rests: Any = _Rest.apply
wholes: Any = _Whole.apply
together: Any = _Together.apply

Layout = Padded | Shared


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layout: Layout | None = None,
    **options: Any,
) -> Any:
    """Attend as the batch's layout says; without one, as transformers does by itself."""
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return layout.attend(module, query, key, value, attention_mask, **options)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
