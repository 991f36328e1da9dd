"""Learning one task: the loop over optimizer steps.

Everything random is derived from (seed, task, purpose), and the position in the task is its step number, so a task that
is cut and resumed from its checkpoint ends with the same bits as one that was not (on CPU).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from latent_sweep.adapters.bank import Adaptation, AdapterBank, side_by_side
from latent_sweep.backbones import Backbone
from latent_sweep.config import TrainingSettings
from latent_sweep.engine import Optimizer
from latent_sweep.errors import NonFiniteLoss
from latent_sweep.gang import Gang
from latent_sweep.methods.protocol import IGNORED, Example, Learner, Outputs
from latent_sweep.snapshots import TaskCheckpoint


def derived_seed(*parts: Any) -> int:
    """A 63-bit seed from what it is for, e.g. `derived_seed(seed, task, "batches", epoch)`."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


# --- batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows ready for the backbone. B rows, L target positions (the longest target of the batch)."""

    inputs: Mapping[str, Tensor]
    """Arguments of the model's forward pass."""
    labels: Tensor
    """(B, L) token ids, IGNORED where a shorter target has none."""


def collate(examples: Sequence[Example], backbone: Backbone) -> Batch:
    """Prompts and targets as one padded batch.

    Llama: prompt and target are one sequence, padded on the left, so that all targets end in the last column and
    logits are needed at the last L + 1 positions only. T5: prompts padded on the right; the decoder reads the targets.
    """
    prompts = [list(example["prompt_ids"]) for example in examples]
    targets = [list(example["target_ids"]) for example in examples]
    longest = max(map(len, targets))
    on_the_left = backbone.family == "llama"
    labels = _pad(targets, IGNORED, longest, on_the_left)
    if on_the_left:
        ids, mask = pad_prompts([p + t for p, t in zip(prompts, targets, strict=True)], backbone)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
        inputs["logits_to_keep"] = last_positions(ids, longest + 1)
    else:
        ids, mask = pad_prompts(prompts, backbone)
        start = backbone.model.config.decoder_start_token_id
        decoder_ids = _pad([[start, *target[:-1]] for target in targets], backbone.pad_id, longest, False)
        inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids.to(backbone.device)}
    return Batch(inputs, labels.to(backbone.device))


def pad_prompts(prompts: Sequence[Sequence[int]], backbone: Backbone) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, (B, longest): padded on the left for Llama, on the right for T5."""
    longest = max(map(len, prompts))
    on_the_left = backbone.family == "llama"
    ids = _pad(prompts, backbone.pad_id, longest, on_the_left)
    mask = _pad([[1] * len(prompt) for prompt in prompts], 0, longest, on_the_left)
    return ids.to(backbone.device), mask.to(backbone.device)


def positions(mask: Tensor) -> Tensor:
    """Position of each token in its own row, whatever padding stands before it."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


def last_positions(ids: Tensor, count: int) -> Tensor:
    """Indices of the last `count` columns, for `logits_to_keep`.

    A tensor and not a number, because a slice of the hidden states is not contiguous, and the language-model head
    would copy its weight for every row: that was half of a training step on CPU.
    """
    return torch.arange(ids.shape[1] - count, ids.shape[1], device=ids.device)


def _pad(sequences: Sequence[Sequence[int]], value: int, length: int, on_the_left: bool) -> Tensor:
    padded = [[value] * (length - len(s)) for s in sequences]
    rows = [p + list(s) if on_the_left else list(s) + p for p, s in zip(padded, sequences, strict=True)]
    return torch.tensor(rows, dtype=torch.long)


def label_logits(backbone: Backbone, batch: Batch) -> Tensor:
    """Logits at the label positions, (B, L, vocabulary): the language-model head runs nowhere else."""
    logits = backbone.model(**batch.inputs, use_cache=False).logits
    return logits[:, :-1] if backbone.family == "llama" else logits


def forward(
    backbone: Backbone,
    bank: AdapterBank,
    rows: Sequence[Example],
    adaptation: Adaptation,
    denominator: float = 1.0,
    drop_out: bool | None = None,
) -> Outputs:
    """One pass over rows under an adaptation: for a teacher, for statistics of a task, for validation.

    Args:
        drop_out: whether the backbone's own dropout acts, where it is on: if not said, where gradients are needed.
    """
    batch = collate(rows, backbone)
    acts = torch.is_grad_enabled() if drop_out is None else drop_out
    with bank.active(adaptation), nullcontext() if acts else backbone.dropout(0.0):
        return Outputs(rows, label_logits(backbone, batch), batch.labels, denominator)


def epoch_batches(
    lengths: Sequence[int], batch_size: int, generator: torch.Generator, group_by_length: bool
) -> list[list[int]]:
    """Row indices of one epoch's batches; the last may be smaller.

    With `group_by_length`, rows are shuffled, sorted by length within stretches of eight batches, and the batches
    shuffled: little padding, and still another composition every epoch.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    if not group_by_length:
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    stretch = 8 * batch_size
    batches = []
    for start in range(0, len(order), stretch):
        rows = sorted(order[start : start + stretch], key=lambda row: lengths[row])
        batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


# --- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSummary:
    """What learning one task did; the first three repeat bit for bit, the others are about this machine."""

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
class Lesson:
    """One learner, what it learns from, and how."""

    learner: Learner
    examples: Sequence[Example]
    settings: TrainingSettings
    seed_parts: Sequence[Any]
    """What this training's randomness is derived from: seed and task."""
    checkpoint: TaskCheckpoint
    """Where it is resumed from, if that holds anything."""
    validation: Sequence[Example] = ()
    """Held-out rows for `select: best_validation`."""
    on_step: Progress = lambda step, steps, losses: None
    """Called after each step with its number (1-based), the number of steps, and the loss terms."""


def train_pack(lessons: Sequence[Lesson], backbone: Backbone, bank: AdapterBank) -> list[TrainingSummary | Exception]:
    """Train learners side by side: one forward pass of the shared backbone for all their batches.

    Every worker of the backbone's gang calls it with the same lessons and computes its share of every batch. Each
    learner has its own data order, optimizer, clipping, checkpoint and number of steps, and ends as it would alone (to
    rounding: its batch is padded to the longest row of all). One that fails leaves; the others go on.

    Returns:
        In the order of the lessons, a summary, or what stopped it: NonFiniteLoss where its loss or gradient became NaN
        or infinite, RuntimeError where no gradient reaches the first adapted projection.
    """
    with _learning(backbone, lessons[0].settings):  # what it reads is of the backbone, so all members agree
        courses = [_Course(lesson, backbone, bank) for lesson in lessons]
        while going := [course for course in courses if course.goes_on]:
            began = time.monotonic()
            torch.manual_seed(going[0].step_seed)  # dropout, which nobody has that trains beside others
            losses = _gradients(going, backbone, bank)
            for course, terms in zip(going, losses, strict=True):
                course.advance(terms)
            for course in going:
                course.seconds += (time.monotonic() - began) / len(going)
        return [course.outcome() for course in courses]


@contextmanager
def _learning(backbone: Backbone, settings: TrainingSettings) -> Iterator[None]:
    """Within the block the backbone is as these settings have adapters trained on it."""
    backbone.engine.begin_learning()
    checkpointing, rate = settings.gradient_checkpointing, settings.backbone_dropout or 0.0
    backbone.model.train(checkpointing or rate > 0)
    if checkpointing:
        backbone.model.activation_checkpointing_enable({"use_reentrant": False})
    try:
        with backbone.dropout(rate):
            yield
    finally:
        if checkpointing:
            backbone.model.activation_checkpointing_disable()
        backbone.model.eval()


class _Course:
    """A learner on its way through its task."""

    def __init__(self, lesson: Lesson, backbone: Backbone, bank: AdapterBank):
        settings, self.lesson = lesson.settings, lesson
        self.learner = lesson.learner
        self.rows = [dict(row) for row in lesson.learner.examples(lesson.examples)]
        self.lengths = [len(row["prompt_ids"]) + len(row["target_ids"]) for row in self.rows]
        assert settings.batch_size is not None
        self.steps = settings.step_count(len(self.rows))
        self.steps_per_epoch = math.ceil(len(self.rows) / settings.batch_size)
        self.optimizer = backbone.engine.optimizer(self.learner.parameters(), settings, self.steps)
        held_out = self.learner.examples(lesson.validation) if lesson.validation else ()
        self.selection = _BestOnValidation(self.learner, backbone, bank, held_out, settings) if held_out else None
        self.history = _History()
        self.failure: Exception | None = None
        self.seconds, self.tokens = 0.0, 0
        self.gang = backbone.engine.gang
        found = self.gang.first(lesson.checkpoint.load)
        self.step = _resume(found, self.optimizer, self.history, self.selection, self.learner) if found else 0
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    @property
    def goes_on(self) -> bool:
        return self.failure is None and self.step < self.steps

    @property
    def step_seed(self) -> int:
        own = (self.gang.rank,) if self.gang.rank else ()  # workers have different rows, so they draw other masks
        return derived_seed(*self.lesson.seed_parts, "step", self.step, *own)

    def batch(self) -> list[Example]:
        """The rows of the step to come."""
        epoch, position = divmod(self.step, self.steps_per_epoch)
        if epoch != self._epoch[0]:
            settings = self.lesson.settings
            assert settings.batch_size is not None
            shuffle = torch.Generator().manual_seed(derived_seed(*self.lesson.seed_parts, "batches", epoch))
            self._epoch = epoch, epoch_batches(self.lengths, settings.batch_size, shuffle, settings.group_by_length)
        chosen = self._epoch[1][position]
        self.tokens += sum(self.lengths[i] for i in chosen)
        return [self.rows[i] for i in chosen]

    def advance(self, losses: Mapping[str, float]) -> None:
        """Take the step whose gradients are there; what goes wrong ends this course alone."""
        try:
            if self.failure is None:
                _check_losses(losses, self.step)
                _check_gradient(self.optimizer.step(), self.step)
                self.learner.after_step(self.step)
        except Exception as failure:
            self.failure = failure
        self.optimizer.clear()
        if self.failure is not None:
            return
        self.history.append(losses)
        self.step += 1
        last = self.step == self.steps
        if self.selection and (last or self.step % self.steps_per_epoch == 0):
            self.selection.consider()
        if self.step % self.lesson.settings.checkpoint_every == 0 and not last:
            tensors, facts = _state(self.step, self.optimizer, self.history, self.selection, self.learner)
            if self.gang.leads:
                self.lesson.checkpoint.save(tensors, facts)
        self.lesson.on_step(self.step, self.steps, losses)

    def outcome(self) -> TrainingSummary | Exception:
        if self.failure is not None:
            return self.failure
        try:
            if self.selection:
                self.selection.restore()
        except NonFiniteLoss as failure:
            return failure
        first, last = self.history.mean(last=False), self.history.mean(last=True)
        return TrainingSummary(self.steps, last, first, self.seconds, self.tokens)


def _gradients(courses: Sequence[_Course], backbone: Backbone, bank: AdapterBank) -> list[dict[str, float]]:
    """Accumulate the gradients of one step of each course, over all workers; returns their loss terms.

    The first step of a course must show that data reach its parameters.
    """
    batches = [course.batch() for course in courses]
    denominators = [_denominator(rows, c.lesson.settings) for rows, c in zip(batches, courses, strict=True)]
    gang = backbone.engine.gang
    chunks = [_passes(rows, c.lesson.settings.micro_batch_size, gang) for rows, c in zip(batches, courses, strict=True)]
    losses: list[dict[str, float]] = [{} for _ in courses]

    def add(terms: Sequence[Mapping[str, Tensor]]) -> None:
        total = torch.zeros((), device=backbone.device)
        for mine, found in zip(losses, terms, strict=True):
            for name, term in found.items():
                mine[name] = mine.get(name, 0.0) + float(term.detach())
            if all(math.isfinite(loss) for loss in mine.values()):  # one that is not leaves without touching the others
                total = sum(found.values(), start=total)
        if total.requires_grad:
            total.backward()

    for parts in itertools.zip_longest(*chunks, fillvalue=_Pass(())):
        adaptations = [c.learner.adaptation(part.rows) for c, part in zip(courses, parts, strict=True) if part.rows]
        counts = [len(part.rows) for part in parts]
        batch = collate([row for part in parts for row in part.rows], backbone)
        # the deltas stay active through backward: gradient checkpointing runs the forward pass again there
        with bank.active(side_by_side(adaptations, [count for count in counts if count])):
            logits = label_logits(backbone, batch).split(counts)
            labels = batch.labels.split(counts)
            outputs = [
                Outputs(part.rows, *found) for part, *found in zip(parts, logits, labels, denominators, strict=True)
            ]
            terms = [c.learner.loss(o) if o.rows else {} for c, o in zip(courses, outputs, strict=True)]
            add([part.counted(found) for part, found in zip(parts, terms, strict=True)])
    _add_up(courses, losses, gang)
    for course in courses:
        if course.step == 0:  # before the penalty, whose gradient needs no data
            course.failure = _no_signal(course.learner)
    add([course.learner.penalty() for course in courses])
    return losses


@dataclass(frozen=True)
class _Pass:
    """Rows of one forward pass of a learner."""

    rows: Sequence[Example]
    counts: bool = True
    """Otherwise they stand in: the worker has no rows left, but the others need it for theirs."""

    def counted(self, terms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return terms if self.counts else {name: 0.0 * term for name, term in terms.items()}


def _passes(rows: Sequence[Example], size: int | None, gang: Gang) -> list[_Pass]:
    """This worker's share of a batch in passes of `size` rows, as many as every other worker has."""
    largest = gang.largest_share(len(rows))
    mine = [_Pass(chunk) for chunk in _chunks(gang.share(rows), size or largest)]
    stand_in = _Pass(rows[:1], counts=False)
    return mine + [stand_in] * (math.ceil(largest / (size or largest)) - len(mine))


def _add_up(courses: Sequence[_Course], losses: Sequence[dict[str, float]], gang: Gang) -> None:
    """Give every worker the gradients and losses of all workers' rows."""
    if gang.size == 1:
        return
    parameters = [p for course in courses for p in course.learner.parameters().values()]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    found = torch.tensor([loss for mine in losses for loss in mine.values()], device=parameters[0].device)
    gang.add_up([found, *(p.grad for p in parameters if p.grad is not None)])
    total = iter(found.tolist())
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


def _no_signal(learner: Learner) -> RuntimeError | None:
    if any(g is not None and bool(g.any()) for g in learner.first_layer_gradients()):
        return None
    return RuntimeError(
        "no gradient reaches the first adapted projection: training would change nothing. With gradient "
        "checkpointing this happens in re-entrant mode; otherwise please report it with the sweep file"
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
    step: int, optimizer: Optimizer, history: _History, selection: _BestOnValidation | None, learner: Learner
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a checkpoint inside the task."""
    tensors = {f"engine.{name}": value for name, value in optimizer.state().items()}
    tensors |= {f"learner.{name}": value for name, value in learner.state().items()}
    tensors["history"] = torch.tensor(history.rows, dtype=torch.float64)
    if selection:
        tensors |= {f"best.{name}": value for name, value in selection.parameters.items()}
    best_loss = selection.loss if selection and selection.parameters else None
    return tensors, {"step": step, "terms": history.names, "best_loss": best_loss}


def _resume(
    found: tuple[dict[str, Tensor], dict[str, Any]],
    optimizer: Optimizer,
    history: _History,
    selection: _BestOnValidation | None,
    learner: Learner,
) -> int:
    """Go on from a checkpoint; returns the steps already done."""
    tensors, facts = found

    def named(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    optimizer.load_state(named("engine."))
    learner.load_state(named("learner."))
    history.names, history.rows = facts["terms"], tensors["history"].tolist()
    if selection and facts["best_loss"] is not None:
        selection.loss = facts["best_loss"]
        parameters = learner.parameters()
        selection.parameters = {name: t.to(parameters[name].device) for name, t in named("best.").items()}
    return int(facts["step"])
