"""The change that every adapter here comes down to: `y += (h right) left^T`, for all rows or for blocks of them.

Legend: n inputs and m outputs of a projection, r rank, P members of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad


class LowRank:
    """The delta of one projection through a narrow waist.

    Args:
        right: (n, r), frozen, for all rows, or (P, n, r) where `left` is for each member, too. It may have more rows
            than there are inputs: they play no part.
        left: (m, r) for all rows, or (P, m, r).
        counts: how many rows of the batch belong to each member, where there are several.
    """

    uniform = True

    def __init__(self, right: Tensor, left: Tensor, counts: Sequence[int] | None = None):
        self.right, self.left, self.counts = right, left, counts

    def __call__(self, h: Tensor, output: Tensor) -> Tensor:
        """Add the change of inputs h, (rows, tokens, n), to the output, (rows, tokens, m), in place."""
        right, left = self.right.to(h.dtype), self.left.to(h.dtype)
        if right.shape[-2] > h.shape[-1]:
            right = right[..., : h.shape[-1], :]
        if self.counts is None or len(set(self.counts)) == 1:
            return _add_low_rank(output, h, right, left)
        rights = right if right.dim() == 3 else [right] * len(left)
        parts = zip(h.split(list(self.counts)), output.split(list(self.counts)), rights, left, strict=True)
        return torch.cat([_add_low_rank(own.clone(), rows, *factors) for rows, own, *factors in parts])

    def select(self, rows: Tensor) -> LowRank:
        """The delta of these rows only: the same."""
        return self


def scaled_alike(members: Sequence[tuple[Tensor, float]]) -> tuple[list[Tensor], float]:
    """Return tensors that a common factor scales, and the factor: 1 where theirs differ, which are in them then."""
    scales = {scale for _, scale in members}
    if len(scales) == 1:
        return [tensor for tensor, _ in members], scales.pop()
    return [scale * tensor for tensor, scale in members], 1.0


def widened(tensor: Tensor, padding: Sequence[int]) -> Tensor:
    """Pad with zeros, as `torch.nn.functional.pad` does; a tensor that needs none is not copied."""
    return pad(tensor, list(padding)) if any(padding) else tensor


class _AddLowRank(torch.autograd.Function):
    """`output += (h right) left^T` in two products forward and three or four backward, in place.

    Autograd's own would add two more passes over the output and one over the gradient of h, and products of frozen
    factors' gradients; a training step on a GPU is bound by such launches.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, h: Tensor, right: Tensor, left: Tensor) -> Tensor:
        blocks = left.shape[0] if left.dim() == 3 else None
        z = _blocks(h, blocks) @ right
        if blocks is None:
            output.view(-1, output.shape[-1]).addmm_(z, left.T)
        else:
            output.view(blocks, -1, output.shape[-1]).baddbmm_(z, left.transpose(1, 2))
        ctx.mark_dirty(output)
        ctx.blocks, ctx.shape = blocks, h.shape
        # what nobody needs is not kept: of frozen factors h is not, of frozen adapters the waist is not
        ctx.save_for_backward(
            h if ctx.needs_input_grad[2] else None, z if ctx.needs_input_grad[3] else None, right, left
        )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        h, z, right, left = ctx.saved_tensors
        _, of_h, of_right, of_left = ctx.needs_input_grad
        g = _blocks(gradient, ctx.blocks)
        waist = g @ left
        to_h = to_right = to_left = None
        if of_h:
            to_h = (waist @ right.transpose(-1, -2)).view(ctx.shape)
        if of_right:
            to_right = _blocks(h, ctx.blocks).transpose(-1, -2) @ waist
        if of_left:
            to_left = g.transpose(-1, -2) @ z
        return gradient, to_h, to_right, to_left


def _blocks(x: Tensor, blocks: int | None) -> Tensor:
    """(rows, tokens, width) as (tokens, width), or as so many blocks of tokens."""
    return x.reshape(-1, x.shape[-1]) if blocks is None else x.reshape(blocks, -1, x.shape[-1])


_add_low_rank: Any = _AddLowRank.apply
