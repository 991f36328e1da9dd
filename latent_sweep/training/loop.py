"""Learning one task: the loop over optimizer steps.

Everything random is derived from (seed, task, purpose), and the position in the task is its step number, so a task that
is cut and resumed from its checkpoint ends with the same bits as one that was not (on CPU).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latent_sweep.adapters.bank import AdapterBank, side_by_side
from latent_sweep.backbones.batches import Batch, collate, epoch_batches, forward, label_logits
from latent_sweep.backbones.loading import Backbone
from latent_sweep.backbones.outputs import Example, Outputs
from latent_sweep.errors import ConfigError, NonFiniteLoss
from latent_sweep.methods import checked
from latent_sweep.methods.protocol import Learner
from latent_sweep.storage.snapshots import TaskCheckpoint
from latent_sweep.sweep.schema import TrainingSettings
from latent_sweep.training.engine import Engine
from latent_sweep.training.memory_housekeeping import give_back_memory
from latent_sweep.training.optimizers import Optimizer, Trained, optimizer_of
from latent_sweep.training.worker_group import WorkerGroup


def derived_seed(*parts: Any) -> int:
    """Derive a 63-bit seed from what it is for, e.g. `derived_seed(seed, task, "batches", epoch)`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


# --- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of learning one task; the first three repeat bit for bit, the others are about this machine."""

    steps: int
    losses: dict[str, float]
    """Mean of each named term over the last tenth of the steps."""
    first_losses: dict[str, float]
    """Mean of each named term over the first tenth."""
    seconds: float = field(compare=False)
    """Wall time; of members that train side by side, each has its share."""
    tokens: int = field(compare=False)
    """Prompt and target tokens trained on since this process took the task up, padding left out."""


Progress = Callable[[int, int, Mapping[str, float]], None]


@dataclass(frozen=True)
class TaskTraining:
    """One learner, the rows it learns from, and the settings it learns under."""

    learner: Learner
    examples: Sequence[Example]
    settings: TrainingSettings
    seed_parts: Sequence[Any]
    """What this training's randomness is derived from: seed and task."""
    checkpoint: TaskCheckpoint
    """Where it is resumed from, if that holds anything."""
    validation: Sequence[Example] = ()
    """Held-out rows for `select: best_validation`, as the model reads them when it answers: no learner changes them."""
    on_step: Progress = lambda step, steps, losses: None
    """Called after each step with its number (1-based), the number of steps, and the loss terms."""
    tasks: int = 1
    """How many tasks have these rows: `max_steps` is of each."""


def train_pack(
    trainings: Sequence[TaskTraining], engine: Engine, bank: AdapterBank
) -> list[TrainingSummary | Exception]:
    """Train learners side by side: one forward pass of the shared backbone for all their batches.

    Every worker of the backbone's group calls it with the same trainings and computes its share of every batch. Each
    learner has its own data order, optimizer, clipping, checkpoint and number of steps, and ends as it would alone (to
    rounding: its batch is padded to the longest row of all). One that fails leaves; the others go on.

    Returns:
        In the order of the trainings, a summary, or what stopped it: NonFiniteLoss where its loss or gradient became
        NaN or infinite, RuntimeError where no gradient reaches the first adapted projection.
    """
    with _learning(engine, trainings[0].settings):  # what it reads is of the backbone, so all members agree
        trainers = [_Trainer(training, engine, bank) for training in trainings]
        _train(trainers, engine, bank)
        return [trainer.outcome() for trainer in trainers]


def _train(trainers: Sequence[_Trainer], engine: Engine, bank: AdapterBank) -> None:
    """Take step after step until every trainer is at its end; the host waits for the device once in each."""
    optimizers, batches = _Optimizers(trainers), None
    for trainer in trainers:
        trainer.resume()
    while going := [trainer for trainer in trainers if trainer.goes_on]:
        began = time.monotonic()
        optimizers = optimizers.of(going)
        if batches is None or batches.trainers != going:
            batches = _Batches(going, engine)
        _seed(going[0].step_seed)  # dropout, which nobody has that trains beside others
        losses = _gradients(batches, engine, bank)
        norms = optimizers.step()
        # the device has all that to do by now; meanwhile the host prepares what most likely comes next
        staying = [trainer for trainer in going if trainer.step + 1 < trainer.steps]
        batches = _Batches(staying, engine, ahead=1) if staying else None
        for trainer, norm, terms in zip(going, *_read(norms, losses), strict=True):
            trainer.advance(terms, norm)
        if 0 < sum(trainer.goes_on for trainer in going) < len(going):  # who goes on has other rows beside it now
            for trainer in going:
                trainer.save()
        for trainer in going:
            trainer.seconds += (time.monotonic() - began) / len(going)


def _read(norms: Tensor, losses: Sequence[Mapping[str, Tensor]]) -> tuple[list[float], list[dict[str, float]]]:
    """Bring gradient norms and loss terms to the host, all in one copy."""
    terms = [term.float() for mine in losses for term in mine.values()]
    told = torch.cat([norms.float(), torch.stack(terms)]).tolist()
    found = iter(told[len(norms) :])
    return told[: len(norms)], [{name: next(found) for name in mine} for mine in losses]


def _seed(seed: int) -> None:
    """Seed what draws here; `torch.manual_seed` would format a traceback for each kind of device that is not in use.

    Nothing of ours draws from Python's and NumPy's own generators; a method from outside may.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def _learning(engine: Engine, settings: TrainingSettings) -> Iterator[None]:
    """Have the backbone within the block be as these settings have adapters trained on it."""
    engine.begin_learning()
    model, rate = engine.backbone.model, settings.backbone_dropout
    model.train(rate > 0)
    try:
        with recomputing(engine.backbone, settings), engine.backbone.dropout(rate):
            yield
    finally:
        model.eval()


@contextmanager
def recomputing(backbone: Backbone, settings: TrainingSettings) -> Iterator[None]:
    """Have backward passes within the block recompute activations, where these settings say so."""
    if settings.gradient_checkpointing == "auto":
        raise ValueError("gradient_checkpointing: auto is decided before a pack is run; see `memory.decided`")
    if not settings.gradient_checkpointing:
        yield
        return
    model, trained = backbone.model, backbone.model.training
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"training.gradient_checkpointing: transformers' {type(model).__name__} cannot recompute its activations; "
            "write false, and lower training.micro_batch_size where memory is short"
        )
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # only the re-entrant mode needs that, and disabling would leave it there
    try:
        yield
    finally:
        model.activation_checkpointing_disable()
        model.train(trained)


_FAILED = "failed"
"""Among a checkpoint's facts: the kind and the words of what stopped a member whose pack went on."""


class _Trainer:
    """A learner on its way through its task."""

    def __init__(self, training: TaskTraining, engine: Engine, bank: AdapterBank):
        settings, self.training = training.settings, training
        self.learner = training.learner
        self._found: tuple[dict[str, Tensor], dict[str, Any]] | None = engine.group.first(training.checkpoint.load)
        self.failure: Exception | None = None
        if self._found and _FAILED in self._found[1]:
            kind, text = self._found[1][_FAILED]
            self.failure, self._found = (NonFiniteLoss if kind == "NonFiniteLoss" else RuntimeError)(text), None
        drawn = _named(self._found[0], "drawn.") if self._found else {}
        if drawn:  # the rows are those of the steps that were taken
            self.learner.load_drawn(drawn)
        self.rows = [dict(row) for row in self.learner.examples(training.examples)]
        self.lengths = [len(row["prompt_ids"]) + len(row["target_ids"]) for row in self.rows]
        self.steps = settings.step_count(len(self.rows), training.tasks)
        self.steps_per_epoch = math.ceil(len(self.rows) / settings.batch_size)
        self.trained = Trained(self.learner.parameters(), settings, self.steps)
        self.optimizer: tuple[Optimizer, int]
        """What steps this learner's parameters, and which of its members they are."""
        held_out = training.validation
        self.selection = (
            _BestOnValidation(self.learner, engine.backbone, bank, held_out, settings) if held_out else None
        )
        self.history = _History()
        self.seconds, self.tokens = 0.0, 0
        self.reached = False
        """Whether a gradient has arrived where the adapter acts first."""
        self.uniform = True
        """Whether the adaptation is the same for all rows, as far as is known."""
        self.group = engine.group
        self.step = 0
        self._epochs: dict[int, list[list[int]]] = {}

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self._found:
            self.step = _resume(self._found, self.optimizer, self.history, self.selection, self.learner)
            self._found = None

    @property
    def goes_on(self) -> bool:
        return self.failure is None and self.step < self.steps

    @property
    def step_seed(self) -> int:
        own = (self.group.rank,) if self.group.rank else ()  # workers have different rows, so they draw other masks
        return derived_seed(*self.training.seed_parts, "step", self.step, *own)

    @property
    def learns(self) -> bool:
        """Whether a gradient has arrived where the adapter acts first, and at what is trained."""
        gradients = (parameter.grad for parameter in self.learner.parameters().values())
        return self.reached and any(bool(gradient.any()) for gradient in gradients if gradient is not None)

    def chosen(self, step: int) -> list[int]:
        """Which rows a step (0-based) learns from."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch not in self._epochs:
            settings = self.training.settings
            shuffle = torch.Generator().manual_seed(derived_seed(*self.training.seed_parts, "batches", epoch))
            batches = epoch_batches(self.lengths, settings.batch_size, shuffle, settings.group_by_length)
            # the next step may be prepared before this one is counted: no more than two epochs are wanted
            self._epochs = {key: value for key, value in self._epochs.items() if key == epoch - 1} | {epoch: batches}
        return self._epochs[epoch][position]

    def advance(self, losses: Mapping[str, float], norm: float) -> None:
        """Go on after a step with these losses and gradient norm; what goes wrong ends this trainer alone."""
        try:
            if self.failure is None:
                _check_losses(losses, self.step)
                _check_gradient(norm, self.step)
                self.learner.after_step(self.step)
                self.history.append(losses)
        except Exception as failure:
            self.failure = failure
        for parameter in self.learner.parameters().values():
            parameter.grad = None
        if self.failure is not None:
            return
        self.tokens += sum(self.lengths[i] for i in self.chosen(self.step))
        self.step += 1
        last = self.step == self.steps
        if self.selection and (last or self.step % self.steps_per_epoch == 0):
            self.selection.consider()
        if self.step % self.training.settings.checkpoint_every == 0:
            give_back_memory()
            if not last:
                self.save()
        self.training.on_step(self.step, self.steps, losses)

    def save(self) -> None:
        """Write a checkpoint, if this worker is the first of its group; by it who has failed is not tried again."""
        if self.failure is None:
            tensors, facts = _state(self.step, self.optimizer, self.history, self.selection, self.learner)
        else:
            tensors, facts = {}, {_FAILED: [type(self.failure).__name__, str(self.failure)]}
        if self.group.leads:
            self.training.checkpoint.save(tensors, facts)

    @torch.no_grad()
    def leave(self) -> None:
        """Give up what the optimizer has of all members together: until here the parameters are views of that."""
        for parameter in self.learner.parameters().values():
            parameter.data = parameter.data.clone()
        del self.optimizer

    def outcome(self) -> TrainingSummary | Exception:
        if self.failure is not None:
            if self.group.leads:
                self.training.checkpoint.remove()  # it is known now, and may be tried anew
            return self.failure
        try:
            if self.selection:
                self.selection.restore()
        except NonFiniteLoss as failure:
            return failure
        first, last = self.history.mean(last=False), self.history.mean(last=True)
        return TrainingSummary(self.steps, last, first, self.seconds, self.tokens)


class _Optimizers:
    """What steps the parameters of these trainers: one optimizer for all of a kind."""

    def __init__(self, trainers: Sequence[_Trainer]):
        self._trainers = list(trainers)
        self._groups: list[tuple[list[int], Optimizer]] = []
        for kind in dict.fromkeys(trainer.training.settings.optimizer for trainer in trainers):
            own = [i for i, trainer in enumerate(trainers) if trainer.training.settings.optimizer == kind]
            optimizer = optimizer_of([trainers[i].trained for i in own])
            self._groups.append((own, optimizer))
            for member, i in enumerate(own):
                trainers[i].optimizer = optimizer, member

    def of(self, trainers: Sequence[_Trainer]) -> _Optimizers:
        """Return what steps these of the trainers: the others have left."""
        if self._trainers == trainers:
            return self
        states = [optimizer.state(member) for optimizer, member in (t.optimizer for t in trainers)]
        for trainer in self._trainers:
            if trainer not in trainers:
                trainer.leave()
        found = _Optimizers(trainers)
        for trainer, state in zip(trainers, states, strict=True):
            optimizer, member = trainer.optimizer
            optimizer.load_state(member, state)
        return found

    def step(self) -> Tensor:
        """Clip and step all; returns their gradient norms before clipping."""
        norms = [optimizer.step() for _, optimizer in self._groups]
        order = [i for own, _ in self._groups for i in own]
        found = torch.cat(norms)
        return found if order == sorted(order) else torch.stack([found[order.index(i)] for i in range(len(order))])


class _Batches:
    """The rows of one step of several trainers, pass by pass through the model, with what it reads on its device.

    Args:
        ahead: how many steps ahead of where the trainers are.
    """

    def __init__(self, trainers: Sequence[_Trainer], engine: Engine, ahead: int = 0):
        self.trainers = list(trainers)
        self.backbone = engine.backbone
        settings = [trainer.training.settings for trainer in trainers]
        rows = [[trainer.rows[i] for i in trainer.chosen(trainer.step + ahead)] for trainer in trainers]
        self.denominators = [_denominator(own, s) for own, s in zip(rows, settings, strict=True)]
        chunks = [micro_batches(own, s.micro_batch_size, engine.group) for own, s in zip(rows, settings, strict=True)]
        self.passes = list(itertools.zip_longest(*chunks, fillvalue=MicroBatch(())))
        self._collated = {index: (self._alike(index), self._collate(index)) for index in range(len(self.passes))}

    def _alike(self, index: int) -> bool:
        parts = zip(self.trainers, self.passes[index], strict=True)
        return all(trainer.uniform for trainer, part in parts if part.rows)

    def _collate(self, index: int) -> Batch:
        members = [part.rows for part in self.passes[index] if part.rows]
        return collate(members, self.backbone, self._alike(index))

    def take(self, index: int) -> Batch:
        """Give the batch of a pass away; made again where the adaptations turned out other than they were known."""
        alike, batch = self._collated.pop(index)
        return batch if alike == self._alike(index) else self._collate(index)


def _gradients(batches: _Batches, engine: Engine, bank: AdapterBank) -> list[dict[str, Tensor]]:
    """Accumulate the gradients of one step of each trainer, over all workers; returns their loss terms.

    The first step of a trainer must show that data reach what it trains. A loss that is not finite spoils the gradients
    of its own member alone, as members share no rows and nothing that is trained.
    """
    group, trainers = engine.group, batches.trainers
    losses: list[dict[str, Tensor]] = [{} for _ in trainers]

    def add(terms: Sequence[Mapping[str, Tensor]]) -> None:
        for mine, found in zip(losses, terms, strict=True):
            for name, term in found.items():
                mine[name] = mine[name] + term.detach() if name in mine else term.detach()
        every = [term for found in terms for term in found.values() if term.requires_grad]
        if len(every) == 1:
            every[0].backward()
        elif every:  # from one number, so that there is one gradient of 1 to begin with, and not one for each
            torch.stack([term.float() for term in every]).sum().backward()

    begins = any(trainer.step == 0 for trainer in trainers)
    for index in range(len(batches.passes)):
        _forward_and_back(batches, index, bank, add, begins)
    _add_up(trainers, losses, group)
    for trainer, mine in zip(trainers, losses, strict=True):
        if trainer.step == 0 and not trainer.learns and all(bool(loss.isfinite()) for loss in mine.values()):
            trainer.failure = RuntimeError(
                "no gradient reaches the first adapted projection: training would change nothing. With gradient "
                "checkpointing this happens in re-entrant mode; otherwise please report it with the sweep file"
            )
    add(checked.penalties([trainer.learner for trainer in trainers]))
    return losses


def _forward_and_back(
    batches: _Batches,
    index: int,
    bank: AdapterBank,
    add: Callable[[Sequence[Mapping[str, Tensor]]], None],
    watch: bool,
) -> None:
    """Run a pass of a step; whatever it keeps is gone when the next one begins.

    Args:
        add: takes the trainers' loss terms, and adds their gradients.
        watch: whether to note whose gradients arrive.
    """
    trainers, parts = batches.trainers, batches.passes[index]
    running = [(t, part) for t, part in zip(trainers, parts, strict=True) if part.rows]
    adaptations = [t.learner.adaptation(part.rows) for t, part in running]
    for (trainer, _), adaptation in zip(running, adaptations, strict=True):
        trainer.uniform = adaptation.uniform
    batch = batches.take(index)
    # the deltas stay active through backward: gradient checkpointing runs the forward pass again there
    with bank.active(side_by_side(adaptations, batch.counts)):
        with bank.watching(watch) as arrived:
            logits = label_logits(batches.backbone, batch)
        outputs = Outputs.of_all([part.rows for part in parts], logits, batch.labels, batches.denominators)
        terms = [checked.loss(t.learner, o) if o.rows else {} for t, o in zip(trainers, outputs, strict=True)]
        add([part.counted(found) for part, found in zip(parts, terms, strict=True)])
    for sequences in arrived:
        for (trainer, _), own in zip(running, sequences.split(list(batch.counts)), strict=True):
            trainer.reached = trainer.reached or bool(own.any())


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass of a learner."""

    rows: Sequence[Example]
    counts: bool = True
    """Otherwise they stand in: the worker has no rows left, but the others need it for theirs."""

    def counted(self, terms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Take the terms to nothing where the rows stand in."""
        return terms if self.counts else {name: 0.0 * term for name, term in terms.items()}


def micro_batches(rows: Sequence[Example], size: int | None, group: WorkerGroup) -> list[MicroBatch]:
    """Cut this worker's share of a batch into passes of `size` rows, as many as every other worker has."""
    largest = group.largest_share(len(rows))
    mine = [MicroBatch(chunk) for chunk in _chunks(group.share(rows), size or largest)]
    stand_in = MicroBatch(rows[:1], counts=False)
    return mine + [stand_in] * (math.ceil(largest / (size or largest)) - len(mine))


def _add_up(trainers: Sequence[_Trainer], losses: Sequence[dict[str, Tensor]], group: WorkerGroup) -> None:
    """Give every worker the gradients and losses of all workers' rows."""
    if group.size == 1:
        return
    parameters = [p for trainer in trainers for p in trainer.learner.parameters().values()]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    reached = torch.tensor([float(trainer.reached) for trainer in trainers], device=parameters[0].device)
    found = torch.cat([reached, torch.stack([loss.float() for mine in losses for loss in mine.values()])])
    group.add_up([found, *(p.grad for p in parameters if p.grad is not None)])
    of_all, total = found[: len(trainers)], iter(found[len(trainers) :].unbind())
    if any(trainer.step == 0 for trainer in trainers):  # asked of the device once in a task
        for trainer, arrived in zip(trainers, of_all.tolist(), strict=True):
            trainer.reached = arrived > 0
    for mine in losses:
        for name in mine:
            mine[name] = next(total)


def _denominator(rows: Sequence[Example], settings: TrainingSettings) -> float:
    targets = sum(len(row["target_ids"]) for row in rows)
    return {"token_mean": targets, "sequence_mean": len(rows), "sum": 1}[settings.loss_reduce]


def _chunks(rows: Sequence[Example], size: int | None) -> list[Sequence[Example]]:
    size = size or len(rows)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _check_losses(losses: Mapping[str, float], step: int) -> None:
    if not all(math.isfinite(loss) for loss in losses.values()):
        terms = ", ".join(f"{name} = {loss:g}" for name, loss in losses.items())
        raise NonFiniteLoss(
            f"the loss is not finite at step {step + 1}: {terms}. Lower training.learning_rate, or the method's "
            "coefficient of the term that grew; check backbone.dtype if it happens at the first step"
        )


def _check_gradient(norm: float, step: int) -> None:
    if not math.isfinite(norm):
        raise NonFiniteLoss(
            f"the loss is finite at step {step + 1}, but its gradient is not (norm {norm}). Lower "
            "training.learning_rate, or the method's coefficients; check backbone.dtype"
        )


class _History:
    """Loss terms of every step so far."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[list[float]] = []

    def append(self, losses: Mapping[str, float]) -> None:
        self.names = self.names or list(losses)
        if losses.keys() != set(self.names):
            raise RuntimeError(
                f"loss terms are {', '.join(losses)} at step {len(self.rows) + 1}, and were {', '.join(self.names)} "
                "before; expected the same at every step of a task: give 0 for a term that a batch has nothing of"
            )
        self.rows.append([losses[name] for name in self.names])

    def mean(self, last: bool) -> dict[str, float]:
        tenth = max(1, len(self.rows) // 10)
        rows = self.rows[-tenth:] if last else self.rows[:tenth]
        return {name: math.fsum(row[i] for row in rows) / len(rows) for i, name in enumerate(self.names)}


class _BestOnValidation:
    """Keeps the parameters of the epoch with the lowest validation loss (A31)."""

    def __init__(
        self,
        learner: Learner,
        backbone: Backbone,
        bank: AdapterBank,
        rows: Sequence[Example],
        settings: TrainingSettings,
    ):
        self.loss = math.inf
        self.parameters: dict[str, Tensor] = {}
        self._learner, self._backbone, self._bank = learner, backbone, bank
        ordered = sorted(rows, key=lambda row: len(row["prompt_ids"]))
        self._batches = _chunks(ordered, settings.micro_batch_size or settings.batch_size)
        self._targets = sum(len(row["target_ids"]) for row in rows)

    @torch.no_grad()
    def consider(self) -> None:
        loss = 0.0
        for rows in self._batches:
            outputs = forward(self._backbone, self._bank, rows, self._learner.adaptation(rows), self._targets)
            loss += float(outputs.task_loss())
        if loss < self.loss:
            self.loss = loss
            self.parameters = {name: p.detach().clone() for name, p in self._learner.parameters().items()}

    @torch.no_grad()
    def restore(self) -> None:
        if not self.parameters:
            raise NonFiniteLoss("the validation loss is not finite after any epoch; lower training.learning_rate")
        for name, parameter in self._learner.parameters().items():
            parameter.copy_(self.parameters[name])


def _state(
    step: int,
    optimizer: tuple[Optimizer, int],
    history: _History,
    selection: _BestOnValidation | None,
    learner: Learner,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and facts of a checkpoint inside the task."""
    together, member = optimizer
    tensors = {f"engine.{name}": value for name, value in together.state(member).items()}
    tensors |= {f"learner.{name}": value for name, value in learner.state().items()}
    tensors |= {f"drawn.{name}": value for name, value in learner.drawn().items()}
    tensors["history"] = torch.tensor(history.rows, dtype=torch.float64)
    if selection:
        tensors |= {f"best.{name}": value for name, value in selection.parameters.items()}
    best_loss = selection.loss if selection and selection.parameters else None
    return tensors, {"step": step, "terms": history.names, "best_loss": best_loss}


def _resume(
    found: tuple[dict[str, Tensor], dict[str, Any]],
    optimizer: tuple[Optimizer, int],
    history: _History,
    selection: _BestOnValidation | None,
    learner: Learner,
) -> int:
    """Go on from a checkpoint; returns the steps already done."""
    tensors, facts = found
    together, member = optimizer
    together.load_state(member, _named(tensors, "engine."))
    learner.load_state(_named(tensors, "learner."))
    history.names, history.rows = facts["terms"], tensors["history"].tolist()
    if selection and facts["best_loss"] is not None:
        selection.loss = facts["best_loss"]
        parameters = learner.parameters()
        selection.parameters = {name: t.to(parameters[name].device) for name, t in _named(tensors, "best.").items()}
    return int(facts["step"])


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
