"""SeqLoRA: one LoRA pair fine-tuned on task after task, the reference for forgetting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from latent_sweep.methods.lora import LoraLearner, LoraMethod, LoraSettings, Scripts, o_lora_scripts
from latent_sweep.methods.protocol import TaskData

if TYPE_CHECKING:
    from torch import Tensor


class SeqLoraSettings(LoraSettings):
    """The `method:` group of a sweep file for SeqLoRA."""

    name: Literal["seq_lora"] = "seq_lora"
    """Name of the method."""


class SeqLora(LoraMethod):
    """One pair trained on all tasks in turn, with a new optimizer for each."""

    settings_class = SeqLoraSettings

    @classmethod
    def official(cls, family: str, benchmark: str) -> Scripts:
        """Return O-LoRA's scripts, which also run this method."""
        return o_lora_scripts(family, benchmark)

    def begin_task(self, task: TaskData, history: Sequence[Mapping[str, Tensor]]) -> LoraLearner:
        """Continue from the previous pair."""
        return LoraLearner(self.carried(task, history), self.outputs, self.settings)
