"""SeqLoRA: one LoRA pair, trained on task after task and never started anew; what it forgets is the reference."""

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
    """Each task goes on from the pair that the one before left, with a fresh optimizer; the newest answers."""

    settings_class = SeqLoraSettings

    @classmethod
    def official(cls, family: str, benchmark: str) -> Scripts:
        """Take O-LoRA's, which also ran it."""
        return o_lora_scripts(family, benchmark)

    def begin_task(self, task: TaskData, history: Sequence[Mapping[str, Tensor]]) -> LoraLearner:
        """Take the previous pair, to be trained further."""
        return LoraLearner(self.carried(task, history), self.outputs, self.settings)
