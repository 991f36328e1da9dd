"""Clipping and stepping what the members of a pack train, all at once.

AdamW treats every number alike, so the parameters of all members are rows of one matrix: a step is a dozen operations
on it, however many members there are, and the host waits for none of them. Adafactor's moments are of whole matrices;
it steps member by member.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from latent_sweep.sweep.schema import TrainingSettings

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Of AdamW, as torch has them."""


@dataclass
class Trained:
    """The parameters of one learner, and how they are stepped."""

    parameters: Mapping[str, Tensor]
    settings: TrainingSettings
    steps: int
    """How many there will be."""
    taken: int = 0
    """How many there were."""

    @property
    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self.settings, self.taken, self.steps)

    def own_state(self) -> dict[str, Tensor]:
        """Return the parameters and the number of steps, as named tensors."""
        named = {f"parameter.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        return named | {"schedule": torch.tensor(self.taken)}

    @torch.no_grad()
    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state[f"parameter.{name}"])
        self.taken = int(state["schedule"])


def learning_rate(settings: TrainingSettings, step: int, steps: int) -> float:
    """The rate of a step (0-based) of so many: it rises linearly to its peak, then stays or falls linearly to zero."""
    warmup = settings.warmup_steps
    if step < warmup:
        risen = step if settings.warmup_start == "zero" else step + 1
        return settings.learning_rate * (risen / warmup)
    if settings.schedule != "linear":
        return settings.learning_rate
    return settings.learning_rate * ((steps - step) / max(1, steps - warmup))


class Optimizer(Protocol):
    """Steps the parameters of several learners; the loop tells it when."""

    def step(self) -> Tensor:
        """Clip and step; returns the members' gradient norms before clipping, (P,). The clipped gradients stay."""
        ...

    def state(self, member: int) -> dict[str, Tensor]:
        """Return everything that a member needs to go on after a restart, as named tensors."""
        ...

    def load_state(self, member: int, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        ...


def optimizer_of(members: Sequence[Trained]) -> Optimizer:
    """Make what steps these members, which agree in the kind of their optimizer."""
    (kind,) = {member.settings.optimizer for member in members}
    return AdamW(members) if kind == "adamw" else Adafactor(members)


class AdamW:
    """AdamW (Loshchilov & Hutter, 2019) on the parameters of P members as the rows of one matrix, (P, N).

    The members' tensors become views of its rows, each row padded to the longest.
    """

    def __init__(self, members: Sequence[Trained]):
        self._members = members
        sizes = [sum(p.numel() for p in member.parameters.values()) for member in members]
        self._longest = max(sizes)
        first = next(iter(members[0].parameters.values()))
        self._padding = [first.new_zeros(self._longest - size).detach() for size in sizes]
        self._numbers = self._matrix([list(member.parameters.values()) for member in members])
        for member, row in zip(members, self._numbers, strict=True):
            for parameter, view in zip(member.parameters.values(), _views(row, member), strict=True):
                parameter.data = view
        self._average, self._average_square = (torch.zeros_like(self._numbers) for _ in range(2))

    @torch.no_grad()
    def _matrix(self, of_members: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return tensors of the members' parameters as rows, (P, N)."""
        rows = zip(of_members, self._padding, strict=True)
        return torch.cat([part.flatten() for tensors, pad in rows for part in (*tensors, pad)]).view(-1, self._longest)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Clip and step all members."""
        gradient = self._matrix([[_gradient(p) for p in m.parameters.values()] for m in self._members])
        norms = torch.linalg.vector_norm(gradient, dim=1)
        decay, size, root, epsilon, limit = self._scalars(gradient.device)
        gradient *= (limit / (norms.unsqueeze(1) + 1e-6)).clamp_max(1.0)  # as torch clips
        for member, row in zip(self._members, gradient, strict=True):
            for parameter, view in zip(member.parameters.values(), _views(row, member), strict=True):
                parameter.grad = view
            member.taken += 1
        self._average.lerp_(gradient, 1 - BETAS[0])
        self._average_square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        self._numbers.mul_(decay)
        self._numbers.addcdiv_(self._average * size, self._average_square.sqrt().div_(root).add_(epsilon))
        return norms

    def _scalars(self, device: torch.device) -> Sequence[Tensor]:
        """Return each member's scalars of a step, (P, 1) each: decay, size, root of the correction, epsilon, limit.

        `adam_eps: before_correction` divides by `(sqrt(v) + epsilon) / root` and decays after the step: the same
        operations with `epsilon / root` and `size * decay`.
        """
        rows = []
        for member in self._members:
            s, rate, step = member.settings, member.rate, member.taken + 1
            correction = 1 - BETAS[0] ** step, (1 - BETAS[1] ** step) ** 0.5
            decay, size, epsilon = 1 - rate * s.weight_decay, -rate / correction[0], EPSILON
            if s.adam_eps == "before_correction":
                size, epsilon = size * decay, epsilon / correction[1]
            limit = s.gradient_clip or math.inf
            rows.append([decay, size, correction[1], epsilon, limit])
        found = torch.tensor(list(zip(*rows, strict=True)), dtype=self._numbers.dtype)
        if device.type == "cuda":
            found = found.pin_memory().to(device, non_blocking=True)
        return found.unsqueeze(-1).unbind(0)

    def state(self, member: int) -> dict[str, Tensor]:
        """Return parameters, both moments and the number of steps."""
        trained = self._members[member]
        named: dict[str, Tensor] = {}
        for key, moments in (("exp_avg", self._average), ("exp_avg_sq", self._average_square)):
            views = zip(trained.parameters, _views(moments[member], trained), strict=True)
            named |= {f"optimizer.{name}.{key}": view for name, view in views}
        return trained.own_state() | named

    @torch.no_grad()
    def load_state(self, member: int, state: Mapping[str, Tensor]) -> None:
        """Go on from there; the learning rate follows from the step."""
        trained = self._members[member]
        trained.load_own_state(state)
        for key, moments in (("exp_avg", self._average), ("exp_avg_sq", self._average_square)):
            for name, view in zip(trained.parameters, _views(moments[member], trained), strict=True):
                view.copy_(state[f"optimizer.{name}.{key}"])


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _views(row: Tensor, member: Trained) -> list[Tensor]:
    """Cut a member's row into tensors of its parameters' shapes."""
    parameters = list(member.parameters.values())
    sizes = [p.numel() for p in parameters]
    parts = row[: sum(sizes)].split(sizes)
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


class Adafactor:
    """Adafactor (Shazeer & Stern, 2018) with the given rate, neither relative nor scaled, member by member."""

    def __init__(self, members: Sequence[Trained]):
        # torch's own Adafactor always scales the rate by the parameter's size and lets it decay
        from transformers.optimization import Adafactor as OfTransformers

        self._members = members
        options: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
        self._optimizers = [
            OfTransformers(list(m.parameters.values()), lr=m.rate, weight_decay=m.settings.weight_decay, **options)
            for m in members
        ]

    def step(self) -> Tensor:
        """Clip and step every member."""
        norms = []
        for member, optimizer in zip(self._members, self._optimizers, strict=True):
            limit = member.settings.gradient_clip or math.inf
            norms.append(torch.nn.utils.clip_grad_norm_(member.parameters.values(), limit))
            for group in optimizer.param_groups:
                group["lr"] = member.rate
            optimizer.step()
            member.taken += 1
        return torch.stack(norms)

    def state(self, member: int) -> dict[str, Tensor]:
        """Return parameters, moments and step counts."""
        trained = self._members[member]
        named: dict[str, Tensor] = {}
        for name, parameter in trained.parameters.items():
            moments = self._optimizers[member].state[parameter]
            named |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        return trained.own_state() | named

    def load_state(self, member: int, state: Mapping[str, Tensor]) -> None:
        """Go on from there; the learning rate follows from the step."""
        trained = self._members[member]
        trained.load_own_state(state)
        for name, parameter in trained.parameters.items():
            prefix = f"optimizer.{name}."
            moments = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            self._optimizers[member].state[parameter] = {
                # a step count stays where it was made, on the CPU
                key: value.clone() if value.dim() == 0 else value.to(parameter.device).clone()
                for key, value in moments.items()
            }
