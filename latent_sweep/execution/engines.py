"""Makes the engine that a sweep asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latent_sweep.training.engine import Engine
from latent_sweep.training.worker_group import ALONE, WorkerGroup, join, listen

if TYPE_CHECKING:
    from latent_sweep.sweep.schema import EngineSettings


def engine_of(settings: EngineSettings, group: WorkerGroup = ALONE) -> Engine:
    """Return the engine that `run.engine` asks for; ConfigError if DeepSpeed does not accept a setting."""
    if settings.name == "torch":
        return Engine(group)
    import torch.distributed as dist

    from latent_sweep.execution.deepspeed import DeepSpeedEngine

    if group.size == 1 and not dist.is_initialized():
        meeting = listen("127.0.0.1")
        group = join(0, 1, "127.0.0.1", meeting.getsockname()[1], meeting)
    return DeepSpeedEngine(group, settings)
