"""How snapshots answer together: a weight for every snapshot in every row of a batch.

last    the newest snapshot alone
sum     all of them with weight one (summing branches, the ablation without a router)
soft    the router's posterior, equation (15)
hard    its largest entry
oracle  the snapshot of the row's own task: an upper reference, it needs the task's identity
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from latent_sweep.backbones import Backbone
from latent_sweep.errors import StoreError
from latent_sweep.methods.protocol import Mixing
from latent_sweep.router import GaussianRouter, RouterSettings, TaskRecord, fit_task, normalise_embeddings
from latent_sweep.settings import content_hash
from latent_sweep.snapshots import write_atomically

log = logging.getLogger(__name__)

Array = npt.NDArray[np.float64]
MODES = get_args(Mixing)

Tokens = Callable[[int, str], Any]
"""Tokenised rows (a `datasets.Dataset`) of the task at a position, for a split."""


class Mixer:
    """The weights of one trial's snapshots, row by row.

    Args:
        settings: the trial's `router:` group, its mode resolved.
        tokens: gives the tokenised rows that the router pools.
        n_tasks: tasks of the whole trial.
        seed: of K-means.
        storage: pooled embeddings and router records are cached below it.
    """

    def __init__(
        self, settings: RouterSettings, backbone: Backbone, tokens: Tokens, n_tasks: int, seed: int, storage: Path
    ):
        self.settings, self.backbone, self.tokens = settings, backbone, tokens
        self.n_tasks, self.seed, self.storage = n_tasks, seed, storage

    @property
    def routes(self) -> bool:
        """Whether weights come from the router's posterior."""
        return self.settings.mode in ("soft", "hard")

    def weights(self, tasks_seen: int) -> list[Array]:
        """For each task seen, the weights of its test rows: (rows, tasks_seen)."""
        mode = self.settings.mode
        if mode == "soft" or mode == "hard":
            router = self._router(tasks_seen)
            return [router.weights(self._embeddings(task, "test"), mode) for task in range(tasks_seen)]
        counts = [len(self.tokens(task, "test")) for task in range(tasks_seen)]
        alone = np.eye(tasks_seen)
        row = {"last": lambda task: alone[-1], "sum": lambda task: np.ones(tasks_seen), "oracle": alone.__getitem__}
        return [np.tile(row[str(mode)](task), (count, 1)) for task, count in enumerate(counts)]

    def _router(self, tasks_seen: int) -> GaussianRouter:
        """The router over the tasks seen; the covariance reads all tasks only where the settings say so (A16)."""
        records = [self._record(task) for task in range(tasks_seen)]
        everything = None
        if self.settings.cov.refresh == "final":
            everything = [self._record(task) for task in range(self.n_tasks)]
        return GaussianRouter(self.settings).fit(records, everything)

    def _record(self, task: int) -> TaskRecord:
        """The task's record, fitted once and stored: no example is kept in it."""
        key = {"router": self.settings.record_identity(), "seed": self.seed, "pooled": self._key(task, "train")}
        path = self.storage / "router" / f"{content_hash(key)}.safetensors"
        if path.is_file():
            try:
                return TaskRecord.load(path)
            except StoreError as error:
                log.warning("%s It is fitted again.", error)
        record = fit_task(self._embeddings(task, "train"), self.settings, self.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(path)
        return record

    def _embeddings(self, task: int, split: str) -> npt.NDArray[Any]:
        """phi(x) of every row, (rows, d): the mean of its token embeddings, equation (11); pooled once and mapped."""
        path = self.storage / "embeddings" / f"{self._key(task, split)}.npy"
        pooled = _mapped(path, len(self.tokens(task, split)))
        if pooled is None:
            pooled = pool(self.backbone, self.tokens(task, split), self.settings)
            write_atomically(path, _npy_bytes(pooled))
        std = float(self.backbone.embedding_table.float().std()) if self.settings.embed_norm == "std" else None
        return normalise_embeddings(pooled, self.settings.embed_norm, std)

    def _key(self, task: int, split: str) -> str:
        tokens = Path(self.tokens(task, split).cache_files[0]["filename"]).parent.name
        pooling = self.settings.pool.identity()
        return content_hash({"tokens": tokens, "weights": self.backbone.weights_digest, "pool": pooling})


@torch.inference_mode()
def pool(backbone: Backbone, tokens: Any, settings: RouterSettings) -> npt.NDArray[np.float32]:
    """Mean of each row's token embeddings from the frozen table, (rows, d) float32, equation (11).

    Which tokens count is `router.pool`'s to say (A18): the prompt or its input alone, with or without special tokens.
    Without `mask_pad` the mean is over the longest prompt of the rows, padding included, as some released code has it.
    """
    column = tokens["prompt_ids" if settings.pool.scope == "prompt" else "input_ids"]
    rows = [list(row) for row in column]
    if settings.pool.special == "drop":
        special = set(backbone.tokenizer.all_special_ids)
        rows = [[token for token in row if token not in special] for row in rows]
    if not settings.pool.mask_pad:
        longest = max(map(len, rows))
        rows = [row + [backbone.pad_id] * (longest - len(row)) for row in rows]
    table = backbone.embedding_table
    means = [table[torch.tensor(row, device=table.device)].float().mean(0) for row in rows]
    return torch.stack(means).cpu().numpy()


def router_accuracy(weights: Sequence[Array]) -> float:
    """Share of rows whose largest weight is on their own task, a macro mean over tasks."""
    return float(np.mean([np.mean(rows.argmax(axis=1) == task) for task, rows in enumerate(weights)]))


def _mapped(path: Path, count: int) -> npt.NDArray[Any] | None:
    """Stored embeddings, memory-mapped; a file that is not what it should be counts as none and is written again."""
    try:
        stored = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        return None
    except (ValueError, EOFError, OSError) as error:
        log.warning("%s cannot be read (%s); the embeddings are pooled again", path, error)
        return None
    return stored if len(stored) == count else None


def _npy_bytes(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()
