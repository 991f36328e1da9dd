"""Scoring the tasks seen so far: one row of the score matrix, with every generation that is already known reused.

Greedy answers depend only on the prompt, the blend of snapshots and the decoding settings, so they are cached under
exactly that. In bfloat16 they also depend on which rows share a batch: batches are fixed by the test set alone, and a
batch is the unit of the cache, so a score never depends on what else was computed before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.backbones import Backbone
from latent_sweep.generation import answer_text, generate
from latent_sweep.methods.protocol import Method
from latent_sweep.metrics import Metric, RefsPolicy, score_rows
from latent_sweep.mixing import Array
from latent_sweep.settings import content_hash
from latent_sweep.snapshots import Snapshot, write_json


@dataclass(frozen=True)
class TaskScore:
    """How a trial does on one task at one stage."""

    score: float
    """Mean over rows, a fraction."""
    predictions: list[dict[str, Any]]
    """Per row: id, prediction, references, score and, by task position, the weights that are not zero."""
    generated: int
    """Rows whose answer was generated now; the others were known."""
    rouge_1: float | None
    """Mean Rouge-1 beside a Rouge-L score; None for an accuracy task."""


class Evaluator:
    """Answers test rows with blended snapshots and scores them.

    Args:
        method: says how snapshots answer together; one row of weights stands for a batch whose rows weigh them alike.
        batch_size: rows per batch; fixed batches, see the module's docstring.
        max_new_tokens, stop: where an answer ends.
        references: `single_first` or `max_over_refs`.
        cache: folder of known answers.
    """

    def __init__(
        self,
        backbone: Backbone,
        bank: AdapterBank,
        method: Method,
        batch_size: int,
        max_new_tokens: int,
        stop: Sequence[str],
        references: RefsPolicy,
        cache: Path,
    ):
        self.backbone, self.bank, self.method = backbone, bank, method
        self.batch_size, self.max_new_tokens, self.stop = batch_size, max_new_tokens, tuple(stop)
        self.references, self.cache = references, cache

    def score(self, history: Sequence[Snapshot], weights: Array, rows: Any, metric: Metric) -> TaskScore:
        """Score one task.

        Args:
            history: the snapshots, oldest first.
            weights: (rows, snapshots).
            rows: tokenised test rows.
        """
        prompts = [self.method.prompt(ids) for ids in rows["prompt_ids"]]
        order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
        answers = [""] * len(prompts)
        generated = 0
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            texts, known = self._answers(history, weights[batch], [prompts[row] for row in batch])
            generated += 0 if known else len(batch)
            for row, text in zip(batch, texts, strict=True):
                answers[row] = text
        references = [list(refs) for refs in rows["references"]]
        scores = score_rows(metric, answers, references, self.references)
        predictions = [
            {"id": row_id, "prediction": answer, "references": refs, "score": float(score), "weights": _nonzero(mix)}
            for row_id, answer, refs, score, mix in zip(rows["id"], answers, references, scores, weights, strict=True)
        ]
        rouge_1 = None
        if metric == "rouge_l":
            rouge_1 = float(np.mean(score_rows("rouge_1", answers, references, self.references)))
        return TaskScore(float(np.mean(scores)), predictions, generated, rouge_1)

    def _answers(
        self, history: Sequence[Snapshot], weights: Array, prompts: Sequence[Sequence[int]]
    ) -> tuple[list[str], bool]:
        """Answers of one batch, and whether they were known already."""
        used = np.flatnonzero(weights.any(axis=0)).tolist()  # snapshots that nobody in this batch weighs play no part
        snapshots, weights = [history[i] for i in used], weights[:, used]
        blends = [[float(w).hex() for w in row] for row in weights]
        key = content_hash(
            {
                "snapshots": [snapshot.lineage for snapshot in snapshots],
                "weights": blends,
                "prompts": prompts,
                "max_new_tokens": self.max_new_tokens,
                "stop": self.stop,
            },
            length=32,
        )
        path = self.cache / key[:2] / f"{key}.json"
        known = _read_answers(path, len(prompts))
        if known is not None:
            return known, True
        with torch.no_grad():  # not inference mode: what a method keeps from here is trained with later
            tensors = [snapshot.tensors for snapshot in snapshots]
            alike = bool((weights == weights[0]).all())
            mix = torch.from_numpy(weights[:1] if alike else weights).float()
            adaptation = self.method.mixture(tensors, mix)
            ids = generate(self.backbone, self.bank, prompts, adaptation, self.max_new_tokens, self.stop, alike)
        texts = [answer_text(self.backbone, answer, self.stop) for answer in ids]
        write_json(path, texts)
        return texts, False


def _read_answers(path: Path, count: int) -> list[str] | None:
    """Cached answers; a file that is not what it should be counts as none and is written again."""
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    intact = isinstance(texts, list) and len(texts) == count and all(isinstance(text, str) for text in texts)
    return texts if intact else None


def _nonzero(weights: Array) -> Mapping[str, float]:
    return {str(position): float(weight) for position, weight in enumerate(weights) if weight}
