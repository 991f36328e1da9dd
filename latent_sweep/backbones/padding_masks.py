"""Masks that hide the padding of a batch, for reading prompts and for each later token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from latent_sweep.backbones.layouts import ALIGNED
from latent_sweep.backbones.loading import Backbone


class PlainMasks:
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


class PaddingMasks:
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
