"""JointLoRA: one LoRA pair trained on the rows of all tasks at once, the upper reference of sequential learning.

It is learned in the first stage, from tasks that a continual learner has not seen by then; later stages learn nothing,
so that every row of its score matrix is about the same pair. A task weighs as much as it has rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from latent_sweep.methods.lora import LoraLearner, LoraMethod, LoraSettings, Scripts, o_lora_scripts
from latent_sweep.methods.protocol import TaskData

if TYPE_CHECKING:
    from torch import Tensor


class JointLoraSettings(LoraSettings):
    """The `method:` group of a sweep file for JointLoRA."""

    name: Literal["joint_lora"] = "joint_lora"
    """Name of the method."""


class JointLora(LoraMethod):
    """The first stage learns all tasks together; the others take what it left."""

    settings_class = JointLoraSettings

    @classmethod
    def official(cls, family: str, benchmark: str) -> Scripts:
        """Take those of SeqLoRA, on the rows of all tasks."""
        return o_lora_scripts(family, benchmark)

    def reads_history(self, position: int) -> bool:
        """Return False: no stage builds on another."""
        return False

    def learns_from(self, position: int, n_tasks: int) -> Sequence[int]:
        """Return all tasks in the first stage, none later."""
        return range(n_tasks) if position == 0 else ()

    def begin_task(self, task: TaskData, history: Sequence[Mapping[str, Tensor]]) -> LoraLearner:
        """Make a new pair for all tasks."""
        return LoraLearner(self.fresh(task), self.outputs, self.settings)
