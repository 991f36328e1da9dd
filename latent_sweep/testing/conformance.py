"""What every method must keep, on every family: whole packs of the built-in benchmark, a few rows of three tasks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load, load_file

from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.backbones.families import fused_projection, sizes
from latent_sweep.backbones.loading import Backbone, load_backbone
from latent_sweep.backbones.outlines import outline
from latent_sweep.backbones.registry import REGISTRY, BackboneSettings
from latent_sweep.methods.protocol import Method
from latent_sweep.sweep.plan import Trial
from latent_sweep.testing.draws import shared_draws, validated_rows
from latent_sweep.testing.runs import Event, Runs
from latent_sweep.testing.stages import Stages, random_rows, undeclared, untried, with_group
from latent_sweep.training import stage
from latent_sweep.training.engine import Engine
from latent_sweep.training.events import StageDone, Step

FAMILIES = ("tiny-llama", "tiny-t5")
TASKS = ("mood", "ticket", "past")

Moment = tuple[str, int, int | None]
"""What is under way, the task's position, and the step."""

CUTS: Mapping[str, Moment] = {
    "inside the first task": ("learning", 0, 3),
    "at the second task's first step": ("learning", 1, 1),
    "inside the second task": ("learning", 1, 3),
    "at the last step": ("learning", 2, 4),
    "while the second row is scored": ("scoring", 1, 1),
    "after the first task": ("done", 0, None),
    "after the second task": ("done", 1, None),
    "after the last task": ("done", 2, None),
}
"""Moments at which a worker is lost."""

ABSOLUTE, RELATIVE = 1e-4, 1e-2
"""How far snapshots of a pack may be from those learned alone: batches are padded further, and Adam amplifies it."""


_FIRST: dict[tuple[str, str], Runs] = {}
"""The first runs of this process on each family, below the session's folder: what has tokenized the rows."""


class Cut(BaseException):
    """Raised where the worker is lost."""


@dataclass
class Finished:
    """An uninterrupted run."""

    runs: Runs
    events: list[Event] = field(default_factory=list)
    stages: list[dict[str, bytes]] = field(default_factory=list)
    """The stored files at the end of every stage."""
    cuts: dict[Moment, Path] = field(default_factory=dict)
    """By what had just been done, a copy of all that a worker killed there would have left."""
    backbones: list[Backbone] = field(default_factory=list)
    """Those that were trained on and answered with."""


@dataclass
class TwoSeeds:
    """Two seeds of one sweep, learned one after the other."""

    runs: Runs
    names: Sequence[set[str]]
    """Of the snapshots of each."""
    first: Sequence[Step]
    """The optimizer steps of the first one."""


class MethodConformance:
    """The suite: a subclass in a test file names the method, and pytest runs every test of it on both families.

    Attributes:
        method: as in a sweep file, e.g. `my_package.my_module:Mine`.
        settings: of its `method:` group, where its defaults do not fit backbones of width 32.
        untried: paths of settings that cannot be given another value; all others are, to see what each stage reads.
    """

    method: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    untried: ClassVar[Set[str]] = frozenset()

    # --- what the tests share ---

    @pytest.fixture(scope="class", params=FAMILIES)
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> str:
        """A tiny backbone with random weights, by name."""
        return request.param

    @pytest.fixture(scope="class")
    @classmethod
    def new_runs(cls, tmp_path_factory: pytest.TempPathFactory, family: str) -> Callable[[str], Runs]:
        """Runs in a new folder, which begin with the tokenized rows once there are some, of whatever method."""

        def make(name: str) -> Runs:
            runs = Runs(tmp_path_factory.mktemp(name) / "runs")
            first = _FIRST.setdefault((str(tmp_path_factory.getbasetemp()), family), runs)
            return runs.take_tokens(first) if (first.folder / "tokens").is_dir() else runs

        return make

    @pytest.fixture(scope="class")
    @classmethod
    def finished(
        cls, new_runs: Callable[[str], Runs], family: str, tmp_path_factory: pytest.TempPathFactory
    ) -> Finished:
        """An uninterrupted run."""
        found = Finished(new_runs("whole"))
        load_here = Engine.load

        def on(event: Event) -> None:
            found.events.append(event)
            if isinstance(event, StageDone):
                found.stages.append(found.runs.files())
            if (at := _moment(event)) in CUTS.values():
                found.cuts[at] = shutil.copytree(found.runs.folder, tmp_path_factory.mktemp("cut") / "runs")

        def remember(engine: Engine, settings: BackboneSettings) -> Backbone:
            found.backbones.append(load_here(engine, settings))
            return found.backbones[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "load", remember)
            found.runs.run(found.runs.packs_of(cls.content(family)), on)
        return found

    @pytest.fixture(scope="class")
    @classmethod
    def two_seeds(cls, new_runs: Callable[[str], Runs], family: str) -> TwoSeeds:
        """Two seeds, one after the other."""
        runs, events = new_runs("seeds"), list[Event]()
        packs = runs.packs_of(cls.gently(family))
        runs.run(packs[:1], events.append)
        runs.run(packs[1:])
        return TwoSeeds(runs, [set(each.trials[0].lineages()) for each in packs], _steps(events))

    @pytest.fixture(scope="class")
    @classmethod
    def stages(cls, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
        """Learns single stages."""
        settings = BackboneSettings.model_validate({**cls.backbone(family), "device": "cpu"})
        backbone = load_backbone(settings)
        bank = AdapterBank(backbone.targets, backbone.prompt_embedding)
        yield Stages(backbone, bank, tmp_path_factory.mktemp("stages"))
        bank.remove()

    @classmethod
    def content(cls, family: str) -> dict[str, Any]:
        """A sweep file's content: three tasks of eight rows, two epochs of two steps each."""
        trial = {
            "method": cls.group(),
            "backbone": cls.backbone(family),
            "benchmark": {"name": "builtin", "tasks": list(TASKS), "train_per_task": 8, "test_per_task": 3},
            "training": {"learning_rate": 0.05, "epochs": 2, "batch_size": 4, "checkpoint_every": 2},
            "router": {"components": 2},
        }
        return {"name": "tiny", "trial": trial, "run": {"tracking": {"uri": "none"}}}

    @classmethod
    def backbone(cls, family: str) -> dict[str, Any]:
        """The `backbone:` group of `content`; of a family without query and value of their own, what it adapts."""
        known = REGISTRY[family]
        fused = fused_projection(known.traits, outline(known.family, known.config).linears)
        return {"name": family, "dtype": "float32", **({"targets": [fused]} if fused else {})}

    @classmethod
    def gently(cls, family: str) -> dict[str, Any]:
        """Two seeds, at a rate so small that the optimizer does not amplify the last bits, which padding changes."""
        content = cls.content(family)
        content["trial"]["training"]["learning_rate"] = 1e-3
        content["trial"]["benchmark"]["tasks"] = list(TASKS[:2])
        return content | {"search": {"seed": [0, 1]}}

    @classmethod
    def planned(cls, family: str) -> Method:
        """The method with its settings resolved; it cannot train."""
        return cls.trial(family).method()

    @classmethod
    def trial(cls, family: str) -> Trial:
        """The trial of `content`."""
        return Runs(Path("nowhere")).packs_of(cls.content(family))[0].trials[0]

    @classmethod
    def one_epoch(cls, family: str) -> Trial:
        """The trial of `content` with half of its steps: single stages are told apart by fewer."""
        trial = cls.trial(family)
        return with_group(trial, "training", trial.settings.training.model_copy(update={"epochs": 1}))

    @classmethod
    def group(cls) -> dict[str, Any]:
        """The `method:` group of `content`."""
        return {"name": cls.method, **cls.settings}

    @classmethod
    def learned_positions(cls, family: str) -> set[int]:
        """Positions at which anything is trained, of three."""
        return {position for position in range(3) if cls.planned(family).learns_from(position, 3)}

    # --- the tests ---

    def test_planning_needs_no_backbone(self, family: str) -> None:
        """It resolves its settings, says what it reads and how it answers, and hashes alike every time."""
        first, second = self.trial(family), self.trial(family)
        assert (first.trial_id, first.lineages(), first.row_keys()) == (
            second.trial_id,
            second.lineages(),
            second.row_keys(),
        )
        method = first.method()
        assert method.combinations
        assert first.settings.router.combine == method.combinations[0]
        assert not method.reads_history(0)

    def test_loss_terms_are_named_and_finite(self, finished: Finished, family: str) -> None:
        """Every step of every task reports its terms."""
        steps = _steps(finished.events)
        for _, places in itertools.groupby(steps, lambda step: step.position):
            numbers = [step.step for step in places]
            assert numbers == list(range(1, len(numbers) + 1))
        assert {step.position for step in steps} == self.learned_positions(family)
        for step in steps:
            assert step.losses, "a step without a loss term learns nothing"
            assert all(isinstance(name, str) and math.isfinite(loss) for name, loss in step.losses.items())

    def test_every_stage_adds_a_row_of_scores(self, finished: Finished) -> None:
        """A score from 0 to 1 for each task seen."""
        stages = [event for event in finished.events if isinstance(event, StageDone)]
        assert [done.tasks_seen for done in stages] == [1, 2, 3]
        for seen, done in enumerate(stages, start=1):
            (matrix,) = done.matrices
            assert matrix.tasks == TASKS
            assert [len(row) for row in matrix.rows] == list(range(1, seen + 1))
            assert all(0 <= score <= 1 for row in matrix.rows for score in row)

    def test_earlier_snapshots_never_change(self, finished: Finished, family: str) -> None:
        """A stage adds its snapshot and leaves all others alone, to the byte."""
        stages = [{n: content for n, content in files.items() if "snapshots/" in n} for files in finished.stages]
        learned = self.learned_positions(family) or {0}  # what learns nothing leaves one snapshot too
        assert [len(files) for files in stages] == [2 * len([p for p in learned if p <= i]) for i in range(3)]
        for earlier, later in itertools.pairwise(stages):
            assert earlier.items() <= later.items()

    def test_the_backbone_stays_bit_for_bit(self, finished: Finished, family: str) -> None:
        """The very backbone that was trained on and answered with, against one that was only loaded."""
        (backbone,) = finished.backbones
        fresh = load_backbone(BackboneSettings.model_validate(self.backbone(family))).model.state_dict()
        after = backbone.model.state_dict()
        assert after.keys() == fresh.keys()
        assert all(after[name].equal(weight) for name, weight in fresh.items())
        assert not backbone.model.training
        assert all(p.grad is None and not p.requires_grad for p in backbone.model.parameters())

    @pytest.mark.parametrize("position", [0, 1])
    def test_epochs_are_chosen_by_the_held_out_rows_alone(self, stages: Stages, family: str, position: int) -> None:
        """What a method replays, or writes into rows, is to be learned from: no row of it is validated on."""
        trial = self.one_epoch(family)
        if not trial.method().learns_from(position, len(trial.tasks)):
            pytest.skip("nothing is learned there")
        held_out = random_rows(3, seed=90)
        expected = copy.deepcopy(held_out)
        found = validated_rows(stages, trial, position, held_out)
        assert sorted(found, key=repr) == sorted(expected, key=repr), (
            "the rows by which `select: best_validation` chooses an epoch are not those that were held out: "
            "`examples` is given training rows alone; and no member of a learner may change a row that it is given"
        )

    @pytest.mark.parametrize("position", [0, 1])
    def test_what_it_draws_comes_from_the_tasks_generator(self, stages: Stages, family: str, position: int) -> None:
        """Torch's, NumPy's and Python's own generators are seeded for steps alone, and of a pack for its first member.

        What draws from them elsewhere ends otherwise at every try, and after every cut.
        """
        trial = self.one_epoch(family)
        if not trial.method().learns_from(position, len(trial.tasks)):
            pytest.skip("nothing is learned there")
        found = shared_draws(stages, trial, position)
        told = "; ".join(f"{name} draws from {' and '.join(sorted(drawn))}" for name, drawn in sorted(found.items()))
        assert not found, (
            f"{told} own generator. Draw from `task.generator(purpose)`, which `begin_task` is given: it repeats for "
            "this seed, task and purpose. A method whose steps draw, such as one with dropout, says `packable = False`"
        )

    @pytest.mark.parametrize("cut", CUTS)
    def test_cut_anywhere_and_run_again_ends_the_same(
        self, finished: Finished, family: str, cut: str, tmp_path: Path
    ) -> None:
        """From what a worker killed there leaves, it ends with the same bytes, and repeats nothing that was done."""
        doing, task, step = CUTS[cut]
        if doing == "learning" and task not in self.learned_positions(family):
            pytest.skip("nothing is learned there")
        if CUTS[cut] not in finished.cuts:
            pytest.skip("its tasks have fewer steps")
        runs = Runs(shutil.copytree(finished.cuts[CUTS[cut]], tmp_path / "runs"))
        events: list[Event] = []
        runs.run(runs.packs_of(self.content(family)), events.append)
        steps = _steps(events)
        assert not (other := _other_files(runs.files(), finished.runs.files())), (
            f"it ended with other files than an uninterrupted run: {other}. After a cut, begin_task is called again "
            "with the same history and the trained parameters are loaded; what else a learner keeps while it learns "
            "has to be given by its `state` and taken back by its `load_state`, and what it draws has to come from "
            "`task.generator`"
        )
        done = [
            (s.position, s.step) for s in steps if s.position < task or (s.position == task and doing != "learning")
        ]
        assert not done, "what was done is not done again"
        if step is not None and doing == "learning":  # a checkpoint was taken after every second step
            last = steps[0].steps - 1  # after the last step there is a snapshot instead
            assert (steps[0].position, steps[0].step) == (task, min(step - step % 2, last - last % 2) + 1)
        assert not list((runs.folder / "checkpoints").glob("*"))

    def test_a_finished_run_has_nothing_to_do(self, finished: Finished, family: str, tmp_path: Path) -> None:
        """Run again, it says nothing and does nothing."""
        copy, events = Runs(tmp_path / "copy"), list[Event]()
        shutil.copytree(finished.runs.folder, copy.folder)
        copy.run(copy.packs_of(self.content(family)), events.append)
        assert events == []

    def test_another_seed_is_another_training(self, two_seeds: TwoSeeds, family: str) -> None:
        """Two seeds share no snapshot, neither by name nor by content."""
        folder, names = two_seeds.runs.folder / "snapshots", two_seeds.names
        assert not names[0] & names[1]
        if self.learned_positions(family):
            contents = [{(folder / f"{n}.safetensors").read_bytes() for n in each} for each in names]
            assert not contents[0] & contents[1]

    def test_the_parameter_count_is_what_is_trained(
        self, new_runs: Callable[[str], Runs], family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`parameter_count` says from shapes alone how many numbers a learner has."""
        counts: list[int] = []

        def count(trainings: Sequence[Any], *others: Any) -> Iterator[None]:
            counts.extend(sum(p.numel() for p in each.learner.parameters().values()) for each in trainings)
            raise Cut

        monkeypatch.setattr(stage, "train_pack", count)
        runs = new_runs("counted")
        learns = bool(self.learned_positions(family))
        with pytest.raises(Cut) if learns else contextlib.nullcontext():
            runs.run(runs.packs_of(self.content(family)))
        known = REGISTRY[family]
        width = sizes(known.traits, known.config)["width"]
        shapes = known.adapted(BackboneSettings.model_validate(self.backbone(family)))
        assert counts == ([self.planned(family).parameter_count(shapes, width)] if learns else [])

    def test_two_seeds_side_by_side_end_as_each_alone(
        self, two_seeds: TwoSeeds, new_runs: Callable[[str], Runs], family: str
    ) -> None:
        """In one pack, in one forward pass of the backbone, to rounding."""
        together, content = new_runs("together"), self.gently(family)
        packs = together.packs_of(content | {"run": {**content["run"], "pack": ["seed"]}})
        packable = packs[0].trials[0].method().packable
        assert [len(pack.runs) for pack in packs] == ([2] if packable else [1, 1])
        together.run(packs)
        _check_snapshots(together, two_seeds.runs, two_seeds.names[0] | two_seeds.names[1])

    def test_micro_batches_add_up(self, two_seeds: TwoSeeds, new_runs: Callable[[str], Runs], family: str) -> None:
        """Learned row by row, every step's loss terms and every snapshot are those of whole batches, to rounding.

        Not where steps draw, as a method says that is not packable: other passes draw otherwise.
        """
        if not self.trial(family).method().packable:
            pytest.skip("what its steps draw depends on the rows of a pass")
        runs, content, events = new_runs("row-by-row"), self.gently(family), list[Event]()
        content["trial"]["training"]["micro_batch_size"] = 1
        runs.run(runs.packs_of(content)[:1], events.append)
        for found, expected in zip(_steps(events), two_seeds.first, strict=True):
            assert found.losses == pytest.approx(expected.losses, abs=1e-6, rel=RELATIVE), (
                f"loss terms at step {found.step} of task {found.position + 1}, in micro-batches of one row and in "
                "batches of four: a term of `loss` has to be divided by what does not depend on the micro-batch, as "
                "`Outputs.denominator`; a term of parameters alone belongs in `penalty`, which is asked once a step"
            )
        _check_snapshots(runs, two_seeds.runs, two_seeds.names[0])

    def test_every_setting_has_another_value(self, family: str) -> None:
        """Otherwise the next test does not see whether stages read it."""
        found = untried(self.trial(family), self.group())
        assert found == self.untried, (
            f"no other value is known, by their types, of {', '.join(sorted(found))}: name them in `untried` of this "
            "class of tests, and see by hand that `stage_identity` has those that stages read"
        )

    @pytest.mark.parametrize("position", [0, 1])
    def test_a_stage_reads_what_it_declares(self, stages: Stages, family: str, position: int) -> None:
        """A setting that changes a snapshot changes its lineage; else a trial is given another trial's snapshot."""
        found = undeclared(stages, self.one_epoch(family), self.group(), position)
        assert not found, (
            f"settings that change what the task at position {position} leaves behind: {', '.join(sorted(found))}; "
            "`stage_identity` has to have them at this position, or trials that differ in them share one training"
        )

    @pytest.mark.parametrize("position", [0, 1])
    def test_a_stage_reads_nothing_of_what_comes_later_or_runs_beside_it(
        self, stages: Stages, family: str, position: int
    ) -> None:
        """A longer order begins with the same snapshots, and so does a trial beside others of larger ranks."""
        trial = self.one_epoch(family)
        earlier, later = (tuple(trial.method().learns_from(position, count)) for count in (3, 6))
        if earlier and earlier == later:
            assert not stages.differs(trial, position, trial, longer=3), "more tasks to come change what it learns"
            assert not stages.differs(trial, position, trial, largest_rank=32), (
                "the largest rank of the sweep changes what it learns"
            )


def _steps(events: Sequence[Event]) -> list[Step]:
    """The optimizer steps among events."""
    return [event for event in events if isinstance(event, Step) and event.doing == "learning"]


def _other_files(found: Mapping[str, bytes], expected: Mapping[str, bytes]) -> str:
    """Say which files differ, and of snapshots which tensors by how much."""
    told = [f"{path} is missing" for path in sorted(expected.keys() - found.keys())]
    told += [f"{path} is there" for path in sorted(found.keys() - expected.keys())]
    for path in sorted(path for path in expected.keys() & found.keys() if found[path] != expected[path]):
        told.append(path)
        if path.endswith(".safetensors"):
            here, there = load(found[path]), load(expected[path])
            told += [
                f"its {key} by up to {(here[key].double() - there[key].double()).abs().max():.2g}"
                for key in sorted(here.keys() & there.keys())
                if here[key].shape == there[key].shape and not here[key].equal(there[key])
            ]
    return ", ".join(told)


def _check_snapshots(found: Runs, expected: Runs, names: Set[str]) -> None:
    """Check that these snapshots, and no others, are there and equal to rounding."""
    assert {path.stem for path in (found.folder / "snapshots").glob("*.safetensors")} == names != set()
    for name in names:
        here, there = (load_file(runs.folder / "snapshots" / f"{name}.safetensors") for runs in (found, expected))
        assert here.keys() == there.keys()
        for key, tensor in there.items():
            torch.testing.assert_close(
                here[key], tensor, atol=ABSOLUTE, rtol=RELATIVE, msg=partial("{}: {}".format, key)
            )


def _moment(event: Event) -> Moment:
    if isinstance(event, Step):
        return event.doing, event.position, event.step
    return "done", event.tasks_seen - 1, None
