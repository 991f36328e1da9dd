"""Scoring the tasks seen so far: one row of the score matrix, with every generation that is already known reused.

Greedy answers depend only on the prompt, the blend of snapshots, what the method and decoding make of them, the
backbone and, where two tokens are next to equally likely, on the device and the libraries: they are cached under
exactly that. A batch is the unit of the cache, so a score never depends on what else was computed before.

How a row is answered is decided by the row: `path_of` its weights says whether its batch has one adapter for all rows,
and then what the task's test prompts begin with is read once, however few rows the batch has. Rows of different paths
never share a batch. What remains of a row's neighbours is rounding: they decide to how many rows and how much padding a
kernel is applied, and in bfloat16 a near tie of two tokens can hang on that. Where a row leaves for another path, as
tasks are added, its neighbours are answered again. Where memory has not sufficed, every batch of the next try is
answered in halves: such answers are known under names of their own, and the journal tells rows that were scored with
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from latent_sweep.adapters.bank import Adaptation, AdapterBank
from latent_sweep.backbones.architectures import device_name
from latent_sweep.backbones.generation import answer_text, generate, shared_tokens
from latent_sweep.backbones.loading import Backbone
from latent_sweep.methods.protocol import Method
from latent_sweep.metrics import Metric, RefsPolicy, score_rows, trimmed
from latent_sweep.routing.combination import Array
from latent_sweep.settings import content_hash
from latent_sweep.storage import versions
from latent_sweep.storage.checksummed import read_checksummed_json, write_checksummed_json
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.training.engine import Engine


@dataclass(frozen=True)
class TaskScore:
    """The result of a trial on one task at one stage."""

    score: float
    """Mean over rows, a fraction."""
    predictions: list[dict[str, Any]]
    """Per row: id, prediction, references, score and, by task position, the weights that are not zero."""
    generated: int
    """Rows whose answer was generated now; the others were known."""
    rouge_1: float | None
    """Mean Rouge-1 beside a Rouge-L score; None for an accuracy task."""


Recent = dict[Path, list[str]]
"""Answers of batches, by the file in which they are known."""


@dataclass(frozen=True)
class AnswerBatch:
    """Prompts to be answered together, and how: all that a worker has to know."""

    lineages: Sequence[str]
    """The snapshots that answer."""
    weights: Array
    """(rows, snapshots)."""
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    """Longest answer, in tokens."""
    stop: tuple[str, ...]
    """An answer ends where one of these strings appears."""
    passes: int = 1
    """How many passes answer it: more than one where memory has not sufficed."""
    shared: int = 0
    """Tokens that all prompts of the task begin with and that are read once."""

    @property
    def alike(self) -> bool:
        """Whether one adapter holds for all rows."""
        return path_of(self.weights[0]) is not None

    def parts(self) -> Iterator[tuple[Array, Sequence[Sequence[int]]]]:
        """Yield weights and prompts of each pass."""
        rows = -(-len(self.prompts) // self.passes)
        for start in range(0, len(self.prompts), rows):
            yield self.weights[start : start + rows], self.prompts[start : start + rows]


class CombinedAdapters:
    """The adaptations by which a method's snapshots answer, batch after batch.

    What the batch before was answered with is at hand, and no more: tensors of snapshots may have to be read, and one
    adapter for all rows, as of a sum, costs as much to make as there are snapshots in it.
    """

    def __init__(self, method: Method):
        self._method = method
        self._one: tuple[Any, Adaptation] | None = None
        """The newest adapter for all rows of a batch, after what it was made of."""
        self._read: dict[str, AtHand] = {}
        """The tensors of the newest batch whose rows have adapters of their own, by lineage."""

    def of(self, batch: AnswerBatch, mix: Array, snapshot: Callable[[str], Snapshot]) -> Adaptation:
        """Return the adaptation for some rows of a batch, which weigh its snapshots so: (rows, snapshots)."""
        if not batch.alike:
            known = self._read
            self._read = {
                name: known[name] if name in known else AtHand(snapshot(name).tensors) for name in batch.lineages
            }
            return self._method.combine([self._read[name] for name in batch.lineages], torch.from_numpy(mix).float())
        key = tuple(batch.lineages), mix[0].tobytes()
        if self._one is None or self._one[0] != key:
            self._one = None  # first: there may be no room for two
            tensors = [snapshot(lineage).tensors for lineage in batch.lineages]
            self._one = key, self._method.combine(tensors, torch.from_numpy(mix[:1]).float())
        return self._one[1]


class AtHand(Mapping[str, torch.Tensor]):
    """The tensors of a snapshot, each of them read once."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors, self._read = tensors, dict[str, torch.Tensor]()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._read:
            self._read[name] = self._tensors[name]
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def answer(
    batches: Sequence[AnswerBatch],
    snapshot: Callable[[str], Snapshot],
    blends: CombinedAdapters,
    engine: Engine,
    bank: AdapterBank,
) -> list[list[str]]:
    """Answer batches, each of them by one worker of the engine's group; all workers call it at the same time.

    Args:
        batches: no more than there are workers, and one where the engine does not let them answer apart.
        snapshot: gives the snapshot of a lineage.
        blends: of the method whose snapshots they are.

    Returns:
        The answers of every batch at the group's first worker; nothing at the others.
    """
    backbone = engine.backbone
    engine.begin_answering()

    def texts(batch: AnswerBatch) -> list[str]:
        ids: list[list[int]] = []
        for mix, prompts in batch.parts():
            with torch.no_grad():  # not inference mode: what a method keeps from here is trained with later
                adaptation = blends.of(batch, mix, snapshot)
                ids += generate(backbone, bank, prompts, adaptation, batch.max_new_tokens, batch.stop, batch.shared)
        return [answer_text(backbone, found, batch.stop) for found in ids]

    if engine.answers_apart:
        mine = batches[engine.group.rank : engine.group.rank + 1]
    else:
        mine = batches
    found = engine.group.collect([texts(batch) for batch in mine])
    return [texts for of_worker in found for texts in of_worker][: len(batches)]


class AnswerEnd(NamedTuple):
    """Where the answers of a task end."""

    max_new_tokens: int
    """Longest answer, in tokens."""
    stop: tuple[str, ...]
    """Strings at which an answer ends."""


class Evaluator:
    """Answers test rows with blended snapshots and scores them.

    Args:
        method: says how snapshots answer together; one row of weights stands for a batch whose rows weigh them alike.
        batch_size: rows per batch, at most; see `batched`.
        max_new_tokens, stop: where an answer ends.
        references: `single_first` or `max_over_refs`.
        cache: folder of known answers; None keeps none.
        tell: lets the other workers of the engine's group know of batches before they are answered.
        method_source: digest of the method's code, where it is from outside: of what was imported, and not of what its
            file says by now.
        passes: how many passes answer a batch.
    """

    def __init__(
        self,
        engine: Engine,
        bank: AdapterBank,
        method: Method,
        batch_size: int,
        max_new_tokens: int,
        stop: Sequence[str],
        references: RefsPolicy,
        cache: Path | None,
        tell: Callable[[Sequence[AnswerBatch]], None] = lambda batches: None,
        method_source: str | None = None,
        passes: int = 1,
    ):
        self.engine, self.bank, self.method = engine, bank, method
        self.batch_size, self.max_new_tokens, self.stop = batch_size, max_new_tokens, tuple(stop)
        self.references, self.cache, self.tell, self.method_source = references, cache, tell, method_source
        self.passes = passes
        self._blends = CombinedAdapters(method)

    def score(
        self,
        history: Sequence[Snapshot],
        weights: Array,
        rows: Any,
        metric: Metric,
        definitions: int = 1,
        inputs: Sequence[str] | None = None,
        recent: Recent | None = None,
        end: AnswerEnd | None = None,
    ) -> TaskScore:
        """Score one task.

        Args:
            history: the snapshots, oldest first.
            weights: (rows, snapshots).
            rows: tokenized test rows.
            definitions: how many definitions the prompts take in turn.
            inputs: the rows' inputs, for a metric that reads them.
            recent: the answers of the stage before, which need not be looked for; those of this one take their place.
            end: where the task's answers end; None is where all answers of this evaluator do.
        """
        answers, generated = self.answers(history, weights, rows["prompt_ids"], definitions, recent, end)
        answers = [trimmed(metric, text) for text in answers]
        references = rows["references"]
        scores = score_rows(metric, answers, references, self.references, inputs)
        predictions = [
            {"id": row_id, "prediction": answer, "references": refs, "score": float(score), "weights": _nonzero(mix)}
            for row_id, answer, refs, score, mix in zip(rows["id"], answers, references, scores, weights, strict=True)
        ]
        rouge_1 = None
        if metric == "rouge_l":
            rouge_1 = float(np.mean(score_rows("rouge_1", answers, references, self.references)))
        return TaskScore(float(np.mean(scores)), predictions, generated, rouge_1)

    def answers(
        self,
        history: Sequence[Snapshot],
        weights: Array,
        prompt_ids: Iterable[Sequence[int]],
        definitions: int = 1,
        recent: Recent | None = None,
        end: AnswerEnd | None = None,
    ) -> tuple[list[str], int]:
        """Answer rows, each with its own blend of the snapshots.

        Args:
            history: the snapshots, oldest first.
            weights: (rows, snapshots).
            prompt_ids: token ids of each row's prompt.
            definitions: how many definitions the prompts take in turn.
            recent: answers that need not be looked for; those given now take their place.
            end: where answers end; None is where all answers of this evaluator do.

        Returns:
            An answer for every row, and how many rows were generated now; the others were known.
        """
        prompts = [self.method.prompt(ids) for ids in prompt_ids]
        end = end or AnswerEnd(self.max_new_tokens, self.stop)
        parts: list[list[int]] = []
        batches: list[AnswerBatch] = []
        for first in range(min(definitions, len(prompts))):
            reading = range(first, len(prompts), definitions)
            shared = shared_tokens(self.engine.backbone, [prompts[row] for row in reading], self.batch_size)
            found = batched(reading, [len(prompt) for prompt in prompts], weights, self.batch_size)
            batches += [self._batch(history, weights[part], [prompts[r] for r in part], shared, end) for part in found]
            parts += found
        known, generated = self._answers(batches, {snapshot.lineage: snapshot for snapshot in history}, recent)
        answers = [""] * len(prompts)
        for part, texts in zip(parts, known, strict=True):
            for row, text in zip(part, texts, strict=True):
                answers[row] = text
        return answers, generated

    def _batch(
        self, history: Sequence[Snapshot], weights: Array, prompts: Sequence[Sequence[int]], shared: int, end: AnswerEnd
    ) -> AnswerBatch:
        used = np.flatnonzero(weights.any(axis=0)).tolist()  # snapshots that nobody in this batch weighs play no part
        lineages = [history[i].lineage for i in used]
        batch = AnswerBatch(lineages, weights[:, used], prompts, *end, self.passes)
        return replace(batch, shared=shared) if batch.alike else batch

    def _answers(
        self, batches: Sequence[AnswerBatch], snapshots: Mapping[str, Snapshot], recent: Recent | None
    ) -> tuple[Sequence[Sequence[str]], int]:
        """Answers of every batch, and how many of them were generated now."""
        paths = [self._path(batch) for batch in batches]
        recent = {} if recent is None else recent
        answers = [None if path is None else recent.get(path) or read_checksummed_json(path) for path in paths]
        missing = [i for i, known in enumerate(answers) if known is None]
        at_once = self.engine.group.size if self.engine.answers_apart else 1
        for start in range(0, len(missing), at_once):
            now = missing[start : start + at_once]
            asked = [batches[i] for i in now]
            self.tell(asked)
            found = answer(asked, snapshots.__getitem__, self._blends, self.engine, self.bank)
            self.engine.check_frozen()
            for i, texts in zip(now, found, strict=True):
                if (path := paths[i]) is not None:
                    write_checksummed_json(path, texts)
                answers[i] = texts
        recent.clear()
        recent.update((path, texts) for path, texts in zip(paths, answers, strict=True) if path and texts)
        return [texts or [] for texts in answers], sum(len(batches[i].prompts) for i in missing)

    def _path(self, batch: AnswerBatch) -> Path | None:
        if self.cache is None:
            return None
        key = answers_name(batch, self.method, self.engine.backbone, self.method_source)
        return self.cache / key[:2] / f"{key}.json"


def path_of(weights: Array) -> tuple[int, ...] | None:
    """Return which snapshots answer a row whose weights (snapshots,) are all 0 or 1; None where they are blended.

    The snapshots of the first kind answer with one adapter for all of a batch; a blend is the row's own, even where
    another row happens to have the same.
    """
    whole = np.flatnonzero(weights)
    return tuple(whole.tolist()) if (weights[whole] == 1).all() else None


def batched(rows: Sequence[int], lengths: Sequence[int], weights: Array, batch_size: int) -> list[list[int]]:
    """Cut rows into batches: by length into as many as `batch_size` asks for, and these by how rows are answered.

    The first cut depends on the prompts alone. So a row that is routed elsewhere when a task is added has the answers
    of its own batch generated again, and no others.

    Args:
        lengths: tokens of every prompt, by row.
        weights: (all rows, snapshots).
    """
    order = sorted(rows, key=lambda row: (lengths[row], row))
    batches: list[list[int]] = []
    for start in range(0, len(order), batch_size):
        apart: dict[tuple[int, ...] | None, list[int]] = {}
        for row in order[start : start + batch_size]:
            apart.setdefault(path_of(weights[row]), []).append(row)
        batches += apart.values()
    return batches


def answers_name(batch: AnswerBatch, method: Method, backbone: Backbone, method_source: str | None = None) -> str:
    """Names the answers to a batch: a hash of all that they depend on."""
    code = [] if method_source is None else [method_source]
    content: dict[str, Any] = {
        "decoding": versions.DECODING,
        "libraries": [versions.library("torch"), versions.library("transformers")],
        "backbone": [backbone.weights_digest, backbone.tokenizer_digest],
        "computed": [device_name(backbone.device), str(backbone.model.dtype)],
        "method": [method.settings.name, method.settings.answer_identity(method_source), *code],
        "snapshots": batch.lineages,
        "weights": [[float(w).hex() for w in row] for row in batch.weights],
        "prompts": batch.prompts,
        "max_new_tokens": batch.max_new_tokens,
        "stop": batch.stop,
    }
    if batch.passes > 1:
        content["passes"] = batch.passes
    if batch.shared:
        content["shared"] = batch.shared
    return content_hash(content, length=32)


def _nonzero(weights: Array) -> Mapping[str, float]:
    return {str(position): float(weight) for position, weight in enumerate(weights) if weight}
