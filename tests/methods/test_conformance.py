"""What every method must keep, on every family: whole packs of the built-in benchmark, a few rows of three tasks."""

import contextlib
import itertools
import math
import shutil
from dataclasses import dataclass, field

import pytest
import torch
from helpers.methods import TASKS, changes
from helpers.tiny import FAMILIES, Runs, learns
from safetensors.torch import load_file

from latent_sweep.backbones.known import KNOWN, BackboneSettings, target_shapes
from latent_sweep.backbones.loading import load_backbone
from latent_sweep.learn import stage as stage_module
from latent_sweep.learn.engine import Engine
from latent_sweep.learn.events import StageDone, Step
from latent_sweep.methods import METHODS, method_class


def case(method, family, *more, name="", marks=()):
    group = pytest.mark.xdist_group(f"conformance of {method}")  # they share the runs of one method
    return pytest.param(
        method, family, *more, id=" ".join((f"{method} on {family}", name)).strip(), marks=[group, *marks]
    )


CASES = [case(method, family) for method in METHODS for family in FAMILIES]
QUICK_CASES = [
    *(case(method, FAMILIES[0]) for method in METHODS),
    *(case(method, FAMILIES[1], marks=(pytest.mark.slow,)) for method in METHODS),
]
"""For what runs whole trainings of its own: the second family with the slow tests."""
EACH_ADAPTER = ("latent_lora", "inc_lora", "gain_lora", "lfpt5")
"""Methods whose packs multiply in different ways; those of the others multiply as one of these."""
PACK_CASES = [
    *(case(m, FAMILIES[0], marks=() if m in EACH_ADAPTER else (pytest.mark.one_machine,)) for m in METHODS),
    *(case(m, FAMILIES[1], marks=(pytest.mark.slow,)) for m in METHODS),
]


class Cut(BaseException):
    """The worker is lost."""


CUTS = {
    # what is under way, task, step
    "inside the first task": ("learning", 0, 3),
    "at the second task's first step": ("learning", 1, 1),
    "inside the second task": ("learning", 1, 3),
    "at the last step": ("learning", 2, 4),
    "while the second row is scored": ("scoring", 1, 1),
    "after the first task": ("done", 0, None),
    "after the second task": ("done", 1, None),
    "after the last task": ("done", 2, None),
}


def place(event):
    """What an event says is done: what was under way, task, step."""
    if isinstance(event, Step):
        return event.doing, event.position, event.step
    return "done", event.tasks_seen - 1, None


def learned_positions(method):
    """Positions at which anything is trained, of three."""
    kind = method_class(method)
    planned = kind(kind.settings_class())
    return {position for position in range(3) if planned.learns_from(position, 3)}


@dataclass
class Finished:
    """An uninterrupted run."""

    runs: Runs
    events: list = field(default_factory=list)
    stages: list = field(default_factory=list)
    """The stored files at the end of every stage."""
    cuts: dict = field(default_factory=dict)
    """By what had just been done, a copy of all that a worker killed there would have left."""
    backbones: list = field(default_factory=list)
    """Those that were trained on and answered with."""


@pytest.fixture(scope="module")
def new_runs(tmp_path_factory):
    """Runs of a family in a new folder, which begin with its tokenised rows once there are some."""
    first = {}

    def make(family, name="runs"):
        runs = Runs(tmp_path_factory.mktemp(f"{name}-{family}") / "runs")
        known = first.setdefault(family, runs)
        return runs.take_tokens(known) if (known.folder / "tokens").is_dir() else runs

    return make


@pytest.fixture(scope="module")
def finished(new_runs, tmp_path_factory):
    """Uninterrupted runs by method and family."""
    known = {}

    def run(method, family):
        if (method, family) not in known:
            found = known[method, family] = Finished(new_runs(family, method))

            def on(event):
                found.events.append(event)
                if isinstance(event, StageDone):
                    found.stages.append(found.runs.files())
                if (at := place(event)) in CUTS.values():
                    found.cuts[at] = shutil.copytree(found.runs.folder, tmp_path_factory.mktemp("cut") / "runs")

            load = Engine.load

            def remember(engine, settings):
                found.backbones.append(load(engine, settings))
                return found.backbones[-1]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Engine, "load", remember)
                found.runs.run(found.runs.packs(**changes(method, family)), on)
        return known[method, family]

    return run


@pytest.fixture(scope="module")
def two_seeds(new_runs):
    """Two seeds of a method, one after the other: the runs and the names of the snapshots of each.

    At a rate so small that the optimizer does not amplify the last bits, which padding changes.
    """
    known = {}

    def run(method, family):
        if (method, family) not in known:
            runs = new_runs(family, f"{method}-seeds")
            packs = runs.packs(**gently(method, family))
            runs.run(packs)
            known[method, family] = runs, [set(pack.trials[0].lineages()) for pack in packs]
        return known[method, family]

    return run


def gently(method, family):
    """Settings of two seeds."""
    content = changes(method, family)
    content["trial__training"]["learning_rate"] = 1e-3
    content["trial__benchmark"]["tasks"] = TASKS[:2]
    return content | {"search": {"seed": [0, 1]}}


@pytest.mark.parametrize(("method", "family"), CASES)
@pytest.mark.one_machine
def test_loss_terms_are_named_and_finite(finished, method, family):
    events = finished(method, family).events
    steps = [event for event in events if learns(event)]
    for position, places in itertools.groupby(steps, lambda step: step.position):
        numbers = [step.step for step in places]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= 4, f"task {position} has 8 rows in batches of 4, twice"
    assert {step.position for step in steps} == learned_positions(method)
    for step in steps:
        assert "task" in step.losses
        assert all(isinstance(name, str) and math.isfinite(loss) for name, loss in step.losses.items())


@pytest.mark.parametrize(("method", "family"), CASES)
@pytest.mark.one_machine
def test_every_stage_adds_a_row_of_scores(finished, method, family):
    events = finished(method, family).events
    stages = [event for event in events if isinstance(event, StageDone)]
    assert [stage.tasks_seen for stage in stages] == [1, 2, 3]
    for seen, stage in enumerate(stages, start=1):
        (matrix,) = stage.matrices
        assert matrix.tasks == tuple(TASKS)
        assert [len(row) for row in matrix.rows] == list(range(1, seen + 1))
        assert all(0 <= score <= 1 for row in matrix.rows for score in row)


@pytest.mark.parametrize(("method", "family"), CASES)
@pytest.mark.one_machine
def test_earlier_snapshots_never_change(finished, method, family):
    stages = finished(method, family).stages
    snapshots = [{name: content for name, content in files.items() if "snapshots/" in name} for files in stages]
    learned = learned_positions(method) or {0}  # what learns nothing leaves one snapshot too
    assert [len(files) for files in snapshots] == [2 * len([p for p in learned if p <= i]) for i in range(3)]
    for earlier, later in itertools.pairwise(snapshots):
        assert earlier.items() <= later.items()


@pytest.mark.parametrize(("method", "family"), CASES)
@pytest.mark.one_machine
def test_the_backbone_stays_bit_for_bit(finished, method, family):
    """The very backbone that was trained on and answered with, against one that was only loaded."""
    (backbone,) = finished(method, family).backbones
    fresh = load_backbone(BackboneSettings(name=family, dtype="float32")).model.state_dict()
    after = backbone.model.state_dict()
    assert after.keys() == fresh.keys()
    assert all(after[name].equal(weight) for name, weight in fresh.items())
    assert not backbone.model.training
    assert all(p.grad is None and not p.requires_grad for p in backbone.model.parameters())


QUICK = ("inside the second task", "while the second row is scored")
"""Cuts of every method, on one family, in the default selection; the first method is cut everywhere, on both."""
SECOND_FAMILY = (*QUICK, "after the first task")
"""Cuts of the other methods on the second family: where they go on does not depend on it."""

CUT_CASES = [
    case(method, family, *CUTS[name], name=f"cut {name}", marks=() if quick else (pytest.mark.slow,))
    for method in METHODS
    for family in FAMILIES
    for name in CUTS
    if CUTS[name][0] != "learning" or CUTS[name][1] in learned_positions(method)
    for first in [method == next(iter(METHODS))]
    for quick in [first or (name in QUICK and family == FAMILIES[0])]
    if first or family == FAMILIES[0] or name in SECOND_FAMILY
]


@pytest.mark.parametrize(("method", "family", "doing", "task", "step"), CUT_CASES)
@pytest.mark.one_machine
def test_cut_anywhere_and_run_again_ends_the_same(finished, tmp_path, method, family, doing, task, step):
    runs = Runs(shutil.copytree(finished(method, family).cuts[doing, task, step], tmp_path / "runs"))
    steps = []
    runs.run(runs.packs(**changes(method, family)), lambda e: steps.append(e) if learns(e) else None)
    assert runs.files() == finished(method, family).runs.files()
    repeated = [
        (e.position, e.step) for e in steps if e.position < task or (e.position == task and doing != "learning")
    ]
    assert not repeated, "what was done is not done again"
    if doing == "learning":  # a checkpoint was taken after every second step
        assert (steps[0].position, steps[0].step) == (task, step - step % 2 + (1 if step < 4 else -1))
    assert not list((runs.folder / "checkpoints").glob("*"))


@pytest.mark.parametrize(("method", "family"), CASES)
@pytest.mark.one_machine
def test_a_finished_run_has_nothing_to_do(finished, method, family, tmp_path):
    runs = finished(method, family).runs
    copy = Runs(tmp_path / "copy")
    shutil.copytree(runs.folder, copy.folder)
    events = []
    copy.run(copy.packs(**changes(method, family)), events.append)
    assert events == []


@pytest.mark.parametrize(("method", "family"), QUICK_CASES)
@pytest.mark.one_machine
def test_another_seed_is_another_training(two_seeds, method, family):
    runs, names = two_seeds(method, family)
    assert not names[0] & names[1]
    if learned_positions(method):
        contents = [{(runs.folder / "snapshots" / f"{n}.safetensors").read_bytes() for n in each} for each in names]
        assert not contents[0] & contents[1]


@pytest.mark.parametrize(("method", "family"), CASES)
@pytest.mark.one_machine
def test_the_parameter_count_is_what_is_trained(new_runs, method, family, monkeypatch):
    counts = []

    def count(lessons, backbone, bank):
        counts.extend(sum(p.numel() for p in lesson.learner.parameters().values()) for lesson in lessons)
        raise Cut

    monkeypatch.setattr(stage_module, "train_pack", count)
    runs = new_runs(family, "counted")
    packs = runs.packs(**changes(method, family))
    with pytest.raises(Cut) if learned_positions(method) else contextlib.nullcontext():
        runs.run(packs)
    config = KNOWN[family].config
    width = config.get("hidden_size") or config["d_model"]
    expected = packs[0].trials[0].method().parameter_count(target_shapes(KNOWN[family].family, config), width)
    assert counts == ([expected] if learned_positions(method) else [])


@pytest.mark.parametrize(("method", "family"), PACK_CASES)
def test_two_seeds_side_by_side_end_as_each_alone(two_seeds, new_runs, method, family):
    together, (alone, _) = new_runs(family, "together"), two_seeds(method, family)
    packs = together.packs(**gently(method, family), run__pack=["seed"])
    packable = packs[0].trials[0].method().packable
    assert [len(pack.members) for pack in packs] == ([2] if packable else [1, 1])
    together.run(packs)
    names = {path.name for path in (alone.folder / "snapshots").glob("*.safetensors")}
    assert names == {path.name for path in (together.folder / "snapshots").glob("*.safetensors")} != set()
    for name in names:
        found, expected = (load_file(runs.folder / "snapshots" / name) for runs in (together, alone))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-4, rtol=1e-2)
