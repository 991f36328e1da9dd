"""run_pack: learn task after task, score the tasks seen, leave snapshots and rows behind.

A plain function that knows no Ray and no MLflow: a debugger, a test and a cluster call the same one. Disk is the truth:
whatever the store and the trial folders already hold is read, the rest is done.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.backbones import Backbone, load_backbone
from latent_sweep.benchmarks.loaders import tokenised
from latent_sweep.benchmarks.schema import scoring_metric
from latent_sweep.errors import NonFiniteLoss
from latent_sweep.evaluation import Evaluator
from latent_sweep.methods import method_class
from latent_sweep.methods.protocol import Method, Workplace
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.mixing import Mixer, router_accuracy
from latent_sweep.plan import Pack, Trial
from latent_sweep.snapshots import Snapshot, SnapshotStore, write_atomically, write_json
from latent_sweep.tracking import Journal, attempts, stages, status
from latent_sweep.training import TrainingSummary, derived_seed, train_task

log = logging.getLogger(__name__)

PENALTY_WARNING = 10.0
"""A term this many times the task loss at the end of a task is said aloud: it no longer regularises (A4b)."""


@dataclass(frozen=True)
class Step:
    """The pack got a step further: an optimizer step was taken, or one of the tasks seen was scored."""

    position: int
    """Task being learned, 0-based."""
    doing: Literal["learning", "scoring"]
    step: int
    """Steps done, from 1."""
    steps: int
    losses: Mapping[str, float]
    """Terms of the loss; empty while scoring."""


@dataclass(frozen=True)
class StageDone:
    """All trials of the pack have learned and scored one more task."""

    tasks_seen: int
    matrices: Sequence[ScoreMatrix]
    """Score matrix so far, one per trial of the pack."""

    @property
    def average_performance(self) -> float:
        """AP so far, a mean over the pack's trials: what a scheduler compares."""
        return sum(matrix.average_performance() for matrix in self.matrices) / len(self.matrices)

    @property
    def forgetting(self) -> float:
        """FM so far, a mean over the pack's trials."""
        return sum(matrix.forgetting() for matrix in self.matrices) / len(self.matrices)


Emit = Callable[[Step | StageDone], None]


class TrialFiles:
    """What one trial leaves in its folder: settings, score rows, predictions, journal, result."""

    def __init__(self, trial: Trial, sweep_folder: Path):
        self.trial = trial
        self.folder = sweep_folder / "trials" / trial.trial_id
        self.journal = Journal(self.folder / "journal.jsonl")
        self.keys = trial.row_keys()
        self.rows = self._valid_rows()

    @property
    def matrix(self) -> ScoreMatrix:
        """The rows so far."""
        return ScoreMatrix(tuple(task.name for task in self.trial.tasks), tuple(self.rows))

    @property
    def complete(self) -> bool:
        """Whether every row is there and the trial has ended well, or a scheduler has stopped it for good."""
        events = self.journal.read()
        wanted = {"finished": len(self.trial.tasks), "stopped": len(stages(events))}.get(status(events))
        return wanted is not None and len(self.rows) >= wanted

    def _valid_rows(self) -> list[tuple[float, ...]]:
        """Rows that were computed from the same snapshots, data and settings as they would be now."""
        path = self.folder / "scores.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows, keys = content["scores"], content["keys"]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s); its rows are scored again", path, error)
            return []
        valid = 0
        while valid < min(len(rows), len(keys)) and keys[valid] == self.keys[valid]:
            valid += 1
        return [tuple(row) for row in rows[:valid]]

    def record(self, row: Sequence[float]) -> None:
        """Add one row of the score matrix, durably."""
        self.rows.append(tuple(row))
        content = {
            "tasks": [task.name for task in self.trial.tasks],
            "scores": [list(row) for row in self.rows],
            "keys": list(self.keys[: len(self.rows)]),
        }
        write_json(self.folder / "scores.json", content)

    def write_predictions(self, task: str, predictions: Sequence[Mapping[str, Any]]) -> None:
        """Answers of the newest stage, one JSON object a line."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
        write_atomically(self.folder / "predictions" / f"{task}.jsonl", lines.encode())


def run_pack(pack: Pack, storage: Path, sweep_folder: Path, emit: Emit, threads: int | None = None) -> None:
    """Run what is missing of a pack's trials: learn each task once, score it for every trial.

    Args:
        storage: snapshots, factors, embeddings and tokens lie here, shared by all sweeps.
        sweep_folder: the trials' folders lie in its `trials/`.
        emit: told of every optimizer step and every finished stage.
        threads: CPU threads; None leaves torch's own choice.

    Raises:
        Exception: whatever stopped it, after a `failed` event in the journal of every unfinished trial.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    files = [TrialFiles(trial, sweep_folder) for trial in pack.trials]
    unfinished = [f for f in files if not f.complete]
    if not unfinished:
        return
    for f in unfinished:
        started = {"attempt": len(attempts(f.journal.read())) + 1, "node": socket.gethostname()}
        f.journal.append("started", **started, versions=versions(), hardware=hardware(), pid=os.getpid())
    run = _PackRun(pack, storage, emit)
    try:
        for position in range(len(pack.tasks)):
            run.stage(position, unfinished)
        for f in unfinished:
            _finish(f, run)
    except Exception as error:
        where = {"task": pack.tasks[run.position].name, "step": run.step}
        for f in unfinished:
            if status(f.journal.read()) == "running":
                f.journal.append("failed", kind=failure_kind(error), message=f"{error}"[:2000], **where)
        log.error("%s failed at task %s, step %s: %s", pack.trials[0].name, where["task"], where["step"], error)
        raise


def failure_kind(error: BaseException) -> str:
    """The class of a failure, which decides whether it is worth trying again."""
    if isinstance(error, NonFiniteLoss):
        return "non_finite"
    return "out_of_memory" if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) else "error"


class _PackRun:
    """One worker's way through a pack. What is expensive (the backbone, factors) is loaded when first needed."""

    def __init__(self, pack: Pack, storage: Path, emit: Emit):
        self.pack, self.storage, self.emit = pack, storage, emit
        self.settings = pack.trials[0].settings  # training reads nothing in which the trials of a pack differ
        self.spec = pack.trials[0].spec
        self.store = SnapshotStore(storage / "snapshots")
        self.lineages = pack.trials[0].lineages()
        self.snapshots: list[Snapshot] = []
        self.position = 0
        self.step: int | None = None
        self._tokens: dict[Any, Any] = {}

    @cached_property
    def backbone(self) -> Backbone:
        return load_backbone(self.settings.backbone)

    @cached_property
    def bank(self) -> AdapterBank:
        return AdapterBank(self.backbone.targets)

    @cached_property
    def method(self) -> Method:
        workplace = Workplace(self.backbone, self.storage, self.pack.largest_rank)
        return method_class(self.settings.method.name)(self.settings.method, workplace)

    def tokens(self, trial: Trial, position: int, split: str, carve: bool = False, whole: bool = False) -> Any:
        """Tokenised rows; `whole` prompts are not truncated (A19)."""
        b = trial.settings.benchmark
        key = (position, split, carve, whole, b)
        if key not in self._tokens:
            assert b.max_source_length is not None
            self._tokens[key] = tokenised(
                self.spec,
                self.pack.tasks[position],
                split,  # type: ignore[arg-type]
                b,
                self.backbone.tokenizer,
                self.backbone.tokenizer_digest,
                self.backbone.family,
                1 << 20 if whole else b.max_source_length,
                self.storage / "tokens",
                carve_validation=carve,
            )
        return self._tokens[key]

    def stage(self, position: int, unfinished: Sequence[TrialFiles]) -> None:
        """Learn one task if nobody has, and score the tasks seen for every trial that lacks the row."""
        self.position, self.step = position, None
        summary = self._learn(position)
        for f in unfinished:
            missing = len(f.rows) <= position
            timing = self._score(f, position) if missing else {}
            # a row that is scored again, because its data changed, replaces what the journal says of the stage
            if missing or position + 1 not in {event["tasks_seen"] for event in stages(f.journal.read())}:
                self._journal_stage(f, position, summary, timing)
        self.emit(StageDone(position + 1, [_prefix(f.matrix, position + 1) for f in unfinished]))

    def _learn(self, position: int) -> TrainingSummary | None:
        """Put the task's snapshot at the end of the history; a summary where it was learned here and now."""
        lineage = self.lineages[position]
        summary = None
        with self.store.lease(lineage, lambda: log.info("waiting for another worker to learn %s", lineage)):
            snapshot = self.store.get(lineage)
            if snapshot is None:
                snapshot, summary = self._train(position, lineage)
                self.store.append(snapshot)
                self.store.checkpoint(lineage).remove()
        self.snapshots.append(snapshot)
        return summary

    def _train(self, position: int, lineage: str) -> tuple[Snapshot, TrainingSummary]:
        task, s = self.pack.tasks[position], self.settings
        seed_parts = (s.seed, task.name)
        history = [snapshot.tensors for snapshot in self.snapshots] if self.method.reads_history(position) else []
        start = torch.Generator().manual_seed(derived_seed(*seed_parts, "start"))
        learner = self.method.begin_task(position, history, start)
        carve = s.training.select == "best_validation"
        trial = self.pack.trials[0]
        summary = train_task(
            learner,
            self.tokens(trial, position, "train", carve),
            self.backbone,
            self.bank,
            s.training,
            seed_parts,
            self.store.checkpoint(lineage),
            self.tokens(trial, position, "validation", carve) if carve else (),
            self._on_step,
        )
        task_loss = summary.losses["task"]
        for name, loss in summary.losses.items():
            if name != "task" and loss > PENALTY_WARNING * task_loss:
                message = "task %s: %s (%.3g) is %.0f times the task loss (%.3g); lower its coefficient in method"
                log.warning(message, task.name, name, loss, loss / task_loss, task_loss)
        facts = {
            "method": s.method.name,
            "task": task.name,
            "seed": s.seed,
            "steps": summary.steps,
            "losses": summary.losses,
            "first_losses": summary.first_losses,
        }
        return Snapshot(lineage, learner.finish(), facts), summary

    def _on_step(self, step: int, steps: int, losses: Mapping[str, float]) -> None:
        self.step = step
        self.emit(Step(self.position, "learning", step, steps, losses))

    def _score(self, f: TrialFiles, position: int) -> dict[str, float]:
        """Score all tasks seen for one trial and record the row; returns timings and shares for the journal."""
        began = time.monotonic()
        s = f.trial.settings
        mixer = self._mixer(f.trial)
        weights = mixer.weights(position + 1)
        assert s.benchmark.max_target_length is not None
        evaluator = Evaluator(
            self.backbone,
            self.bank,
            self.method,
            s.evaluation.batch_size,
            s.benchmark.max_target_length,
            self.spec.stop,
            s.benchmark.references,
            self.storage / "predictions",
        )
        row, generated, total, rouge_1 = [], 0, 0, {}
        for j in range(position + 1):
            task = self.pack.tasks[j]
            rows = self.tokens(f.trial, j, "test")
            result = evaluator.score(self.snapshots, weights[j], rows, scoring_metric(s.benchmark, task))
            f.write_predictions(task.name, result.predictions)
            row.append(result.score)
            if result.rouge_1 is not None:
                rouge_1[f"rouge_1/{task.name}"] = result.rouge_1
            generated, total = generated + result.generated, total + len(rows)
            self.emit(Step(position, "scoring", j + 1, position + 1, {}))
        f.record(row)
        measured = {"seconds_eval": time.monotonic() - began, "generated_share": generated / total}
        measured |= rouge_1
        return measured | ({"router_accuracy": router_accuracy(weights)} if mixer.routes else {})

    def _mixer(self, trial: Trial) -> Mixer:
        s = trial.settings
        whole = not s.router.pool.truncate
        return Mixer(
            s.router,
            self.backbone,
            lambda position, split: self.tokens(trial, position, split, whole=whole),
            len(self.pack.tasks),
            s.seed,
            self.storage,
        )

    def _journal_stage(
        self, f: TrialFiles, position: int, summary: TrainingSummary | None, timing: Mapping[str, float]
    ) -> None:
        matrix = _prefix(f.matrix, position + 1)
        facts = self.snapshots[position].facts
        metrics = matrix_metrics(matrix) | dict(timing) | {"train_loss": facts["losses"]["task"]}
        metrics |= {name: loss for name, loss in facts["losses"].items() if name != "task"}
        if summary is not None:
            metrics["seconds_train"] = summary.seconds
            metrics["tokens_per_second"] = summary.tokens / max(summary.seconds, 1e-9)
        names = [task.name for task in self.pack.tasks]
        f.journal.append(
            "stage",
            tasks_seen=position + 1,
            task=names[position],
            lineage=self.lineages[position],
            reused=summary is None,
            scores=dict(zip(names, matrix.rows[-1], strict=False)),
            metrics=metrics,
        )


def matrix_metrics(matrix: ScoreMatrix) -> dict[str, float]:
    """The measures of the rows so far, by the names they have everywhere."""
    return {
        "AP": matrix.average_performance(),
        "FM": matrix.forgetting(),
        "FM_scorer": matrix.forgetting_scorer(),
        "BWT": matrix.backward_transfer(),
    }


def _prefix(matrix: ScoreMatrix, rows: int) -> ScoreMatrix:
    return ScoreMatrix(matrix.tasks, matrix.rows[:rows])


def _finish(f: TrialFiles, run: _PackRun) -> None:
    """Write the trial's result with its provenance, and close its journal."""
    matrix = f.matrix
    events = f.journal.read()
    timed = ("seconds_train", "seconds_eval")
    seconds = {name: sum(event["metrics"].get(name, 0.0) for event in stages(events)) for name in timed}
    paths = [run.store.path(lineage).relative_to(run.storage) for lineage in run.lineages]
    result = {
        "trial_id": f.trial.trial_id,
        "training_id": f.trial.training_id,
        "status": "finished",
        "metrics": matrix_metrics(matrix),
        "scores": dict(zip(matrix.tasks, matrix.rows[-1], strict=True)),
        "timings": seconds,
        "snapshots": [str(path) for path in paths],
        "values": dict(f.trial.values),
        "versions": versions(),
        "hardware": hardware(),
    }
    write_json(f.folder / "result.json", result)
    f.journal.append("finished", metrics=matrix_metrics(matrix))


def versions() -> dict[str, str]:
    """Versions of what computes the results."""
    packages = ("torch", "transformers", "numpy", "scikit-learn", "datasets", "rouge-score")
    return {"python": platform.python_version(), **{name: version(name) for name in ("latent-sweep", *packages)}}


def hardware() -> dict[str, Any]:
    """What it runs on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}
