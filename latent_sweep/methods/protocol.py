"""The contract between a continual-learning method and everything else.

A method is one file: its settings, a `Method` that says what its snapshots mean, and a `Learner` that lives for one
task. Method files import torch only inside functions, so that a sweep can be read and planned without it. What only
some methods can do is in `capabilities.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from latent_sweep.backbones.outputs import Example, Outputs
from latent_sweep.settings import Settings, filled

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from latent_sweep.adapters.bank import Adaptation, AdapterBank
    from latent_sweep.backbones.loading import Backbone

Combination = Literal["soft", "hard", "ngram", "gates", "sum", "last", "oracle"]

ADAPTER_COMBINATIONS: tuple[Combination, ...] = ("sum", "soft", "hard", "ngram", "last", "oracle")
"""How snapshots can answer together that are adapters of their own."""


class MethodSettings(Settings):
    """The settings that every method's `method:` group has."""

    name: str
    """Name of the method, as registered in `latent_sweep.methods`."""

    def answer_identity(self, source: str | None) -> dict[str, Any]:
        """Return what answers are named by, besides the snapshots: the settings that learning does not read.

        Of a method from outside, which has a `source`, these are all: what its `stage_identity` leaves out may be read
        by its `combine` or `gates`, though nothing marks it so.
        """
        return self.inference_identity() if source is None else self.identity()


@dataclass(frozen=True)
class MethodContext:
    """The surroundings that a method works in: the backbone, the bank that adapts it, and the folder for its caches."""

    backbone: Backbone
    bank: AdapterBank
    storage: Path
    largest_rank: int
    """The largest rank of the sweep: factors computed for it serve every smaller one."""
    passes: int = 1
    """How many passes a batch is cut into that statistics are read from: more where memory has not sufficed."""
    keeps_features: bool = True
    """Whether features are kept in the storage: not those of texts that users ask a model."""

    def features(
        self, rows: Sequence[Example] | Sequence[Sequence[int]], layer: int | None = None
    ) -> npt.NDArray[np.float32]:
        """Return frozen features of prompts, (rows, d): for gates or a router of one's own; nothing is trained of them.

        They are kept in the storage, beside the router's embeddings.

        Args:
            rows: rows of a task, whose `prompt_ids` count, or prompts as token ids, as `gates` is given them.
            layer: None takes the mean token embedding of the whole prompt, which the router reads by its default
                (`router.pool`); a number the mean hidden state as transformers counts them: 0 is what the first block
                reads, k stands behind block k, -1 behind the last one; of T5's encoder.

        Raises:
            ConfigError: a row has no token, there is no such layer, or hidden states are asked of a backbone that is
                spread over several workers.
        """
        from latent_sweep.backbones.features import features

        prompts = [row["prompt_ids"] if isinstance(row, Mapping) else row for row in rows]
        folder = self.storage if self.keeps_features else None
        return features(self.backbone, self.bank, prompts, layer, folder)

    def rows_in_a_pass(self, batch_size: int) -> int:
        """Return how many rows of such a batch go into one pass."""
        return -(-batch_size // self.passes)


@dataclass(frozen=True)
class TaskData:
    """The task to be learned, as far as a method may know it."""

    name: str
    position: int
    """0-based, in the trial's order."""
    n_tasks: int
    """Length of the whole trial."""
    rows: Sequence[Example]
    """Tokenised training rows."""
    generator: Callable[[str], torch.Generator]
    """A source of random draws for a purpose, derived from seed, task and purpose."""
    rows_at_once: int | None = None
    """Rows of a forward pass of its training at most; None where it is not trained on."""


class Method:
    """A way to learn, with its settings. Stateless between tasks: all it remembers is in the snapshots.

    Attributes:
        settings_class: the pydantic class of its `method:` group.
        version: raised when the same settings would train to something else; part of every lineage.
        combinations: how its snapshots can answer together; the first is taken when the sweep file does not say.
        factored: whether its adapters lie in frozen truncated factors of the weights, which every member keeps.
        keeps_rows: whether its snapshots hold rows, for later tasks to train on.
        gradient_rows: of how many rows it measures at once, after a task, the gradient of each at most; 0 does not.
    """

    settings_class: ClassVar[type[MethodSettings]]
    version: ClassVar[int] = 1
    combinations: ClassVar[tuple[Combination, ...]] = ("last",)
    factored: ClassVar[bool] = False
    keeps_rows: ClassVar[bool] = False
    gradient_rows: ClassVar[int] = 0

    def __init__(self, settings: Any, context: MethodContext | None = None):
        self.settings = settings
        self._context = context

    @property
    def context(self) -> MethodContext:
        """Backbone and folders; a method built for planning has none."""
        assert self._context is not None, "this method was built for planning only"
        return self._context

    # --- planning: no torch, no data ---

    @classmethod
    def resolve(cls, settings: Any, backbone: str, benchmark: str) -> Any:
        """Fill in the settings that a method is made with, from those of a sweep file and from `defaults`."""
        return filled(settings, cls.settings_class, cls.defaults(settings, backbone, benchmark))

    @classmethod
    def defaults(cls, settings: Any, backbone: str, benchmark: str) -> Mapping[str, Any]:
        """Return settings that the sweep file leaves out, by name, inner groups as mappings; else their class says."""
        return {}

    @classmethod
    def training_defaults(cls, settings: Any, backbone: str, benchmark: str) -> Mapping[str, Any]:
        """Return training settings that this method's preset prefers to the paper's common protocol, by name."""
        return {}

    def reads_history(self, position: int) -> bool:
        """Whether learning the task at this position (0-based) reads earlier snapshots: then they name the lineage."""
        return position > 0

    def stage_identity(self, position: int) -> dict[str, Any]:
        """Return the settings that learning the task at this position reads; the others are no part of its lineage."""
        return {name: value for name, value in self.settings.training_identity().items() if name != "name"}

    def rank(self) -> int:
        """Return the adapter rank, checked against the backbone's projections before a run; 0 without such a limit."""
        raise NotImplementedError

    def parameter_count(self, shapes: Mapping[str, tuple[int, int]], width: int) -> int:
        """Count trainable numbers per task, from the adapted projections' shapes (out, in) and the embedding width."""
        raise NotImplementedError

    @property
    def packable(self) -> bool:
        """Whether learners train the same beside others as alone: not where masks are drawn for a whole batch."""
        return not getattr(self.settings, "dropout", 0.0)

    @property
    def reads_padding(self) -> bool:
        """Whether what a learner makes of a row depends on how long the longest row is that it is read with."""
        return False

    # --- learning and answering ---

    def begin_task(self, task: TaskData, history: Sequence[Mapping[str, Tensor]]) -> Learner:
        """Make a learner for this task.

        Args:
            history: tensors of the earlier snapshots, oldest first; empty where `reads_history` is False. Nobody holds
                them: each is read when it is asked for, anew every time.
        """
        raise NotImplementedError

    def combine(self, history: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Adaptation:
        """Return the adaptation by which these snapshots answer, weighted row by row: weights (rows, snapshots).

        One row of weights holds for every row of any batch.
        """
        raise NotImplementedError


class Learner:
    """Learns one task: the only mutable thing. The loop owns backward, clipping and stepping."""

    def parameters(self) -> dict[str, Tensor]:
        """Return what is trained, by name: float32 leaves that require gradients."""
        raise NotImplementedError

    def adaptation(self, rows: Sequence[Example]) -> Adaptation:
        """Return the adaptation of the backbone for these rows during training and validation."""
        raise NotImplementedError

    def loss(self, outputs: Outputs) -> dict[str, Tensor]:
        """Return named terms that depend on data, each scaled so that micro-batches add up; the loop sums them."""
        return {"task": outputs.task_loss()}

    def penalty(self) -> dict[str, Tensor]:
        """Return named terms that depend on the parameters alone, added once per optimizer step."""
        return {}

    def after_step(self, step: int) -> None:
        """Act on an optimizer step (0-based) that was taken, while its clipped gradients are still there."""

    def finish(self) -> dict[str, Tensor]:
        """Return the tensors of this task's snapshot, all of them finite."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.parameters().items()}
