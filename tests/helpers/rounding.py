"""How far two ways to compute the same numbers may lie apart: from the arithmetic, not from what one machine gave.

Processors add a sum's terms in different orders, which moves it by no more than its number of terms times machine
epsilon times the size of the terms. So what is compared has the size of the largest entry: one that is nearly zero is
the difference of large ones, and off by as much as they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PRODUCT = 64 * torch.finfo(torch.float32).eps
"""What a product of matrices may move, as a share of its largest entry: the tiny backbones' longest sums have 64."""
PASS = 26 * PRODUCT
"""The same after as many consecutive products as in the tiny T5, the deeper backbone: 0.0002."""
GRADIENT = 3 * PASS
"""The same for gradients: a backward pass has two products for one of the forward pass."""


def assert_same_to_rounding(found: Tensor, expected: Tensor, share: float = PRODUCT) -> None:
    """Check that two tensors agree up to `share` of the largest entry."""
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=share * largest)


def same_to_rounding(found: Tensor, expected: Tensor, share: float = PRODUCT) -> bool:
    """Return whether two tensors agree up to `share` of the largest entry."""
    return bool((found - expected).abs().max() <= share * expected.abs().max())


ALIKE = 1e-3
"""Relative difference allowed between two trainings of one learner."""
DEEP = 4 * ALIKE
"""The same on FLAN-T5-small, which has four times as many blocks as the tiny T5."""


def assert_trained_alike(found: Tensor, expected: Tensor, start: Tensor | float = 0.0, share: float = ALIKE) -> None:
    """Two trainings from one start moved alike, as a whole and to a thousandth; one of another batch parts at once.

    Entry by entry they may part further: AdamW divides by the gradient's own size, and so steps as far for a gradient
    that is nothing but rounding as for the largest one.
    """
    movement = (expected - start).norm()
    assert math.isfinite(movement) and movement > 0, "it must have learned for this to mean anything"
    parted = float((found - expected).norm() / movement)
    assert parted < share, f"they part by {parted:.1g} of the movement"
