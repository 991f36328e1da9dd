"""Rows of token ids, and what one pass of the frozen model gives for them. Without torch until a loss is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Example = Mapping[str, Any]
"""One tokenized row: `prompt_ids`, `target_ids` and `input_ids` (the input without its instruction) are token ids."""


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
    cross_entropy: CrossEntropy | None = field(default=None, repr=False)
    """Of the whole pass, where it is that of several learners."""
    place: int = 0
    """Among these learners."""

    @staticmethod
    def of_all(
        rows: Sequence[Sequence[Example]], logits: Tensor, labels: Tensor, denominators: Sequence[float]
    ) -> list[Outputs]:
        """Cut what a pass gives for the rows of several learners, one learner's after another's."""
        targets = [sum(len(row["target_ids"]) for row in own) for own in rows]
        shared = CrossEntropy(logits, labels, targets) if sum(map(bool, targets)) > 1 else None
        parts = zip(rows, logits.split(targets), labels.split(targets), denominators, strict=True)
        return [Outputs(*part, shared, place) for place, part in enumerate(parts)]

    def by_row(self, of_targets: Tensor) -> Sequence[Tensor]:
        """Cut something that is there for every target token into what belongs to each row."""
        return of_targets.split([len(row["target_ids"]) for row in self.rows])

    def task_loss(self) -> Tensor:
        """Return the cross-entropy on target tokens, reduced as the settings say (A5); equation (10), first term."""
        from torch.nn.functional import cross_entropy

        if self.cross_entropy is not None:
            return self.cross_entropy.sums[self.place] / self.denominator
        return cross_entropy(self.logits.float(), self.labels, reduction="sum") / self.denominator


class CrossEntropy:
    """The cross-entropy of a pass for several learners, computed together when the first one asks for its own.

    Args:
        logits: (targets, vocabulary).
        labels: (targets,) token ids.
        counts: how many of the targets belong to each learner.
    """

    def __init__(self, logits: Tensor, labels: Tensor, counts: Sequence[int]):
        self._logits, self._labels, self._counts = logits, labels, list(counts)

    @cached_property
    def sums(self) -> list[Tensor]:
        """Summed over each learner's targets."""
        from torch.nn.functional import cross_entropy

        of_targets = cross_entropy(self._logits.float(), self._labels, reduction="none")
        return [own.sum() for own in of_targets.split(self._counts)]
