"""Rows of token ids, and what one pass of the frozen model gives for them. Without torch until a loss is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Example = Mapping[str, Any]
"""One tokenised row: `prompt_ids`, `target_ids` and `input_ids` (the input without its instruction) are token ids."""

IGNORED = -100
"""Label of positions that carry no loss."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a forward pass for a learner: logits where there are labels, and how they count."""

    rows: Sequence[Example]
    """The rows that were run: a micro-batch of this learner."""
    logits: Tensor
    """(rows, longest target, vocabulary)."""
    labels: Tensor
    """(rows, longest target) token ids, IGNORED where there is none."""
    denominator: float
    """What the summed cross-entropy is divided by: the same for every micro-batch of a step, so that they add up."""

    def task_loss(self) -> Tensor:
        """Return the cross-entropy on target tokens, reduced as the settings say (A5); equation (10), first term."""
        from torch.nn.functional import cross_entropy

        logits, labels = self.logits.float().flatten(0, 1), self.labels.flatten()
        return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / self.denominator
