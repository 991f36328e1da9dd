"""The members of a pack on their way through the tasks: what each has learned, who goes on, and who has failed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from latent_sweep.backbones.outputs import Example
from latent_sweep.data.schema import Split
from latent_sweep.errors import ConfigError, NonFiniteLoss
from latent_sweep.methods import checked, source_of
from latent_sweep.methods.protocol import Method, TaskData
from latent_sweep.metrics import metric_source
from latent_sweep.settings import content_hash
from latent_sweep.storage.failures import failure_kind, free_frames
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.storage.trial_files import TrialFiles
from latent_sweep.sweep.plan import Pack, Run, Trial
from latent_sweep.training.context import Context, backbone_facts, computed_with
from latent_sweep.training.journaling import say_failed
from latent_sweep.training.loop import recomputing
from latent_sweep.training.trainer import Progress, Trainer, TrainingSummary, derived_seed

log = logging.getLogger(__name__)

PENALTY_WARNING = 10.0
"""A penalty that ends this many times above the task loss at the start is said aloud: it rules the training (A4b)."""


@dataclass(frozen=True)
class ActiveTrial:
    """A trial, and the files that it leaves behind."""

    trial: Trial
    files: TrialFiles


class ActiveRun:
    """One member on its way through its tasks: its method, its snapshots so far, and its trials.

    Args:
        trials: those that have something missing; none where the member only follows, or is measured.
    """

    def __init__(self, member: Run, trials: Sequence[ActiveTrial], context: Context):
        self.member, self.trials, self.context = member, trials, context
        self.settings = member.trials[0].settings  # training reads nothing in which its trials differ
        self.tasks = member.trials[0].tasks
        self.contents = member.trials[0].stage_contents()
        self.lineages = tuple(map(content_hash, self.contents))
        self.wanted = max((run.files.wanted for run in trials), default=len(self.tasks))
        """How many tasks it is to learn."""
        self.snapshots: list[Snapshot] = []
        """Those so far, oldest first."""
        self.failure: Exception | None = None
        self._dropped: list[Exception] = []
        """What stopped those of its trials that have left it."""
        self.step: int | None = None
        self._checked: set[str] = set()
        """Methods and metrics from outside whose code is what was planned."""

    def told(self, position: int) -> bool:
        """Whether the rows of all its trials for the task at this position have been told."""
        return bool(self.trials) and all(position < len(run.files.rows) for run in self.trials)

    @property
    def method(self) -> Method:
        """The method with this member's settings, able to train."""
        return self.method_of(self.member.trials[0])

    def method_of(self, trial: Trial) -> Method:
        """The method with the settings of one of this member's trials, able to answer.

        Raises:
            ConfigError: the code of a method from outside is not what it was when the sweep was planned.
        """
        self._check_code(trial)
        return self.context.method(trial.settings.method, self.member.largest_rank)

    def _check_code(self, trial: Trial) -> None:
        """Hold code from outside against the plan, once: what is imported stays as it is, whatever the file says."""
        name = trial.settings.method.name
        method: tuple[str, str, str | None, Callable[[str], str | None]]
        method = ("method.name", name, trial.method_source, source_of)
        metrics = [("metric", metric, digest, metric_source) for metric, digest in trial.metric_sources.items()]
        for what, name, digest, source in (method, *metrics):
            if name not in self._checked and (found := source(name)) != digest:
                raise ConfigError(
                    f"{what}: the code of {name} on {socket.gethostname()} has the digest {found}; the sweep was "
                    f"planned with {digest}. Nothing was learned or scored with it. Have all nodes see the "
                    "same code, or end the sweep and start it again to plan it with what is there now."
                )
            self._checked.add(name)

    def _seed_parts(self, position: int) -> tuple[int, str]:
        return self.settings.seed, self.tasks[position].name

    def _rows(self, position: int, split: Split) -> list[Example]:
        """Return the rows of a split that the stage at this position reads."""
        first, carve = self.member.trials[0], self.settings.training.select == "best_validation"
        positions = self.method.learns_from(position, len(self.tasks))
        return [row for i in positions for row in self.context.tokens(first, i, split, carve)]

    def task_data(self, position: int) -> TaskData:
        """Return the task at this position as its method sees it."""
        seed_parts = self._seed_parts(position)

        def generator(purpose: str) -> torch.Generator:
            return torch.Generator().manual_seed(derived_seed(*seed_parts, purpose))

        at_once = self.settings.training.rows_in_a_pass(self.context.engine.group.size)
        rows = self._rows(position, "train")
        return TaskData(self.tasks[position].name, position, len(self.tasks), rows, generator, at_once)

    def trainer(self, position: int, on_step: Progress) -> Trainer:
        """Make the training of the task at this position."""
        s, context = self.settings, self.context
        data = self.task_data(position)
        read = self.snapshots if self.method.reads_history(position) else []
        context.check(read)
        history = [snapshot.tensors for snapshot in read]
        with context.doing("preparing", position):
            learner = checked.new_learner(self.method, data, history)
        return Trainer(
            learner,
            data.rows,
            s.training,
            self._seed_parts(position),
            context.store.checkpoint(self.lineages[position]),
            self._held_out(position) if s.training.select == "best_validation" else (),
            on_step,
            len(self.method.learns_from(position, len(self.tasks))),
        )

    def _held_out(self, position: int) -> list[Example]:
        """Return the rows that choose among epochs, with prompts as the model reads them when it answers."""
        return [
            {**row, "prompt_ids": self.method.prompt(row["prompt_ids"])} for row in self._rows(position, "validation")
        ]

    def snapshot(self, position: int, training: Trainer, summary: TrainingSummary) -> Snapshot:
        """Make the snapshot of the task at this position, which has been learned.

        Raises:
            ConfigError: the method gives what is no snapshot, or facts that are no numbers.
            NonFiniteLoss: what was learned is not finite.
        """
        task = self.tasks[position]
        task_loss = summary.first_losses.get("task", 0.0)  # at the end it may be next to nothing
        for name in training.learner.penalty():
            loss = summary.losses.get(name, 0.0)
            if task_loss and loss > PENALTY_WARNING * task_loss:  # a method from outside may call its terms otherwise
                message = "task %s ends with %s (%.3g) %.0f times the first task loss (%.3g); lower its coefficient"
                log.warning(message, task.name, name, loss, loss / task_loss, task_loss)
        with recomputing(self.context.backbone, self.settings.training):  # some measure gradients once more
            tensors = checked.snapshot(training.learner)
        if odd := [name for name, values in tensors.items() if not bool(values.isfinite().all())]:
            # the last step has no loss after it, and what a method measures in the end is in no loss
            raise NonFiniteLoss(
                f"what was learned of {task.name} is not finite: {', '.join(odd)}. Lower training.learning_rate, or "
                "the method's coefficients; check backbone.dtype"
            )
        facts = {
            "method": self.settings.method.name,
            "task": task.name,
            "seed": self.settings.seed,
            "steps": summary.steps,
            "trainable_parameters": sum(values.numel() for values in training.learner.parameters().values()),
            "losses": summary.losses,
            "first_losses": summary.first_losses,
            "measures": checked.facts(training.learner),
            "stage": self.contents[position],
            "backbone": backbone_facts(self.context.backbone),
            "computed_with": computed_with(self.context.backbone) | self._passes(),
        }
        return Snapshot(self.lineages[position], tensors, facts)

    def _passes(self) -> dict[str, str]:
        """Tell which rows were read together where it matters: masks of dropout are drawn for them, padding counts."""
        training = self.settings.training
        read = {
            "dropout masks": not self.method.packable or training.backbone_dropout,
            "padding": self.method.reads_padding,
        }
        rows = training.micro_batch_size or "all"
        told = f"{rows} rows a pass, {self.context.engine.group.size} workers"
        return {name: told for name, matters in read.items() if matters}

    @property
    def failures(self) -> list[Exception]:
        """Return what stopped it, or those of its trials that have left it."""
        own = self.failure
        return [*self._dropped, *([] if own is None or any(own is error for error in self._dropped) else [own])]

    def drop(self, run: ActiveTrial, error: Exception) -> None:
        """Have one of its trials leave before its first task, and log in its journal why; the last one ends it."""
        say_failed(run.files, error, None, None)
        log.error("%s failed before its first task: %s", run.trial.name, error)
        self._dropped.append(error)
        self.trials = [other for other in self.trials if other is not run]
        self.wanted = max((other.files.wanted for other in self.trials), default=0)
        if not self.trials:
            self.failure = error
        free_frames(error)

    def fail(self, error: Exception, task: str | None) -> None:
        """Leave the pack, and say in the journals why."""
        self.failure = error
        for run in self.trials:
            say_failed(run.files, error, task, self.step)
        place = "before its first task" if task is None else f"at task {task}"
        place += "" if self.step is None else f", step {self.step}"
        log.error("%s failed %s: %s", self.member.trials[0].name, place, error)
        free_frames(error)  # the others go on, with what memory it has held


class ActiveRuns:
    """The members of a pack that run together."""

    def __init__(self, members: Sequence[ActiveRun], context: Context):
        self.all, self.context = members, context

    def going(self, position: int) -> list[ActiveRun]:
        """Return those that go on to this task: they have not failed, and no scheduler has stopped them before."""
        return [member for member in self.all if member.failure is None and position < member.wanted]

    @contextmanager
    def leaving(self, members: Sequence[ActiveRun], position: int | None) -> Iterator[None]:
        """Have what goes wrong for these members within the block be their own end, not the pack's.

        With several workers only a loss that is not finite is: all workers see it alike. A lost device is the end of
        all.

        Args:
            position: of the task at hand; None before the first one.
        """
        try:
            yield
        except Exception as error:
            task = None if position is None else self.context.tasks[position].name
            if self.context.engine.group.size > 1 and not isinstance(error, NonFiniteLoss):
                place = "before the first task" if task is None else f"at task {task}"
                log.error("a worker of the group failed %s: %s", place, error)
                raise
            if failure_kind(error) == "device_lost":
                raise
            for member in members:
                member.fail(error, task)


def unfinished(pack: Pack, sweep: SweepFolder, context: Context) -> ActiveRuns:
    """The members of a pack with those of their trials that have something missing."""
    members = []
    for member in pack.runs:
        runs = [ActiveTrial(trial, trial.files(sweep)) for trial in member.trials]
        if lacking := [run for run in runs if not run.files.complete]:
            members.append(ActiveRun(member, lacking, context))
    return ActiveRuns(members, context)
