"""ContinualModel: what a trial has learned, asked for answers and taught further tasks, without Ray or MLflow."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from latent_sweep.data.examples import is_encodable
from latent_sweep.data.loaders import WHOLE_PROMPT
from latent_sweep.data.prompts import bare_prompt, encode_parts, prompt_parts
from latent_sweep.data.schema import TaskSpec, stop_of, target_length
from latent_sweep.deploy import folder as folders
from latent_sweep.deploy.content import LearnedTask, ModelContent
from latent_sweep.deploy.extraction import BEST, content_of, find_trial, planned
from latent_sweep.deploy.new_task import ExampleLike, NewTask, new_task
from latent_sweep.deploy.records import fitted, limit_at, records_at, records_combiner
from latent_sweep.errors import ConfigError, DataError
from latent_sweep.methods.protocol import Method
from latent_sweep.routing.combination import Known, Rows, pool, table_std, texts_read, weigh
from latent_sweep.routing.gaussian import ROUTED, GaussianRouter, normalise_embeddings
from latent_sweep.routing.ngram import TaskNgrams
from latent_sweep.security import quoted
from latent_sweep.settings import local_path
from latent_sweep.storage.folders import open_sweep
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.memory import with_checkpointing
from latent_sweep.sweep.plan import Run, Trial
from latent_sweep.training.context import Context
from latent_sweep.training.engine import Engine
from latent_sweep.training.evaluation import AnswerEnd, Evaluator
from latent_sweep.training.events import say_nothing
from latent_sweep.training.run import ActiveRun, ActiveRuns
from latent_sweep.training.stage import learn_missing

Array = npt.NDArray[np.float64]
Device = Literal["auto", "cpu", "cuda"]
ROUTING = (*ROUTED, "ngram", "oracle")
"""Ways of mixing that send each text to one task before all others."""


@dataclass(frozen=True)
class Answered:
    """What a model says to one text."""

    answer: str
    task: str | None
    """The learned task that it was routed to; None where the model's way of mixing routes nothing (`sum`, `last` and
    `gates`)."""
    weights: Mapping[str, float]
    """How much the snapshot of each learned task has answered, without those that have not."""
    novelty: float | None
    """Mahalanobis distance to the nearest component of any learned task; None where no posterior is asked for."""
    known: bool | None
    """Whether it belongs to a learned task, as far as its novelty tells; None where that tells nothing."""

    def record(self) -> dict[str, Any]:
        """The answer as JSON."""
        return asdict(self)


class ContinualModel:
    """A trial's snapshots on their backbone, with the router that chooses among them.

    Made by `from_sweep` or `from_folder`. The backbone is loaded when it is first needed. One thread at a time is
    answered; others wait.

    Args:
        content: all but the backbone.
        storage: a store for what is computed: factors, and the snapshots of tasks that it learns.
        engine: what computes; None is plain torch in this process.
    """

    def __init__(self, content: ModelContent, storage: Storage, engine: Engine | None = None):
        self.content, self._storage = content, storage
        self._context = Context(content.trial, storage, engine, keeps_features=False)
        self._lock = threading.RLock()

    @classmethod
    def from_sweep(cls, place: str | Path, trial: str = BEST, device: Device | None = None) -> ContinualModel:
        """Take the model that a finished trial of a sweep has become.

        Its benchmark must be at hand: from it come the distances beyond which a text belongs to no learned task. An
        exported model needs it no more.

        Args:
            place: the sweep's folder `<storage>/<sweep name>`, as a path or as the URI of an object store.
            trial: `best`, the one with the highest AP; or an id, the beginning of one, or a name as tables have it.
            device: where it computes; None is what the trial says.

        Raises:
            ConfigError: no such trial, or the code, the data or the backbone are not what it was planned with.
            DataError: the benchmark's rows are not at hand.
            StorageError: there is no sweep, or something of it is missing or damaged.
        """
        sweep = open_sweep(place)
        folder = find_trial(sweep, trial)
        context = Context(_on(planned(sweep, folder), device), sweep.storage)
        try:
            return cls(content_of(sweep, folder, context), sweep.storage, context.engine)
        finally:
            context.close()

    @classmethod
    def from_folder(
        cls, folder: str | Path, device: Device | None = None, backbone: str | Path | None = None
    ) -> ContinualModel:
        """Open a model that was saved, or exported with `latent-sweep export --to model`.

        Args:
            folder: the model's. Nothing is written into it.
            device: where it computes; None is what the trial says.
            backbone: the folder that holds the backbone here, where that is another one than the trial's.

        Raises:
            StorageError: it is no folder of a model, or something of it is missing or damaged.
        """
        content, storage = folders.opened(folder)
        return cls(replace(content, trial=_on(content.trial, device, backbone)), storage)

    def __repr__(self) -> str:
        return f"<ContinualModel {self.content.origin.name} of {self.content.origin.sweep}: {len(self.tasks)} tasks>"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks that it has learned, in their order."""
        return self.content.tasks

    @property
    def trial(self) -> Trial:
        """The trial that it comes from, with all tasks that it has learned."""
        return self.content.trial

    @property
    def context(self) -> Context:
        """Its backbone, and what works on it."""
        return self._context

    @cached_property
    def method(self) -> Method:
        """Its method, able to train and to answer.

        Raises:
            ConfigError: the backbone is another one than its snapshots were learned on.
        """
        self.context.check([task.snapshot for task in self.content.learned])
        return self._run().method

    def close(self) -> None:
        """Take what was added to the backbone off it again."""
        self._context.close()

    # --- answering ---

    def answer(self, texts: Sequence[str], task: str | None = None) -> list[Answered]:
        """Answer texts, each by the snapshots that its way of mixing chooses for it.

        They are answered in batches of the trial's `evaluation.batch_size`: the same texts in one call have the same
        answers as a trial's test rows.

        Args:
            task: a learned task, whose instruction then stands before each text as in training; None takes each text
                for the whole prompt but for the cue. Which snapshots answer is not its to say, except where the model
                mixes as an oracle, which needs it.

        Raises:
            ConfigError: there is no such task, or none where one is needed.
            DataError: instruction and cue leave a text no room, or it is no text of whole characters.
        """
        if isinstance(texts, str):
            raise ConfigError("answer: found one text; expected a list of texts, e.g. [text]")
        for place, text in enumerate(texts):
            if not isinstance(text, str) or not is_encodable(text):
                found = quoted(text, 60)
                raise DataError(f"answer: text {place} (0-based) is {found}; expected a text of whole characters")
        position = self._position(task)
        with self._lock:
            return self._answer(list(texts), position) if texts else []

    def _position(self, task: str | None) -> int | None:
        mode = self.trial.settings.router.combine
        if task is None:
            if mode == "oracle":
                raise ConfigError(
                    f"task: found none; this model mixes as an oracle, which is told the task. Name one of "
                    f"{', '.join(self.tasks)}"
                )
            return None
        if task not in self.tasks:
            raise ConfigError(f"task: found {quoted(task)}; expected one that was learned: {', '.join(self.tasks)}")
        return self.tasks.index(task)

    def _answer(self, texts: Sequence[str], position: int | None) -> list[Answered]:
        s = self.trial.settings
        ids = self._encoded(texts, position, s.benchmark.max_source_length)
        whole = s.router.combine in ROUTED and not s.router.pool.truncate
        rows = self._rows(self._encoded(texts, position, WHOLE_PROMPT) if whole else ids)
        router = self._router
        known = Known(len(self.tasks), router, self._ngrams(), self._gates)
        weights = weigh(s.router.combine, known, rows, position)
        snapshots = [task.snapshot for task in self.content.learned]
        answers, _ = self._evaluator.answers(snapshots, weights, ids["prompt_ids"], end=self._end(position))
        distances = [None] * len(texts) if router is None else router.distances(rows.embeddings())
        return [
            self._answered(text.strip(), mix, None if distance is None else float(distance))
            for text, mix, distance in zip(answers, weights, distances, strict=True)
        ]

    def _answered(self, answer: str, weights: Array, novelty: float | None) -> Answered:
        mixed = {name: float(weight) for name, weight in zip(self.tasks, weights, strict=True) if weight}
        if self.trial.settings.router.combine not in ROUTING:
            return Answered(answer, None, mixed, None, None)
        routed = self.content.learned[int(weights.argmax())]
        known = None if novelty is None or routed.farthest is None else novelty <= routed.farthest
        return Answered(answer, routed.spec.name, mixed, novelty, known)

    def _end(self, position: int | None) -> AnswerEnd | None:
        """Return where answers end for a named task; None, the benchmark's end, where no task is named."""
        if position is None:
            return None
        task = self.content.learned[position].spec
        return AnswerEnd(target_length(self.trial.settings.benchmark, task), stop_of(self.trial.spec, task))

    def _encoded(self, texts: Sequence[str], position: int | None, longest: int) -> dict[str, list[list[int]]]:
        """Turn texts into token ids as rows of a benchmark are, in the same columns."""
        b, backbone, chat = self.trial.settings.benchmark, self.context.backbone, self.context.chat
        parts = [
            bare_prompt(self.trial.spec, text)
            if position is None
            else prompt_parts(self.trial.spec, self.content.learned[position].spec, text)
            for text in texts
        ]
        family = backbone.traits.protocol
        ids = [encode_parts(p, backbone.tokenizer, family, longest, b.truncation, b.bos, chat) for p in parts]
        return {"prompt_ids": [p.head + p.input + p.cue for p in ids], "input_ids": [p.input for p in ids]}

    def _rows(self, ids: Mapping[str, list[list[int]]]) -> Rows:
        settings, backbone = self.trial.settings.router, self.context.backbone

        @cache
        def embeddings() -> npt.NDArray[Any]:
            std = self._table_std if settings.embed_norm == "std" else None
            return normalise_embeddings(pool(backbone, ids, settings), settings.embed_norm, std)

        prompts = ids["prompt_ids"]
        return Rows(len(prompts), embeddings, lambda: texts_read(backbone, prompts), lambda: prompts)

    @cached_property
    def _table_std(self) -> float:
        return table_std(self.context.backbone)

    @cached_property
    def _router(self) -> GaussianRouter | None:
        return fitted(self.trial.settings.router, [task.records for task in self.content.learned])

    def _ngrams(self) -> list[TaskNgrams]:
        return [task.records.ngrams for task in self.content.learned if task.records.ngrams is not None]

    def _gates(self, tasks_seen: int, prompts: Sequence[Sequence[int]]) -> Array:
        return self.method.gates([task.snapshot.tensors for task in self.content.learned[:tasks_seen]], prompts)

    @cached_property
    def _evaluator(self) -> Evaluator:
        s = self.trial.settings
        return Evaluator(
            self.context.engine,
            self.context.bank,
            self.method,
            s.evaluation.batch_size,
            s.benchmark.max_target_length,
            self.trial.spec.stop,
            s.benchmark.references,
            cache=None,  # what is asked is nobody else's to know
        )

    # --- learning ---

    def learn(
        self,
        task: str | TaskSpec,
        benchmark: str | Path | None = None,
        rows: Sequence[ExampleLike] | None = None,
        held_out: Sequence[ExampleLike] = (),
    ) -> None:
        """Learn one more task, with the same method and settings, from its rows and what earlier tasks have left.

        It is what the trial would have learned as its next task, bit for bit on a CPU. Prompts are written in the
        format of the model's own benchmark, and answers end as there. On a GPU, `gradient_checkpointing: auto` is on.

        Args:
            task: a task's name in its benchmark; or what it is, with its rows.
            benchmark: the benchmark that has it, packaged or a folder; None is the model's own.
            rows: training rows of a task that no benchmark has, `{"input": ..., "output": ...}` each.
            held_out: rows of it that are not trained on, from which it is known how far out its rows lie; without any,
                whether a text that is routed to it belongs to it is not told.

        Raises:
            ConfigError: the task cannot be learned by this model; the message says why.
            DataError: its rows are not at hand or malformed.
            NonFiniteLoss: its loss became NaN or infinite; the model is what it was.
        """
        lesson = new_task(self.content, task, benchmark, rows, held_out)
        with self._lock:
            self._learn(lesson)

    def _learn(self, lesson: NewTask) -> None:
        self.context.check([known.snapshot for known in self.content.learned])
        position, engine = len(self.tasks), self.context.engine
        context = Context(_decided(lesson.reading, self.context), self._storage, engine)
        try:
            run = ActiveRun(Run((context.trial,), self.content.largest_rank), [], context)
            run.snapshots = [known.snapshot for known in self.content.learned]
            if (lineages := [known.lineage for known in run.snapshots]) != list(run.lineages[:position]):
                raise ConfigError(
                    "the code that learns is not the one that this model's snapshots were learned with; install the "
                    f"versions that the facts of {lineages[-1]} name"
                )
            learn_missing(ActiveRuns([run], context), position, say_nothing)
            if run.failure is not None:
                raise run.failure
            combiner = records_combiner(context, context.trial)
            records = [*(known.records for known in self.content.learned), records_at(combiner, position)]
            farthest = limit_at(combiner, position, fitted(combiner.settings, records))
        finally:
            context.close()
        newest = run.snapshots[-1]  # a model holds its own
        learned = LearnedTask(lesson.task, replace(newest, tensors=dict(newest.tensors)), records[-1], farthest)
        self._become(self.content.with_task(lesson.trial, learned))

    def _become(self, content: ModelContent) -> None:
        """Be this model from now on, on the same backbone."""
        self._context.close()
        self.content = content
        self._context = Context(content.trial, self._storage, self._context.engine, keeps_features=False)
        for name in ("method", "_router", "_evaluator"):
            self.__dict__.pop(name, None)

    def _run(self) -> ActiveRun:
        return ActiveRun(Run((self.trial,), self.content.largest_rank), [], self.context)

    # --- keeping ---

    def save(self, folder: str | Path) -> Path:
        """Write the model into a new or empty folder, from which `from_folder` opens it; returns the folder.

        It holds settings, snapshots, what routing keeps of each task, and the factors that its method reads: no row of
        any task, and no weight of the backbone.

        Raises:
            ConfigError: the folder holds something else.
            StorageError: it cannot be written.
        """
        _ = self.method  # of a factored one its factors, which are there once it has answered
        return folders.save(self.content, self.context, self.method, folder)


def _on(trial: Trial, device: Device | None, folder: str | Path | None = None) -> Trial:
    """Return the trial with another device to compute on, and its backbone in another folder; None leaves them."""
    changed = {"device": device, "name": None if folder is None else str(local_path(folder).resolve())}
    found = {name: value for name, value in changed.items() if value is not None}
    backbone = trial.settings.backbone.model_copy(update=found)
    return replace(trial, settings=trial.settings.model_copy(update={"backbone": backbone}))


def _decided(trial: Trial, context: Context) -> Trial:
    """Return the trial with `gradient_checkpointing: auto` decided: on where there is a GPU."""
    if trial.settings.training.gradient_checkpointing != "auto":
        return trial
    return with_checkpointing(trial, context.backbone.device.type != "cpu")
