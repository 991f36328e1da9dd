"""Engines own the backbone and step the trained parameters. Plain torch here; DeepSpeed is in `backends`.

The loop over steps is the same for all of them, and so are its results, to rounding: an engine is no part of any
training's identity, and what one has checkpointed another goes on from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from latent_sweep.backbones.loading import Backbone, load_backbone
from latent_sweep.learn.worker_group import ALONE, WorkerGroup

if TYPE_CHECKING:
    from latent_sweep.backbones.known import BackboneSettings
    from latent_sweep.sweep.groups import TrainingSettings


class Optimizer(Protocol):
    """Steps one learner's parameters; the loop tells it when."""

    def step(self) -> float:
        """Clip and step; returns the gradient norm before clipping. The clipped gradients stay until `clear`."""
        ...

    def clear(self) -> None:
        """Forget the gradients."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to go on after a restart, as named tensors: the same for every engine."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        ...


class Engine:
    """Plain torch: every worker of the group holds the whole backbone and steps the same parameters.

    Args:
        group: the workers that compute the trial together.
        backbone: one that is loaded already.
    """

    answers_apart = True
    """Whether workers can answer different rows at the same time."""

    def __init__(self, group: WorkerGroup = ALONE, backbone: Backbone | None = None):
        self.group = group
        self._backbone = backbone

    @property
    def backbone(self) -> Backbone:
        """Return the backbone that was loaded last."""
        assert self._backbone is not None, "load it first"
        return self._backbone

    def load(self, settings: BackboneSettings) -> Backbone:
        """Load a backbone on this engine; every worker of the group calls it at the same time."""
        self._backbone = load_backbone(settings)
        return self._backbone

    def optimizer(self, parameters: Mapping[str, Tensor], settings: TrainingSettings, steps: int) -> Optimizer:
        """Make the optimizer that steps these parameters for so many steps."""
        return TorchOptimizer(parameters, settings, steps)

    def facts(self) -> dict[str, Any]:
        """Return the facts that a result records of its engine."""
        return {"engine": "torch", "workers": self.group.size}

    def begin_learning(self) -> None:
        """Prepare for training; every worker is about to train."""

    def begin_answering(self) -> None:
        """Prepare for answering; every worker is about to generate answers, possibly to different rows."""


def learning_rate(settings: TrainingSettings, step: int, steps: int) -> float:
    """The rate of a step (0-based) of so many: it rises linearly to its peak, then stays or falls linearly to zero."""
    warmup = settings.warmup_steps
    if step < warmup:
        risen = step if settings.warmup_start == "zero" else step + 1
        return settings.learning_rate * (risen / warmup)
    if settings.schedule != "linear":
        return settings.learning_rate
    return settings.learning_rate * ((steps - step) / max(1, steps - warmup))


class TorchOptimizer:
    """AdamW or Adafactor on whole parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainingSettings, steps: int):
        self._parameters, self._settings, self._steps = dict(parameters), settings, steps
        self._optimizer = optimizer_of(list(parameters.values()), settings)
        self._taken = 0

    def step(self) -> float:
        """Clip and step."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.gradient_clip or math.inf)
        set_learning_rate(self._optimizer, learning_rate(self._settings, self._taken, self._steps))
        self._optimizer.step()
        self._taken += 1
        return float(norm)

    def clear(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return parameters, the optimizer's moments and step counts."""
        named = {f"parameter.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            named |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        return named | {"schedule": torch.tensor(self._taken)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there; the learning rate follows from the step."""
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(state[f"parameter.{name}"])
            prefix = f"optimizer.{name}."
            moments = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            self._optimizer.state[parameter] = {
                # a step count stays where it was made, on the CPU
                key: value.clone() if value.dim() == 0 else value.to(parameter.device).clone()
                for key, value in moments.items()
            }
        self._taken = int(state["schedule"])


def optimizer_of(parameters: list[Tensor], settings: TrainingSettings) -> torch.optim.Optimizer:
    """The optimizer that the settings ask for; its rate is set at every step."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer != "adafactor":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    from transformers.optimization import Adafactor

    # torch's own Adafactor always scales the rate by the parameter's size and lets it decay
    return Adafactor(parameters, lr=rate, weight_decay=decay, scale_parameter=False, relative_step=False)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group of parameters this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
