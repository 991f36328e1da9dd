"""The contract between a continual-learning method and everything else.

A method is one file: its settings, a `Method` that says what its snapshots mean, and a `Learner` that lives for one
task. Method files import torch only inside functions, so that a sweep can be read and planned without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from latent_sweep.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from latent_sweep.adapters.bank import Delta
    from latent_sweep.backbones import Backbone

Mixing = Literal["soft", "hard", "sum", "last", "oracle"]


IGNORED = -100
"""Label of positions that carry no loss."""


class MethodSettings(Settings):
    """What every method's `method:` group has."""

    name: str
    """Name of the method, as registered in `latent_sweep.methods`."""


@dataclass(frozen=True)
class Workplace:
    """Where a method works: the backbone and the folder its caches may use."""

    backbone: Backbone
    storage: Path
    largest_rank: int
    """The largest rank of the sweep: factors computed for it serve every smaller one."""


class Method:
    """What a method's settings and snapshots mean. Stateless between tasks: all it remembers is in the snapshots.

    Attributes:
        settings_class: the pydantic class of its `method:` group.
        version: raised when the same settings would train to something else; part of every lineage.
        default_mixing: how its snapshots answer together when the sweep file does not say.
    """

    settings_class: ClassVar[type[MethodSettings]]
    version: ClassVar[int] = 1
    default_mixing: ClassVar[Mixing] = "last"

    def __init__(self, settings: Any, workplace: Workplace | None = None):
        self.settings = settings
        self._workplace = workplace

    @property
    def workplace(self) -> Workplace:
        """Backbone and folders; a method built for planning has none."""
        assert self._workplace is not None, "this method was built for planning only"
        return self._workplace

    @classmethod
    def resolve(cls, settings: Any, backbone: str, benchmark: str) -> Any:
        """Fill in what the sweep file left out, from the paper's protocol for this backbone and benchmark."""
        return settings

    def reads_history(self, position: int) -> bool:
        """Whether learning the task at this position (0-based) reads earlier snapshots: then they name the lineage."""
        return position > 0

    def stage_identity(self, position: int) -> dict[str, Any]:
        """The settings that learning the task at this position reads; the others are no part of its lineage."""
        return self.settings.training_identity()

    def rank(self) -> int:
        """Adapter rank, checked against the backbone's projections before anything runs."""
        raise NotImplementedError

    def parameter_count(self, shapes: Mapping[str, tuple[int, int]]) -> int:
        """Trainable numbers per task, from the shapes (out, in) of the adapted projections."""
        raise NotImplementedError

    def begin_task(self, position: int, history: Sequence[Mapping[str, Tensor]], generator: torch.Generator) -> Learner:
        """A learner for the task at this position.

        Args:
            history: tensors of the earlier snapshots, oldest first; empty where `reads_history` is False.
            generator: source of every random draw, derived from seed and task.
        """
        raise NotImplementedError

    def mixture(self, history: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Sequence[Delta]:
        """The deltas that answer with these snapshots, weighted row by row: weights (rows, snapshots)."""
        raise NotImplementedError


@dataclass(frozen=True)
class Outputs:
    """What a forward pass gives a learner: logits where there are labels, and how they count."""

    logits: Tensor
    """(rows, longest target, vocabulary)."""
    labels: Tensor
    """(rows, longest target) token ids, IGNORED where there is none."""
    denominator: float
    """What the summed cross-entropy is divided by: the same for every micro-batch of a step, so that they add up."""

    def task_loss(self) -> Tensor:
        """Cross-entropy on target tokens, reduced as the settings say (A5); equation (10), first term."""
        from torch.nn.functional import cross_entropy

        logits, labels = self.logits.float().flatten(0, 1), self.labels.flatten()
        return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / self.denominator


class Learner:
    """Learns one task: the only mutable thing. The loop owns backward, clipping and stepping."""

    def parameters(self) -> dict[str, Tensor]:
        """What is trained, by name: float32 leaves that require gradients."""
        raise NotImplementedError

    def deltas(self) -> Sequence[Delta]:
        """What the projections add during training and validation."""
        raise NotImplementedError

    def first_layer_gradients(self) -> list[Tensor | None]:
        """Gradients of the first adapted projection: all zero at the first step means that no signal reaches it."""
        raise NotImplementedError

    def loss(self, outputs: Outputs) -> dict[str, Tensor]:
        """Named terms that depend on data, each already scaled so that micro-batches add up; the loop sums them."""
        return {"task": outputs.task_loss()}

    def penalty(self) -> dict[str, Tensor]:
        """Named terms that depend on the parameters alone, added once per optimizer step."""
        return {}

    def after_backward(self) -> None:
        """Called when the gradients of a step are complete, before clipping."""

    def after_step(self, step: int) -> None:
        """Called after every optimizer step (0-based)."""

    def finish(self) -> dict[str, Tensor]:
        """The tensors of this task's snapshot."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.parameters().items()}
