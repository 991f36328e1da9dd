"""What some methods can do besides the contract, each recognised by the members that the method defines.

A method that rehearses, gates or prompts says so by having the members below; all others are treated as the functions
here say, and write nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from latent_sweep.backbones.outputs import Example, Outputs
from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import Learner, Method, TaskData

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


# --- of a method -----------------------------------------------------------------------------------------------------


@runtime_checkable
class ChoosesTasks(Protocol):
    """Learns from other tasks than the one at hand: a reference run, such as joint training."""

    def learns_from(self, position: int, n_tasks: int) -> Sequence[int]:
        """Positions of the tasks whose training rows the stage at this position reads; none: nothing is trained."""


@runtime_checkable
class Gated(Protocol):
    """Weighs its snapshots itself, by the mixing `gates`."""

    def gates(
        self, history: Sequence[Mapping[str, Tensor]], prompts: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.float64]:
        """A weight for every snapshot in every row, (rows, snapshots), from the prompts alone."""


@runtime_checkable
class TriesTasks(Protocol):
    """Can see before anything is learned that a task cannot be."""

    def try_task(self, task: TaskData) -> None:
        """Raise what would stop this task once its turn comes, as a LatentSweepError.

        It is asked of every task to be learned before the first one is, on every worker of a group; it must be cheap,
        draw nothing and leave nothing behind.
        """


@runtime_checkable
class SoftPrompted(Protocol):
    """Has the model read virtual tokens."""

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids that the model reads for this prompt when it answers."""


@dataclass(frozen=True)
class LowRankPairs:
    """What a snapshot adds to the adapted projections: `dW = scale B A` of each, in the backbone's order."""

    A: Sequence[Tensor]
    """(r, n) of every projection."""
    B: Sequence[Tensor]
    """(m, r) of every projection."""
    scale: float


@runtime_checkable
class HasLowRankPairs(Protocol):
    """Has snapshots that are LoRA adapters, whatever was trained of them: other programs can take them."""

    def low_rank_pairs(self, snapshot: Mapping[str, Tensor]) -> LowRankPairs:
        """The pairs of one snapshot, in float32."""


def tasks_learned(method: Method, position: int, n_tasks: int) -> Sequence[int]:
    """Positions of the tasks whose training rows the stage at this position reads: its own, or the method's choice."""
    return method.learns_from(position, n_tasks) if isinstance(method, ChoosesTasks) else (position,)


def gates_of(
    method: Method, history: Sequence[Mapping[str, Tensor]], prompts: Sequence[Sequence[int]]
) -> npt.NDArray[np.float64]:
    """Return the gates of a method, (rows, snapshots).

    Raises:
        ConfigError: they are not finite numbers of this shape.
    """
    import numpy as np

    assert isinstance(method, Gated), "planning has refused the mixing `gates`"
    name, shape = method.settings.name, (len(prompts), len(history))
    found = method.gates(history, prompts)
    try:
        weights = np.asarray(found, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"method {name}: gates gave {type(found).__name__}, no array of numbers: {error}") from error
    if weights.shape != shape or not np.isfinite(weights).all():
        told = "numbers that are not finite" if weights.shape == shape else f"an array of shape {weights.shape}"
        raise ConfigError(f"method {name}: gates gave {told}; expected finite weights (rows, snapshots), {shape}")
    return weights


def prompt_read(method: Method, ids: Sequence[int]) -> list[int]:
    """Return the ids that the model reads for this prompt when it answers: with virtual tokens where there are some."""
    return method.prompt(ids) if isinstance(method, SoftPrompted) else list(ids)


# --- of a learner ----------------------------------------------------------------------------------------------------


@runtime_checkable
class MakesExamples(Protocol):
    """Trains on other rows than the task's own, such as rehearsed ones."""

    def examples(self, rows: Sequence[Example]) -> Sequence[Example]:
        """The rows to train on, made from the task's own; held-out rows are never among those given."""


@runtime_checkable
class Stateful(Protocol):
    """Keeps more than its parameters while a task is learned."""

    def state(self) -> dict[str, Tensor]:
        """Return what changes while the task is learned, apart from the parameters; the checkpoint keeps it."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave; the parameters have their values back by then."""


@runtime_checkable
class DrawsRows(Protocol):
    """Draws what its rows are made of when the task begins; with other rounding, as elsewhere, it would draw others."""

    def drawn(self) -> dict[str, Tensor]:
        """Return what was drawn; the checkpoint keeps it."""

    def load_drawn(self, drawn: Mapping[str, Tensor]) -> None:
        """Take what `drawn` gave in place of what was drawn now, before the rows are made."""


@runtime_checkable
class Measured(Protocol):
    """Has numbers to tell of a task."""

    def facts(self) -> dict[str, float]:
        """Numbers worth telling once the task is learned, after `finish`: counts, rates, sizes."""


@runtime_checkable
class SharesPenalty(Protocol):
    """Computes the penalties of several learners of its kind at once, when they train side by side."""

    @staticmethod
    def penalties(learners: Sequence[Any]) -> list[dict[str, Tensor]]:
        """What `penalty` of each of them gives, in their order."""


def may_make_examples(method: Method) -> bool:
    """Whether tasks may be learned from other rows than their own: a learner in the module of the method makes some.

    Which learner `begin_task` gives is known only once a task is there.
    """
    places = [vars(sys.modules[kind.__module__]) for kind in type(method).__mro__]
    kinds = [found for place in places for found in place.values() if isinstance(found, type)]
    return any(issubclass(kind, Learner) and issubclass(kind, MakesExamples) for kind in kinds)


def loss_of(learner: Learner, outputs: Outputs) -> Mapping[str, Tensor]:
    """Return the terms of a learner's loss that depend on data.

    Raises:
        ConfigError: one of them is no tensor without dimensions.
    """
    return _scalars(learner, "loss", learner.loss(outputs))


def _scalars(learner: Learner, name: str, found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Refuse terms that would not add up to a loss; torch would say so of an operator somewhere else."""
    return _tensors(learner, name, found, 0, "tensors without dimensions, by name")


def _tensors(learner: Learner, name: str, found: Any, dimensions: int | None, expected: str) -> Any:
    from torch import Tensor

    def fits(value: object) -> bool:
        return isinstance(value, Tensor) and dimensions in (None, value.ndim)

    def kind(value: object) -> str:
        return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

    if isinstance(found, Mapping) and all(map(fits, found.values())):
        return found
    odd = {key: value for key, value in found.items() if not fits(value)} if isinstance(found, Mapping) else {}
    told = ", ".join(f"{key!r} as {kind(value)}" for key, value in odd.items()) or kind(found)
    raise ConfigError(f"method {type(learner).__name__}: {name} gave {told}; expected {expected}")


def penalties_of(learners: Sequence[Learner]) -> list[Mapping[str, Tensor]]:
    """The penalty of each of several learners, at once where they are of one kind that knows how.

    A kind with a `penalty` of its own does not know it from the kind that it is derived from.

    Raises:
        ConfigError: a term of one is no tensor without dimensions.
    """
    kind = type(learners[0])
    if len(learners) > 1 and issubclass(kind, SharesPenalty) and all(type(each) is kind for each in learners):
        alone, together = (next(of for of in kind.__mro__ if name in vars(of)) for name in ("penalty", "penalties"))
        if issubclass(together, alone):
            found = kind.penalties(learners)
            return [_scalars(learner, "penalties", terms) for learner, terms in zip(learners, found, strict=True)]
    return [_scalars(learner, "penalty", learner.penalty()) for learner in learners]


def rows_trained(learner: Learner, rows: Sequence[Example]) -> Sequence[Example]:
    """Return the rows to train on: the task's own, or what the learner makes of them."""
    return learner.examples(rows) if isinstance(learner, MakesExamples) else rows


def state_of(learner: Learner) -> dict[str, Tensor]:
    """Return what changes while a task is learned, apart from the parameters."""
    return learner.state() if isinstance(learner, Stateful) else {}


def load_state(learner: Learner, state: Mapping[str, Tensor]) -> None:
    """Have a learner go on from what `state_of` gave."""
    if isinstance(learner, Stateful):
        learner.load_state(state)


def drawn_by(learner: Learner) -> dict[str, Tensor]:
    """Return what the rows were made of that were drawn when the task began."""
    return learner.drawn() if isinstance(learner, DrawsRows) else {}


def load_drawn(learner: Learner, drawn: Mapping[str, Tensor]) -> None:
    """Have a learner make its rows of what `drawn_by` gave."""
    if drawn and isinstance(learner, DrawsRows):
        learner.load_drawn(drawn)


def snapshot_of(learner: Learner) -> dict[str, Tensor]:
    """Return the tensors of the snapshot of the task that was learned.

    Raises:
        ConfigError: they are no tensors by name.
    """
    found: dict[str, Tensor] = _tensors(learner, "finish", learner.finish(), None, "the snapshot's tensors, by name")
    return found


def facts_of(learner: Learner) -> dict[str, float]:
    """Numbers worth telling once the task is learned.

    Raises:
        ConfigError: one of them is no finite number.
    """
    found = learner.facts() if isinstance(learner, Measured) else {}
    if odd := {k: v for k, v in found.items() if not (isinstance(v, (int, float)) and math.isfinite(v))}:
        raise ConfigError(
            f"method {type(learner).__name__}: facts gave {odd}; expected finite numbers, int or float, by name"
        )
    return found
