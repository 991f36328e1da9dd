"""ELLA: IncLoRA whose new update avoids the weights that earlier tasks changed, entry by entry.

    CE + lambda_1 sum over projections of ||(sum_{i<t} dW_i) * dW_t||_F^2        dW_i = s B_i A_i

Only the sum of the earlier updates is read. No code was released; the published formula leaves open whether s is in the
updates. Here it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from latent_sweep.adapters.inputs import PRODUCT_BLOCK
from latent_sweep.methods.lora import LoraLearner, TaskAdapterMethod, TaskAdapterSettings
from latent_sweep.methods.protocol import Snapshots, TaskData

if TYPE_CHECKING:
    from torch import Tensor

    from latent_sweep.adapters.bank import Delta
    from latent_sweep.adapters.lora import LoraPair


class EllaSettings(TaskAdapterSettings):
    """The `method:` group of a sweep file for ELLA."""

    name: Literal["ella"] = "ella"
    """Name of the method."""
    lambda_1: float = Field(1e4, ge=0)
    """Weight of the squared norm. The default is ours: entries of an update are about 1e-3, and two are multiplied and
    squared. Search 1e2 to 1e6 on the first two or three tasks."""


class Ella(TaskAdapterMethod):
    """`dW = s sum_t B_t A_t`; loss = task + lambda_1 ||(sum_i dW_i) * dW_t||_F^2."""

    settings_class = EllaSettings
    later_settings = (*TaskAdapterMethod.later_settings, "lambda_1")
    settings: EllaSettings

    def reads_history(self, position: int) -> bool:
        return super().reads_history(position) or (position > 0 and self.settings.lambda_1 > 0)

    def held_bytes(self, shapes: Mapping[str, tuple[int, int]], n_tasks: int) -> int:
        whole = sum(m for m, _ in shapes.values()) * max(n for _, n in shapes.values())
        return 4 * (whole + 3 * min(PRODUCT_BLOCK, whole)) if self.settings.lambda_1 else 0

    def begin_task(self, task: TaskData, history: Snapshots) -> EllaLearner:
        earlier = [self.pair(snapshot) for snapshot in history] if self.settings.lambda_1 else []
        return EllaLearner(self, self.fresh(task), self.active(history), earlier)


class EllaLearner(LoraLearner):
    """Trains one pair away from the sum of the earlier pairs' updates."""

    settings: EllaSettings
    capturable = LoraLearner.capturable

    def __init__(self, method: Ella, pair: LoraPair, active: Sequence[Delta], earlier: Sequence[LoraPair]):
        import torch

        from latent_sweep.adapters.products import Products

        super().__init__(method, pair, active)
        self._products = Products(self.outputs, self.A.shape[2], self.A.device)
        self._squares: list[Tensor] = []
        if earlier:  # along the rank, one product is the sum of all
            A, B = torch.cat([A for A, _ in earlier], 1), torch.cat([B for _, B in earlier], 1)
            for sums in self._products.of(A, B):
                self._squares.append(sums.mul_(self.settings.s).square_())

    def penalty(self) -> dict[str, Tensor]:
        if not self._squares:
            return {}
        weight = self.settings.lambda_1 * self.settings.s**2

        def squared(number: int, product: Tensor) -> tuple[Tensor, Tensor]:
            weighed = self._squares[number] * product
            return (weighed * product).sum(), 2 * weighed

        return {"overlap": weight * self._products.sum(self.A, self.B, squared)}
