"""MIGU (arXiv 2406.17245): at every step, only the rows of A and B with the largest outputs get a gradient.

From the second task on, the magnitude of each output is summed over the tokens of a step's examples. Of A, the output
is A h, with r entries; of B, that of the whole adapted projection, W h and all deltas, with m entries. In each
projection, rows whose magnitude is below the quantile `migu` of the projection's own magnitudes get no gradient.
docs/methods.md names the released versions and the departures from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from latent_sweep.methods.protocol import GradientStep


class Masked(Protocol):
    """A learner of a pair, as in `latent_sweep.methods.lora`."""

    A: Tensor
    B: Tensor
    outputs: Sequence[int]

    def parameters(self) -> Mapping[str, Tensor]: ...


class RowMask:
    """The magnitudes of one step's outputs, and the mask that they give."""

    def __init__(self, learner: Masked, threshold: float):
        import torch

        self._learner, self._threshold = learner, threshold
        outputs, device = learner.outputs, learner.B.device
        starts = torch.tensor([0, *outputs]).cumsum(0).tolist()
        # rows of B of the projections with equally many outputs, (projections, m) each
        self._alike = [
            torch.stack([torch.arange(starts[i], starts[i + 1]) for i, own in enumerate(outputs) if own == m]).to(
                device
            )
            for m in dict.fromkeys(outputs)
        ]
        count, rank = learner.A.shape[:2]
        self._sums = torch.zeros(len(learner.B) + count * rank, device=device)
        of_B, of_A = self._sums.split([len(learner.B), count * rank])
        self._of_B, self._of_A = of_B, of_A.view(count, rank)
        self._of_projection = of_B.split(list(outputs))

    def observe(self, index: int, h: Tensor, output: Tensor, counts: Tensor) -> None:
        weights = counts.flatten().float()
        inner = h @ self._learner.A[index, :, : h.shape[-1]].detach().to(h.dtype).T
        self._of_A[index] += weights @ inner.flatten(0, 1).abs().float()
        self._of_projection[index].add_(weights @ output.flatten(0, 1).abs().float())

    def apply(self, step: GradientStep) -> None:
        import torch

        step.add_up([self._sums])
        kept_of_B = torch.empty_like(self._of_B)
        for rows in self._alike:
            kept_of_B[rows] = self._kept(self._of_B[rows])
        masks = {"A": self._kept(self._of_A), "B": kept_of_B}
        for name, parameter in self._learner.parameters().items():
            if name in masks:  # InfLoRA does not train A
                assert parameter.grad is not None
                parameter.grad.mul_(masks[name].unsqueeze(-1))
        self._sums.zero_()

    def _kept(self, magnitudes: Tensor) -> Tensor:
        """Return 1 for each of a projection's magnitudes, (projections, rows), that reaches the quantile, else 0."""
        last = magnitudes.shape[1] - 1
        below = int(self._threshold * last)
        ordered, share = magnitudes.sort(dim=1).values, self._threshold * last - below
        quantile = ordered[:, below].lerp(ordered[:, min(below + 1, last)], share)
        return (magnitudes >= quantile.unsqueeze(1)).float()
