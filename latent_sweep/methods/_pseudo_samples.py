"""Pseudo-samples: rows of an earlier task that a soft prompt writes, given the task's name, so that they are replayed.

A row is written as its input, a separator, and its target; the task's instruction and cue are put around it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from latent_sweep.adapters.bank import Adaptation, virtual_tokens
from latent_sweep.backbones.generation import Sampler, generate, shared_tokens
from latent_sweep.backbones.outputs import Example
from latent_sweep.errors import ConfigError, DataError
from latent_sweep.methods.protocol import MethodContext, TaskData

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from latent_sweep.backbones.loading import Backbone

log = logging.getLogger(__name__)

DRAWN_TOGETHER = 32
"""Samples drawn in one batch."""


# --- what a task's rows look like ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowFormat:
    """The format of a task's rows: enough to have some written, and to read what was written. All are token ids."""

    name: Sequence[int]
    """What the model reads when it is to write a row."""
    head: Sequence[int]
    """The prompt before the input."""
    cue: Sequence[int]
    """The prompt after the input."""
    labels: Sequence[Sequence[int]]
    """Every target, without EOS; none where targets are free text."""
    separator: int
    """Stands between input and target in a written row."""
    eos: int
    """Ends targets and written rows."""

    @classmethod
    def of(cls, task: TaskData, backbone: Backbone) -> RowFormat:
        """The format of this task's training rows; targets are labels where they come twice on average.

        Raises:
            DataError: no row has an input.
        """
        eos = backbone.eos_id
        head, cue = _surroundings(task)
        targets = {tuple(token for token in row["target_ids"] if token != eos) for row in task.rows}
        labels = [list(target) for target in sorted(targets) if target] if 2 * len(targets) <= len(task.rows) else []
        return cls(backbone.tokenizer(task.name)["input_ids"], head, cue, labels, separator(backbone), eos)

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor], backbone: Backbone) -> RowFormat:
        """The format of the task that a snapshot was learned from."""
        name, head, cue = (tensors[f"format.{part}"].tolist() for part in ("name", "head", "cue"))
        return cls(name, head, cue, unpadded(tensors["format.labels"]), separator(backbone), backbone.eos_id)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors from which `load` reads the format again."""
        parts = {"name": self.name, "head": self.head, "cue": self.cue}
        ids = {f"format.{part}": torch.tensor(part_ids, dtype=torch.long) for part, part_ids in parts.items()}
        return {**ids, "format.labels": padded(self.labels)}

    def write(self, row: Example, longest: int) -> list[int]:
        """Write the row in this format; its input is cut where all would be longer than `longest`."""
        end = [self.separator, *row["target_ids"]]
        return [*row["input_ids"][: max(0, longest - len(end))], *end]

    def read(self, written: Sequence[int]) -> Example | None:
        """Read the row that was written, without EOS; None unless it is well-formed.

        It has an input and one separator, and its target is a label or, where there are none, any text.
        """
        if written.count(self.separator) != 1:
            return None
        cut = written.index(self.separator)
        text, target = list(written[:cut]), list(written[cut + 1 :])
        known = target in self.labels if self.labels else bool(target)
        if not text or not known:
            return None
        return self.row(text, target)

    def row(self, text: Sequence[int], target: Sequence[int]) -> Example:
        """Make a row of an input and a target, which has no EOS."""
        return {"prompt_ids": [*self.head, *text, *self.cue], "input_ids": [*text], "target_ids": [*target, self.eos]}


def separator(backbone: Backbone) -> int:
    """Choose a special token that no row holds: BOS, a sentinel of T5's, or another.

    Raises:
        ConfigError: the tokenizer has none that means nothing else.
    """
    tokenizer = backbone.tokenizer
    taken = {backbone.eos_id, backbone.pad_id, tokenizer.unk_token_id}
    free = [token for token in tokenizer.all_special_ids if token not in taken]
    if not free:
        raise ConfigError(
            "backbone.tokenizer: pseudo-samples need a special token besides EOS, padding and unknown, to keep input "
            f"and target apart; found only {tokenizer.all_special_tokens}. Give a tokenizer with a BOS token"
        )
    return free[0]


def _surroundings(task: TaskData) -> tuple[list[int], list[int]]:
    """Find the prompt before and after the input, as most rows have it: a truncated one may have lost its cue."""
    check_inputs(task)
    found = Counter(place for row in task.rows if (place := _around_input(row)) is not None)
    [((head, cue), _)] = found.most_common(1)
    return list(head), list(cue)


def check_inputs(task: TaskData) -> None:
    """Raise DataError where no row's prompt holds the row's input."""
    if all(_around_input(row) is None for row in task.rows):
        raise DataError(
            f"task {task.name}: pseudo-samples are made of inputs, but none of its {len(task.rows)} training rows has "
            "one. Check the data, or raise benchmark.max_source_length"
        )


def _around_input(row: Example) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the prompt before and after the input; None where it does not hold one."""
    prompt, text = tuple(row["prompt_ids"]), tuple(row["input_ids"])
    starts = [i for i in range(len(prompt) - len(text) + 1) if text and prompt[i : i + len(text)] == text]
    return (prompt[: starts[-1]], prompt[starts[-1] + len(text) :]) if starts else None


def padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Join token ids into one tensor, (sequences, longest), -1 behind the shorter ones."""
    longest = max(map(len, sequences), default=0)
    rows = [[*sequence, *[-1] * (longest - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.long).view(len(sequences), longest)


def unpadded(ids: Tensor) -> list[list[int]]:
    """Split a tensor into the sequences that `padded` was given."""
    return [[token for token in row if token >= 0] for row in ids.tolist()]


# --- drawing ---------------------------------------------------------------------------------------------------------


class DrawSettings(Protocol):
    """The number of pseudo-samples to draw, and the way to draw them; a method's own settings say so."""

    @property
    def sample_length(self) -> int:
        """Return the number of tokens that one has, at most."""

    @property
    def samples_per_label(self) -> int:
        """Return the number of pseudo-samples wanted for each label."""

    @property
    def samples_per_task(self) -> int:
        """Return the number of pseudo-samples wanted of a task without labels."""

    @property
    def tries(self) -> int:
        """Return the number of pseudo-samples drawn, at most."""

    @property
    def top_k(self) -> int:
        """Return the number of likeliest tokens from which each token is drawn."""

    @property
    def repetition_penalty(self) -> float:
        """Return the divisor of logits of tokens that it already has."""


@dataclass(frozen=True)
class Samples:
    """Rows of one earlier task that a prompt has written."""

    format: RowFormat
    rows: Sequence[Example]
    """Well-formed ones, as many as were wanted."""
    well_formed: int
    """Well-formed ones, wanted or not."""
    drawn: int
    """All that were written."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors from which `load` has them again."""
        return {
            "inputs": padded([row["input_ids"] for row in self.rows]),
            "targets": padded([row["target_ids"][:-1] for row in self.rows]),
            "counts": torch.tensor([self.well_formed, self.drawn]),
        }

    @classmethod
    def load(cls, format: RowFormat, tensors: Mapping[str, Tensor]) -> Samples:
        """The samples that these tensors were made of."""
        well_formed, drawn = map(int, tensors["counts"].tolist())
        texts, targets = (unpadded(tensors[name]) for name in ("inputs", "targets"))
        return cls(format, list(map(format.row, texts, targets)), well_formed, drawn)


def draw(
    context: MethodContext, prompt: Tensor, format: RowFormat, settings: DrawSettings, generator: torch.Generator
) -> Samples:
    """Have a prompt, (vectors, d), write rows of an earlier task until enough are well-formed or the tries used up."""
    s, places, writer = settings, (context.backbone, context.bank), Adaptation(prompt=prompt)
    sampler = Sampler(s.top_k, s.repetition_penalty, generator)
    question = [*format.name, *virtual_tokens(len(prompt))]
    wanted = {tuple(label): s.samples_per_label for label in format.labels} or {(): s.samples_per_task}
    rows: list[Example] = []
    well_formed = drawn = 0
    while any(wanted.values()) and drawn < s.tries:
        batch = [question] * min(DRAWN_TOGETHER, s.tries - drawn)
        drawn += len(batch)
        shared = shared_tokens(context.backbone, batch, len(batch))
        written = generate(*places, batch, writer, s.sample_length, shared=shared, choose=sampler)
        for row in filter(None, map(format.read, written)):
            well_formed += 1
            label = tuple(row["target_ids"][:-1]) if format.labels else ()
            if wanted[label]:
                wanted[label] -= 1
                rows.append(row)
    if drawn and not rows:
        name = context.backbone.tokenizer.decode(format.name, skip_special_tokens=True)
        log.warning("none of %d pseudo-samples of task %s is well-formed: nothing of it is replayed", drawn, name)
    return Samples(format, rows, well_formed, drawn)
