"""The frozen backbone without an adapter, the lower reference. It trains nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from latent_sweep.backbones.outputs import Example
from latent_sweep.methods.protocol import Learner, Method, MethodSettings, Snapshots, TaskData

if TYPE_CHECKING:
    from torch import Tensor

    from latent_sweep.adapters.bank import Adaptation


class ZeroShotSettings(MethodSettings):
    """The `method:` group of a sweep file for the frozen backbone."""

    name: Literal["zero_shot"] = "zero_shot"
    """Name of the method."""


class ZeroShot(Method):
    """Answers without an adapter; its snapshots are empty."""

    settings_class = ZeroShotSettings

    def reads_history(self, position: int) -> bool:
        return False

    def learns_from(self, position: int, n_tasks: int) -> Sequence[int]:
        return ()

    def rank(self) -> int:
        return 0

    def parameter_count(self, shapes: Mapping[str, tuple[int, int]], width: int) -> int:
        return 0

    def begin_task(self, task: TaskData, history: Snapshots) -> NothingToLearn:
        return NothingToLearn()

    def combine(self, history: Snapshots, weights: Tensor) -> Adaptation:
        from latent_sweep.adapters.bank import Adaptation

        return Adaptation()


class NothingToLearn(Learner):
    """A learner without parameters; it leaves an empty snapshot and is never trained."""

    def parameters(self) -> dict[str, Tensor]:
        return {}

    def adaptation(self, rows: Sequence[Example]) -> Adaptation:
        from latent_sweep.adapters.bank import Adaptation

        return Adaptation()
