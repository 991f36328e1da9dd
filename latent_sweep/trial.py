"""run_pack: learn task after task, score the tasks seen, leave snapshots and rows behind.

With several workers the first of them runs the pack, and the others follow it in what needs the backbone (`gang.py`).

A plain function that knows no Ray and no MLflow: a debugger, a test and a cluster call the same one. Disk is the truth:
whatever the store and the trial folders already hold is read, the rest is done.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from latent_sweep import versions
from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.backbones import Backbone, backbone_identity, device_name
from latent_sweep.benchmarks.loaders import tokenised
from latent_sweep.benchmarks.schema import BenchmarkSettings, scoring_metric
from latent_sweep.checks import Reader, check_pack
from latent_sweep.engine import Engine
from latent_sweep.errors import ConfigError, NonFiniteLoss, StoreError
from latent_sweep.evaluation import Evaluator, answer
from latent_sweep.methods import method_class
from latent_sweep.methods.protocol import Example, Method, TaskData, Workplace
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.mixing import Mixer, router_accuracy
from latent_sweep.plan import Member, Pack, Trial
from latent_sweep.retries import failure_facts
from latent_sweep.router import PooledScatter
from latent_sweep.settings import canonical_json, content_hash
from latent_sweep.snapshots import Snapshot, SnapshotStore
from latent_sweep.tracking import Event, attempts, stages, status, writing
from latent_sweep.training import Lesson, Progress, TrainingSummary, derived_seed, train_pack
from latent_sweep.trial_files import TrialFiles

log = logging.getLogger(__name__)

PENALTY_WARNING = 10.0
"""A penalty that ends this many times above the task loss at the start is said aloud: it rules the training (A4b)."""


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
    training_id: str
    """Of the member it is about."""


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

    def measures(self) -> dict[str, float]:
        """What a scheduler is told."""
        return {"tasks_seen": self.tasks_seen, "AP": self.average_performance, "FM": self.forgetting}


Emit = Callable[[Step | StageDone], None]


def run_pack(
    pack: Pack,
    storage: Path,
    sweep_folder: Path,
    emit: Emit,
    threads: int | None = None,
    engine: Engine | None = None,
) -> None:
    """Run what is missing of a pack's trials: learn each task once, score it for every trial.

    A member that fails leaves the pack; the others go on to their end. With several workers only a loss that is not
    finite is the member's own end, because all workers see it alike: anything else ends the pack.

    Args:
        storage: snapshots, factors, embeddings and tokens lie here, shared by all sweeps.
        sweep_folder: the trials' folders lie in its `trials/`.
        emit: told of every optimizer step and every finished stage.
        threads: CPU threads; None leaves torch's own choice.
        engine: what computes; None is plain torch in this process. Every worker of its gang calls this function with
            the same pack.

    Raises:
        Exception: whatever stopped the first member that failed, after a `failed` event in the journal of each of its
            unfinished trials and after the end of the others. Where a worker of a gang fails or is lost: at once, and
            the journals are the caller's.
    """
    engine = engine or Engine()
    if threads is not None:
        torch.set_num_threads(threads)
    if not engine.gang.leads:
        _follow(pack, storage, engine)
        return
    trial_ids = {member.training_id: [trial.trial_id for trial in member.trials] for member in pack.members}
    with writing(sweep_folder, trial_ids):
        members = _lead(pack, storage, sweep_folder, emit, engine)
    engine.gang.order("end")
    if failures := [member.failure for member in members if member.failure is not None]:
        raise failures[0]


def _lead(pack: Pack, storage: Path, sweep_folder: Path, emit: Emit, engine: Engine) -> list[MemberRun]:
    """Run what is missing; returns the members that had something to do."""
    folders = [(member, [TrialFiles(trial, sweep_folder) for trial in member.trials]) for member in pack.members]
    unfinished = [(member, [f for f in files if not f.complete]) for member, files in folders]
    if not any(files for _, files in unfinished):
        return []
    desk = Desk(pack.trials[0], storage, engine)
    members = [MemberRun(member, files, desk) for member, files in unfinished if files]
    for f in (f for member in members for f in member.files):
        f.mend()
        started = {"attempt": len(attempts(f.journal.read())) + 1, "node": socket.gethostname()}
        started["micro_batch_size"] = f.trial.settings.training.micro_batch_size
        started |= {"versions": versions.installed(), "hardware": hardware(engine), "pid": os.getpid()}
        f.journal.append("started", **started)
    try:
        if any(len(f.rows) < len(pack.tasks) for member in members for f in member.files):
            check_pack(pack, Reader(desk.backbone.family, desk.backbone.tokenizer.backend_tokenizer), storage)
        _PackRun(members, desk, emit).run(len(pack.tasks))
    except Exception as error:  # of all members, such as a backbone that cannot be loaded
        # a fault of the storage cannot be journaled, and may pass; who has started a gang learns which worker failed
        # first, or was lost, and what this one says may only follow from it
        if engine.gang.size == 1 and not isinstance(error, StoreError):
            for member in members:
                if member.failure is None:
                    member.fail(error, None)
        raise
    return members


def _follow(pack: Pack, storage: Path, engine: Engine) -> None:
    """Do this worker's share of what the gang's first worker orders, until it has no more."""
    desk = Desk(pack.trials[0], storage, engine)
    members = {member.training_id: MemberRun(member, [], desk) for member in pack.members}
    run = _PackRun(list(members.values()), desk, emit=lambda event: None)
    snapshots: dict[str, Snapshot] = {}

    def snapshot(lineage: str) -> Snapshot:
        found = snapshots.get(lineage) or desk.store.get(lineage)
        if found is None:
            raise StoreError(
                f"worker {engine.gang.rank} of {engine.gang.size} on {socket.gethostname()} does not find snapshot "
                f"{lineage} in {desk.store.folder}, where the first worker has it; run.storage must be shared by all "
                "nodes"
            )
        return snapshots.setdefault(lineage, found)

    while (order := engine.gang.next_order()) != ("end",):
        what, *how = order
        if what == "load":
            _ = desk.backbone
        elif what == "learn":
            position, lineages = how
            for member in members.values():
                if member.method.reads_history(position):
                    member.snapshots = [snapshot(lineage) for lineage in member.lineages[:position]]
            run.train(position, lineages)
        else:
            training_id, trial_id, batches = how
            member = members[training_id]
            (trial,) = (trial for trial in member.member.trials if trial.trial_id == trial_id)
            answer(batches, snapshot, member.method_of(trial), desk.backbone, desk.bank)


class Desk:
    """What the members of a pack share. What is expensive (the backbone, tokens) is loaded when first needed."""

    def __init__(self, trial: Trial, storage: Path, engine: Engine | None = None):
        self.storage, self.spec, self.tasks, self.trial = storage, trial.spec, trial.tasks, trial
        self.engine = engine or Engine()
        self.store = SnapshotStore(storage / "snapshots")
        self.folds: dict[str, PooledScatter] = {}
        self._tokens: dict[Any, Any] = {}

    @cached_property
    def backbone(self) -> Backbone:
        """The frozen model that all members share."""
        settings = self.trial.settings.backbone
        if (found := backbone_identity(settings)) != self.trial.backbone:
            raise ConfigError(
                f"backbone {settings.name}: found {found} on {socket.gethostname()}; the sweep was planned with "
                f"{dict(self.trial.backbone)}. Nothing was learned or scored with it. Put back what was planned with "
                "and run the same command again, or end the sweep and start it again to plan it with what is there now."
            )
        if self.engine.gang.leads:
            self.engine.gang.order("load")
        return self.engine.load(settings)

    def check(self, snapshots: Sequence[Snapshot]) -> None:
        """Hold snapshots that were found in the store against the backbone that is loaded here.

        Their lineages say what the backbone was called; a hub, a random generator or a conversion may have made other
        weights of it at another place.

        Raises:
            ConfigError: a snapshot was learned on other weights, or with another tokenizer.
        """
        here = backbone_facts(self.backbone)
        for snapshot in snapshots:
            if (there := snapshot.facts["backbone"]) != here:
                raise ConfigError(
                    f"backbone {self.trial.settings.backbone.name}: snapshot {snapshot.lineage} in {self.store.folder} "
                    f"was learned with {there}, but what is loaded on {socket.gethostname()} is {here}: one name, two "
                    "backbones. Install the versions that the snapshot's .json names, or use another run.storage."
                )

    def order(self, *what: Any) -> None:
        """Tell the other workers what all of them do now with the backbone, which all of them have by then."""
        _ = self.backbone
        self.engine.gang.order(*what)

    @cached_property
    def bank(self) -> AdapterBank:
        """What adapts it."""
        return AdapterBank(self.backbone.targets, self.backbone.prompt_embedding)

    def tokens(self, b: BenchmarkSettings, position: int, split: str, carve: bool = False, whole: bool = False) -> Any:
        """Tokenised rows; `whole` prompts are not truncated (A19)."""
        key = (position, split, carve, whole, b)
        if key not in self._tokens:
            assert b.max_source_length is not None
            self._tokens[key] = tokenised(
                self.spec,
                self.tasks[position],
                split,  # type: ignore[arg-type]
                b,
                self.backbone.tokenizer,
                self.backbone.tokenizer_digest,
                self.backbone.family,
                1 << 20 if whole else b.max_source_length,
                self.storage / "tokens",
                carve_validation=carve,
                source=self.trial.source(self.tasks[position], split),  # type: ignore[arg-type]
            )
        return self._tokens[key]


class MemberRun:
    """One member on its way through its tasks: its method, its snapshots so far, and the files of its trials."""

    def __init__(self, member: Member, files: Sequence[TrialFiles], desk: Desk):
        self.member, self.files, self.desk = member, files, desk
        self.settings = member.trials[0].settings  # training reads nothing in which its trials differ
        self.contents = member.trials[0].stage_contents()
        self.lineages = tuple(map(content_hash, self.contents))
        self.wanted = max((f.wanted for f in files), default=len(desk.tasks))
        self.snapshots: list[Snapshot] = []
        self._methods: dict[str, Method] = {}
        self.failure: Exception | None = None
        self.step: int | None = None

    @property
    def method(self) -> Method:
        """The method with this member's settings, able to train."""
        return self.method_of(self.member.trials[0])

    def method_of(self, trial: Trial) -> Method:
        """The method with the settings of one of this member's trials, able to answer."""
        settings, desk = trial.settings.method, self.desk
        key = canonical_json(settings.identity())
        if key not in self._methods:
            workplace = Workplace(desk.backbone, desk.bank, desk.storage, self.member.largest_rank)
            self._methods[key] = method_class(settings.name)(settings, workplace)
        return self._methods[key]

    def lesson(self, position: int, on_step: Progress) -> Lesson:
        """What learning the task at this position takes."""
        s, desk, task = self.settings, self.desk, self.desk.tasks[position]
        seed_parts = (s.seed, task.name)
        carve = s.training.select == "best_validation"

        def rows(split: str) -> list[Example]:
            positions = self.method.learns_from(position, len(desk.tasks))
            return [dict(row) for i in positions for row in desk.tokens(s.benchmark, i, split, carve)]

        def generator(purpose: str) -> torch.Generator:
            return torch.Generator().manual_seed(derived_seed(*seed_parts, purpose))

        data = TaskData(task.name, position, len(desk.tasks), rows("train"), generator)
        read = self.snapshots if self.method.reads_history(position) else []
        desk.check(read)
        history = [snapshot.tensors for snapshot in read]
        return Lesson(
            self.method.begin_task(data, history),
            data.rows,
            s.training,
            seed_parts,
            desk.store.checkpoint(self.lineages[position]),
            rows("validation") if carve else (),
            on_step,
        )

    def snapshot(self, position: int, lesson: Lesson, summary: TrainingSummary) -> Snapshot:
        """What the lesson leaves behind."""
        task = self.desk.tasks[position]
        task_loss = summary.first_losses.get("task", 0.0)  # at the end it may be next to nothing
        for name in lesson.learner.penalty():
            loss = summary.losses.get(name, 0.0)
            if loss > PENALTY_WARNING * task_loss:
                message = "task %s ends with %s (%.3g) %.0f times the first task loss (%.3g); lower its coefficient"
                log.warning(message, task.name, name, loss, loss / task_loss, task_loss)
        tensors = lesson.learner.finish()
        facts = {
            "method": self.settings.method.name,
            "task": task.name,
            "seed": self.settings.seed,
            "steps": summary.steps,
            "losses": summary.losses,
            "first_losses": summary.first_losses,
            "measures": lesson.learner.facts(),
            "stage": self.contents[position],
            "backbone": backbone_facts(self.desk.backbone),
            "computed_with": computed_with(self.desk.backbone) | self._masks(),
        }
        return Snapshot(self.lineages[position], tensors, facts)

    def _masks(self) -> dict[str, str]:
        """How the masks of dropout were drawn, where there is some: for all rows that a worker reads at once."""
        training = self.settings.training
        if self.method.packable and not training.backbone_dropout:
            return {}
        rows = training.micro_batch_size or "all"
        return {"dropout masks": f"{rows} rows a pass, {self.desk.engine.gang.size} workers"}

    def fail(self, error: Exception, task: str | None) -> None:
        """Say in the journals what stopped this member."""
        self.failure = error
        for f in self.files:
            if status(f.journal.read()) == "running":
                f.journal.append("failed", **failure_facts(error), task=task, step=self.step)
        log.error("%s failed at task %s, step %s: %s", self.member.trials[0].name, task, self.step, error)


class _PackRun:
    """One worker's way through a pack."""

    def __init__(self, members: Sequence[MemberRun], desk: Desk, emit: Emit):
        self.members, self.desk, self.emit = members, desk, emit

    def going(self, position: int) -> list[MemberRun]:
        """The members that go on to this task: they have not failed, and no scheduler has stopped them before it."""
        return [member for member in self.members if member.failure is None and position < member.wanted]

    def run(self, n_tasks: int) -> None:
        for position in range(n_tasks):
            self._stage(position)
        for member in self.going(0):
            with self._leaving([member], n_tasks - 1):
                for f in member.files:
                    _finish(f, member.lineages, self.desk)

    @contextmanager
    def _leaving(self, members: Sequence[MemberRun], position: int) -> Iterator[None]:
        """What goes wrong for these members within the block is their own end, not the pack's (see `run_pack`)."""
        try:
            yield
        except Exception as error:
            task = self.desk.tasks[position].name
            if self.desk.engine.gang.size > 1 and not isinstance(error, NonFiniteLoss):
                log.error("a worker of the gang failed at task %s: %s", task, error)
                raise
            for member in members:
                member.fail(error, task)

    def _stage(self, position: int) -> None:
        """Learn one task where nobody has, and score the tasks seen for every trial that lacks the row."""
        summaries = self._learn(position)
        for member in self.going(position):
            with self._leaving([member], position):
                for f in member.files:
                    if len(f.rows) <= position < f.wanted:
                        timing = self._score(f, member, position)
                        self._tell_stage(f, member, position, summaries.get(member.lineages[position]), timing)
        if files := [f for member in self.going(position) for f in member.files if position < f.wanted]:
            self.emit(StageDone(position + 1, [_prefix(f.matrix, position + 1) for f in files]))

    def _learn(self, position: int) -> dict[str, TrainingSummary]:
        """Put the task's snapshot at the end of each member's history; summaries of those learned here and now."""
        store, summaries = self.desk.store, {}
        while wanting := {m.lineages[position]: m for m in self.going(position) if len(m.snapshots) == position}:
            with store.leases(list(wanting), _say_waiting) as mine:
                found = {lineage: snapshot for lineage in mine if (snapshot := store.get(lineage))}
                for lineage in found:
                    store.checkpoint(lineage).remove()  # whoever learned it may have been killed before doing so
                missing = [lineage for lineage in mine if lineage not in found]
                if missing:
                    self.desk.order("learn", position, missing)
                for lineage, (snapshot, summary) in self.train(position, missing).items():
                    store.append(snapshot)
                    store.checkpoint(lineage).remove()
                    found[lineage], summaries[lineage] = snapshot, summary
            for member in self.going(position):
                if len(member.snapshots) == position and member.lineages[position] in found:
                    member.snapshots.append(found[member.lineages[position]])
        return summaries

    def train(self, position: int, lineages: Sequence[str]) -> dict[str, tuple[Snapshot, TrainingSummary]]:
        """Learn these snapshots side by side, each for all members that share it."""
        going = self.going(position)
        sharers = {lineage: [m for m in going if m.lineages[position] == lineage] for lineage in lineages}
        lessons: dict[str, Lesson] = {}
        learned = {}
        for lineage, members in sharers.items():
            with self._leaving(members, position):
                lessons[lineage] = members[0].lesson(position, self._reporter(members, position))
        with self._leaving([member for lineage in lessons for member in sharers[lineage]], position):
            for lineage, outcome in self._outcomes(lessons).items():
                with self._leaving(sharers[lineage], position):
                    if isinstance(outcome, Exception):
                        raise outcome
                    learned[lineage] = sharers[lineage][0].snapshot(position, lessons[lineage], outcome), outcome
        return learned

    def _outcomes(self, lessons: Mapping[str, Lesson]) -> dict[str, TrainingSummary | Exception]:
        """Train side by side what has rows to learn from."""
        with_rows = {lineage: lesson for lineage, lesson in lessons.items() if lesson.examples}
        outcomes = train_pack(list(with_rows.values()), self.desk.backbone, self.desk.bank) if with_rows else []
        nothing = dict.fromkeys(lessons, TrainingSummary(0, {}, {}, 0.0, 0))
        return nothing | dict(zip(with_rows, outcomes, strict=True))

    def _reporter(self, members: Sequence[MemberRun], position: int) -> Progress:
        def on_step(step: int, steps: int, losses: Mapping[str, float]) -> None:
            for member in members:
                member.step = step
            self.emit(Step(position, "learning", step, steps, losses, members[0].member.training_id))

        return on_step

    def _score(self, f: TrialFiles, member: MemberRun, position: int) -> dict[str, float]:
        """Score all tasks seen for one trial and record the row; returns timings and shares for the journal."""
        began = time.monotonic()
        s, desk = f.trial.settings, self.desk
        member.step = None
        desk.check(member.snapshots[: position + 1])
        mixer = self._mixer(f.trial, member)
        weights = mixer.weights(position + 1)
        assert s.benchmark.max_target_length is not None
        evaluator = Evaluator(
            desk.backbone,
            desk.bank,
            member.method_of(f.trial),
            s.evaluation.batch_size,
            s.benchmark.max_target_length,
            desk.spec.stop,
            s.benchmark.references,
            desk.storage / "predictions",
            lambda batches: desk.order("answer", member.member.training_id, f.trial.trial_id, batches),
        )
        row, predictions, generated, total, rouge_1 = [], {}, 0, 0, {}
        for j in range(position + 1):
            task = desk.tasks[j]
            rows = desk.tokens(s.benchmark, j, "test")
            result = evaluator.score(member.snapshots, weights[j], rows, scoring_metric(s.benchmark, task))
            predictions[task.name] = result.predictions
            row.append(result.score)
            if result.rouge_1 is not None:
                rouge_1[f"rouge_1/{task.name}"] = result.rouge_1
            generated, total = generated + result.generated, total + len(rows)
            self.emit(Step(position, "scoring", j + 1, position + 1, {}, member.member.training_id))
        f.record(row, predictions)
        measured = {"seconds_eval": time.monotonic() - began, "generated_share": generated / total}
        measured |= rouge_1
        return measured | ({"router_accuracy": router_accuracy(weights)} if mixer.routes else {})

    def _mixer(self, trial: Trial, member: MemberRun) -> Mixer:
        s, desk = trial.settings, self.desk
        whole = not s.router.pool.truncate

        def gates(tasks_seen: int, prompts: Sequence[Sequence[int]]) -> Any:
            history = [snapshot.tensors for snapshot in member.snapshots[:tasks_seen]]
            return member.method_of(trial).gates(history, prompts)

        return Mixer(
            s.router,
            desk.backbone,
            lambda position, split: desk.tokens(s.benchmark, position, split, whole=whole),
            gates,
            len(desk.tasks),
            s.seed,
            desk.storage,
            desk.folds,
        )

    def _tell_stage(
        self,
        f: TrialFiles,
        member: MemberRun,
        position: int,
        summary: TrainingSummary | None,
        timing: Mapping[str, float],
    ) -> None:
        facts = member.snapshots[position].facts
        metrics = f.matrix.measures() | dict(timing) | facts["measures"]
        metrics |= {"train_loss" if name == "task" else name: loss for name, loss in facts["losses"].items()}
        if summary is not None:
            metrics["seconds_train"] = summary.seconds
            metrics["tokens_per_second"] = summary.tokens / max(summary.seconds, 1e-9)
        computed = {"learned_with": facts["computed_with"], "scored_with": computed_with(self.desk.backbone)}
        f.tell(member.lineages[position], summary is None, metrics, computed)


def _say_waiting(lineage: str) -> None:
    log.info("waiting for another worker to learn %s", lineage)


def _prefix(matrix: ScoreMatrix, rows: int) -> ScoreMatrix:
    return ScoreMatrix(matrix.tasks, matrix.rows[:rows])


def _finish(f: TrialFiles, lineages: Sequence[str], desk: Desk) -> None:
    """Write the trial's result with its provenance, and close its journal."""
    if f.stop is not None:
        f.stop_again()
        return
    matrix = f.matrix
    events = f.journal.read()
    timed = ("seconds_train", "seconds_eval")
    seconds = {name: sum(event["metrics"].get(name, 0.0) for event in stages(events)) for name in timed}
    paths = [desk.store.path(lineage).relative_to(desk.storage) for lineage in lineages]
    f.finish(
        {
            "trial_id": f.trial.trial_id,
            "training_id": f.trial.training_id,
            "status": "finished",
            "metrics": matrix.measures(),
            "scores": dict(zip(matrix.tasks, matrix.rows[-1], strict=True)),
            "timings": seconds,
            "generated_share": _generated_share(f, desk, events),
            "snapshots": [str(path) for path in paths],
            "values": dict(f.trial.values),
            "versions": versions.installed(),
            "hardware": hardware(desk.engine),
        }
    )


def _generated_share(f: TrialFiles, desk: Desk, events: Sequence[Event]) -> float:
    """Of all answers that the trial's stages asked for, the share that was generated; the others were known."""
    counts = [len(desk.tokens(f.trial.settings.benchmark, i, "test")) for i in range(len(desk.tasks))]
    asked = list(itertools.accumulate(counts))  # at each stage: the rows of all tasks seen
    shares = {event["tasks_seen"]: event["metrics"].get("generated_share", 0.0) for event in stages(events)}
    return sum(shares[seen] * count for seen, count in enumerate(asked, start=1)) / sum(asked)


def backbone_facts(backbone: Backbone) -> dict[str, str]:
    """What the loaded backbone is, by content."""
    return {"weights": backbone.weights_digest, "tokenizer": backbone.tokenizer_digest}


def computed_with(backbone: Backbone) -> dict[str, str]:
    """What can move a number in its last digits: libraries, device and type."""
    libraries = {name: versions.library(name) for name in ("latent-sweep", *versions.LIBRARIES)}
    return {**libraries, "device": device_name(backbone.device), "dtype": str(backbone.model.dtype).split(".")[-1]}


def hardware(engine: Engine | None = None) -> dict[str, Any]:
    """What it runs on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}
    return found | (engine.facts() if engine else {})
