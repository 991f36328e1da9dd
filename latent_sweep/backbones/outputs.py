"""Rows of token ids, and what one pass of the frozen model gives for them. Without torch until a loss is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Example = Mapping[str, Any]
"""One tokenised row: `prompt_ids`, `target_ids` and `input_ids` (the input without its instruction) are token ids."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a forward pass for a learner: logits where there are targets, and how they count."""

    rows: Sequence[Example]
    """The rows that were run: a micro-batch of this learner."""
    logits: Tensor
    """(targets, vocabulary): for every token of every row's target, one row's after another's."""
    labels: Tensor
    """(targets,) token ids."""
    denominator: float
    """What the summed cross-entropy is divided by: the same for every micro-batch of a step, so that they add up."""

    def by_row(self, of_targets: Tensor) -> Sequence[Tensor]:
        """Cut something that is there for every target token into what belongs to each row."""
        return of_targets.split([len(row["target_ids"]) for row in self.rows])

    def task_loss(self) -> Tensor:
        """Return the cross-entropy on target tokens, reduced as the settings say (A5); equation (10), first term."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(self.logits.float(), self.labels, reduction="sum") / self.denominator
