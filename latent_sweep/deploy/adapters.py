"""The adapters of a model as LoRA has them: one for each snapshot that answers alone, or one of all that are summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latent_sweep.errors import ConfigError
from latent_sweep.methods.checked import defined_in
from latent_sweep.methods.protocol import LowRankPairs, Method

if TYPE_CHECKING:
    from latent_sweep.deploy.model import ContinualModel

SUM, LAST = "sum", "last"
"""Ways of mixing that answer every text with one adapter, which has their name."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """What answers, as one LoRA adapter."""

    name: str
    """A task's, or how the snapshots are mixed where all texts have the same adapter."""
    tasks: tuple[str, ...]
    """The tasks that it has learned."""
    pairs: LowRankPairs
    carried_on: bool = False
    """Whether it is the only one of its method, which each task has changed."""

    @property
    def learned(self) -> str:
        """Say of which tasks it is, for people."""
        return f"{'after' if self.carried_on else 'for'} {', '.join(self.tasks)}"

    @property
    def rank(self) -> int:
        """Return r, of the sum's that of all branches together."""
        return len(self.pairs.A[0])


def adapters_of(model: ContinualModel) -> list[Adapter]:
    """The adapters that a model answers with.

    Raises:
        ConfigError: its snapshots are no LoRA adapters.
    """
    method, mode, learned = model.method, model.trial.settings.router.combine, model.content.learned
    if defined_in(type(method), "low_rank_pairs") is Method:
        raise ConfigError(
            f"method {method.settings.name}: its snapshots are no LoRA adapters (a soft prompt stands behind the text "
            "here, and before it in peft), so only `--to model` and `--to mlflow` can export them"
        )
    if not _blends_pairs(type(method)):
        raise ConfigError(
            f"method {method.settings.name}: it blends its snapshots in a way of its own, which adapters of "
            "peft do not have; only `--to model` and `--to mlflow` can export it"
        )
    pairs = [method.low_rank_pairs(task.snapshot.tensors) for task in learned]
    if mode == "last":
        carried_on = method.combinations == (LAST,)
        return [Adapter(LAST, model.tasks if carried_on else model.tasks[-1:], pairs[-1], carried_on)]
    if mode == "sum":
        return [Adapter(SUM, model.tasks, summed(pairs))]
    return [Adapter(name, (name,), own) for name, own in zip(model.tasks, pairs, strict=True)]


def _blends_pairs(kind: type) -> bool:
    """Whether what blends snapshots is known to whoever says what pairs they are: no kind derived from that one."""
    return issubclass(defined_in(kind, "low_rank_pairs"), defined_in(kind, "combine"))


def summed(pairs: Sequence[LowRankPairs]) -> LowRankPairs:
    """Put adapters of one scale side by side: their sum, of their summed rank."""
    import torch

    A = [torch.cat(list(of_projection)) for of_projection in zip(*(own.A for own in pairs), strict=True)]
    B = [torch.cat(list(of_projection), 1) for of_projection in zip(*(own.B for own in pairs), strict=True)]
    return LowRankPairs(A, B, pairs[0].scale)


def adapter_for(model: ContinualModel, task: str | None) -> Adapter:
    """The one adapter that answers a task's texts, or all texts.

    Raises:
        ConfigError: the model has one for each task and none is named, or one for all and a task is named.
    """
    found = {adapter.name: adapter for adapter in adapters_of(model)}
    mode = model.trial.settings.router.combine
    if task is None and len(found) > 1:
        raise ConfigError(
            f"task: found none; this model ({mode}) has an adapter for each task. Name one of {', '.join(found)}"
        )
    if task is None:
        return next(iter(found.values()))
    if mode in (SUM, LAST):
        raise ConfigError(f"task: found {task!r}; this model ({mode}) answers every text with one adapter. Name none")
    if task not in found:
        raise ConfigError(f"task: found {task!r}; expected one that was learned: {', '.join(found)}")
    return found[task]
