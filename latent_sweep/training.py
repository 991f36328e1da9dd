"""Learning one task: the loop over optimizer steps, and the engine that owns the optimizer.

Everything random is derived from (seed, task, purpose), and the position in the task is its step number, so a task that
is cut and resumed from its checkpoint ends with the same bits as one that was not (on CPU).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.backbones import Backbone
from latent_sweep.config import TrainingSettings
from latent_sweep.errors import NonFiniteLoss
from latent_sweep.methods.protocol import IGNORED, Learner, Outputs
from latent_sweep.snapshots import TaskCheckpoint

Example = Mapping[str, Any]
"""One tokenised row: `prompt_ids` and `target_ids` are lists of token ids."""


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


# --- the engine ------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """Owns the optimizer of one learner; the loop tells it when."""

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradients."""
        ...

    def step(self) -> float:
        """Clip, step, clear the gradients; returns the gradient norm before clipping."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on after a restart, as named tensors."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there."""
        ...


class TorchEngine:
    """AdamW on one device, with a constant learning rate after an optional warm-up."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: TrainingSettings):
        assert settings.learning_rate is not None
        self._parameters = dict(parameters)
        self._clip = settings.gradient_clip
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        warmup = settings.warmup_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / warmup) if warmup else 1.0
        )

    def backward(self, loss: Tensor) -> None:
        """Add this loss's gradients."""
        loss.backward()

    def step(self) -> float:
        """Clip, step, clear the gradients."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip or math.inf)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Parameters, Adam's moments and step counts."""
        named = {f"parameter.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            named |= {f"adam.{name}.{key}": value for key, value in self._optimizer.state[parameter].items()}
        return named | {"schedule": torch.tensor(self._schedule.last_epoch)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there; the learning rate follows from the step."""
        for name, parameter in self._parameters.items():
            with torch.no_grad():
                parameter.copy_(state[f"parameter.{name}"])
            prefix = f"adam.{name}."
            moments = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            self._optimizer.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device).clone()
                for key, value in moments.items()
            }
        self._schedule.last_epoch = int(state["schedule"])
        for group, rate in zip(self._optimizer.param_groups, self._schedule.base_lrs, strict=True):
            group["lr"] = rate * self._schedule.lr_lambdas[0](self._schedule.last_epoch)


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
    tokens: int = field(compare=False)
    """Prompt and target tokens this process trained on, padding left out."""


Progress = Callable[[int, int, Mapping[str, float]], None]


def step_count(rows: int, settings: TrainingSettings) -> int:
    """Optimizer steps for a task of this many training rows."""
    assert settings.epochs is not None and settings.batch_size is not None
    steps = settings.epochs * math.ceil(rows / settings.batch_size)
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def train_task(
    learner: Learner,
    examples: Sequence[Example],
    backbone: Backbone,
    bank: AdapterBank,
    settings: TrainingSettings,
    seed_parts: Sequence[Any],
    checkpoint: TaskCheckpoint,
    validation: Sequence[Example] = (),
    on_step: Progress = lambda step, steps, losses: None,
) -> TrainingSummary:
    """Train `learner` on `examples`, resuming from `checkpoint` if it holds anything.

    Args:
        seed_parts: what this training's randomness is derived from: seed and task.
        validation: held-out rows for `select: best_validation`.
        on_step: called after each step with its number (1-based), the number of steps, and the loss terms.

    Raises:
        NonFiniteLoss: the loss became NaN or infinite.
        RuntimeError: no gradient reaches the first adapted projection.
    """
    began = time.monotonic()
    rows = [dict(example) for example in examples]
    assert settings.batch_size is not None
    lengths = [len(row["prompt_ids"]) + len(row["target_ids"]) for row in rows]
    steps = step_count(len(rows), settings)
    steps_per_epoch = math.ceil(len(rows) / settings.batch_size)
    engine = TorchEngine(learner.parameters(), settings)
    backbone.model.train(settings.gradient_checkpointing)
    if settings.gradient_checkpointing:
        backbone.model.activation_checkpointing_enable({"use_reentrant": False})
    selection = _BestOnValidation(learner, backbone, bank, validation, settings) if validation else None
    history = _History()
    done = _resume(checkpoint, engine, history, selection, learner.parameters())
    batches: list[list[int]] = []
    tokens = 0
    for step in range(done, steps):
        epoch, position = divmod(step, steps_per_epoch)
        if position == 0 or not batches:
            shuffle = torch.Generator().manual_seed(derived_seed(*seed_parts, "batches", epoch))
            batches = epoch_batches(lengths, settings.batch_size, shuffle, settings.group_by_length)
        torch.manual_seed(derived_seed(*seed_parts, "step", step))  # dropout, where a method has any
        batch_rows = [rows[i] for i in batches[position]]
        losses = _gradients(learner, engine, batch_rows, backbone, bank, settings, first=step == 0)
        _check_losses(losses, step)
        learner.after_backward()
        _check_gradient(engine.step(), step)
        learner.after_step(step)
        history.append(losses)
        tokens += sum(lengths[i] for i in batches[position])
        if selection and (position == steps_per_epoch - 1 or step == steps - 1):
            selection.consider()
        if (step + 1) % settings.checkpoint_every == 0 and step + 1 < steps:
            _save(checkpoint, step + 1, engine, history, selection)
        on_step(step + 1, steps, losses)
    if selection:
        selection.restore()
    if settings.gradient_checkpointing:
        backbone.model.activation_checkpointing_disable()
        backbone.model.eval()
    return TrainingSummary(steps, history.mean(last=True), history.mean(last=False), time.monotonic() - began, tokens)


def _gradients(
    learner: Learner,
    engine: Engine,
    rows: Sequence[Example],
    backbone: Backbone,
    bank: AdapterBank,
    settings: TrainingSettings,
    first: bool = False,
) -> dict[str, float]:
    """Accumulate the gradients of one step; returns its loss terms. The first step must show that data reach them."""
    size = settings.micro_batch_size or len(rows)
    targets = sum(len(row["target_ids"]) for row in rows)
    denominator = {"token_mean": targets, "sequence_mean": len(rows), "sum": 1}[settings.loss_reduce]
    losses: dict[str, float] = {}

    def add(terms: Mapping[str, Tensor]) -> None:
        if terms:
            engine.backward(sum(terms.values(), start=torch.zeros((), device=backbone.device)))
        for name, term in terms.items():
            losses[name] = losses.get(name, 0.0) + float(term.detach())

    for start in range(0, len(rows), size):
        batch = collate(rows[start : start + size], backbone)
        # the deltas stay active through backward: gradient checkpointing runs the forward pass again there
        with bank.active(learner.deltas()):
            add(learner.loss(Outputs(label_logits(backbone, batch), batch.labels, denominator)))
    if first:
        _check_signal(learner)  # before the penalty, whose gradient needs no data
    add(learner.penalty())
    return losses


def _check_losses(losses: Mapping[str, float], step: int) -> None:
    if not all(math.isfinite(loss) for loss in losses.values()):
        terms = ", ".join(f"{name} = {loss:g}" for name, loss in losses.items())
        raise NonFiniteLoss(
            f"the loss is not finite at step {step + 1}: {terms}. Lower training.learning_rate, or the method's "
            "coefficient of the term that grew; check backbone.dtype if it happens at the first step"
        )


def _check_signal(learner: Learner) -> None:
    if not any(g is not None and bool(g.any()) for g in learner.first_layer_gradients()):
        raise RuntimeError(
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
        assert settings.batch_size is not None
        ordered = sorted(rows, key=lambda row: len(row["prompt_ids"]))
        size = settings.micro_batch_size or settings.batch_size
        self._batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        self._targets = sum(len(row["target_ids"]) for row in rows)

    @torch.no_grad()
    def consider(self) -> None:
        loss = 0.0
        with self._bank.active(self._learner.deltas()):
            for rows in self._batches:
                batch = collate(rows, self._backbone)
                outputs = Outputs(label_logits(self._backbone, batch), batch.labels, self._targets)
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


def _save(
    checkpoint: TaskCheckpoint, step: int, engine: Engine, history: _History, selection: _BestOnValidation | None
) -> None:
    tensors = {f"engine.{name}": value for name, value in engine.state().items()}
    tensors["history"] = torch.tensor(history.rows, dtype=torch.float64)
    if selection:
        tensors |= {f"best.{name}": value for name, value in selection.parameters.items()}
    best_loss = selection.loss if selection and selection.parameters else None
    facts = {"step": step, "terms": history.names, "best_loss": best_loss}
    checkpoint.save(tensors, facts)


def _resume(
    checkpoint: TaskCheckpoint,
    engine: Engine,
    history: _History,
    selection: _BestOnValidation | None,
    parameters: Mapping[str, Tensor],
) -> int:
    """Load the checkpoint, if there is one; returns the steps already done."""
    found = checkpoint.load()
    if found is None:
        return 0
    tensors, facts = found
    engine.load_state({name.removeprefix("engine."): t for name, t in tensors.items() if name.startswith("engine.")})
    history.names, history.rows = facts["terms"], tensors["history"].tolist()
    if selection and facts["best_loss"] is not None:
        selection.loss = facts["best_loss"]
        best = {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
        selection.parameters = {name: t.to(parameters[name].device) for name, t in best.items()}
    return int(facts["step"])
