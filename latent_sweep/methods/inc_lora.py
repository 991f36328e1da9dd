"""IncLoRA: a new LoRA pair for every task; the earlier pairs are frozen, and all of them are summed.

`train_active: current` with `router.combine: oracle` makes it per-task fine-tuning, the reference without forgetting.
"""

from __future__ import annotations

from typing import Literal

from latent_sweep.methods.lora import LoraLearner, TaskAdapterMethod, TaskAdapterSettings, o_lora_scripts
from latent_sweep.methods.protocol import Snapshots, TaskData


class IncLoraSettings(TaskAdapterSettings):
    """The `method:` group of a sweep file for IncLoRA."""

    name: Literal["inc_lora"] = "inc_lora"
    """Name of the method."""


class IncLora(TaskAdapterMethod):
    """`dW = s sum_t B_t A_t`, where only the newest pair is trained."""

    settings_class = IncLoraSettings
    official = staticmethod(o_lora_scripts)

    def begin_task(self, task: TaskData, history: Snapshots) -> LoraLearner:
        return LoraLearner(self.fresh(task), self.outputs, self.settings, self.active(history))
