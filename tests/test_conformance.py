"""What every method must keep, on every family: whole packs of the built-in benchmark, a few rows of three tasks."""

import itertools
import math
import shutil

import pytest
from conftest import FAMILIES, Runs, learns
from safetensors.torch import load_file

from latent_sweep import trial as trial_module
from latent_sweep.backbones import KNOWN, BackboneSettings, load_backbone, target_shapes
from latent_sweep.methods import METHODS
from latent_sweep.trial import StageDone, Step

TASKS = ["mood", "ticket", "past"]
OPTIONS = {"latent_lora": {"rank": 8, "alpha": 32.0, "ortho_lambda": 1e-3}}
"""Settings of a method for the tiny backbones, where its defaults do not fit them."""

CASES = [pytest.param(method, family, id=f"{method} on {family}") for method in METHODS for family in FAMILIES]


class Cut(BaseException):
    """The worker is lost."""


def changes(method, family, seed=0):
    return {
        "search": {},
        "trial__seed": seed,
        "trial__method": {"name": method, **OPTIONS.get(method, {})},
        "trial__backbone__name": family,
        "trial__benchmark": {"name": "builtin", "tasks": TASKS, "train_per_task": 8, "test_per_task": 3},
        "trial__training": {"learning_rate": 0.05, "epochs": 2, "batch_size": 4, "checkpoint_every": 2},
        "trial__router": {"components": 2},
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Uninterrupted runs by method and family: what they leave, every event, and the stored files at every stage."""
    known = {}

    def run(method, family, seed=0):
        key = (method, family, seed)
        if key not in known:
            runs = Runs(tmp_path_factory.mktemp(f"{method}-{family}-{seed}") / "runs")
            events, stages = [], []

            def on(event):
                events.append(event)
                if isinstance(event, StageDone):
                    stages.append(runs.files())

            runs.run(runs.packs(**changes(*key)), on)
            known[key] = (runs, events, stages)
        return known[key]

    return run


@pytest.mark.parametrize(("method", "family"), CASES)
def test_loss_terms_are_named_and_finite(finished, method, family):
    _, events, _ = finished(method, family)
    steps = [event for event in events if learns(event)]
    places = [(step.position, step.step) for step in steps]
    assert places == [(task, step) for task in range(3) for step in (1, 2, 3, 4)]
    for step in steps:
        assert "task" in step.losses
        assert all(isinstance(name, str) and math.isfinite(loss) for name, loss in step.losses.items())


@pytest.mark.parametrize(("method", "family"), CASES)
def test_every_stage_adds_a_row_of_scores(finished, method, family):
    _, events, _ = finished(method, family)
    stages = [event for event in events if isinstance(event, StageDone)]
    assert [stage.tasks_seen for stage in stages] == [1, 2, 3]
    for seen, stage in enumerate(stages, start=1):
        (matrix,) = stage.matrices
        assert matrix.tasks == tuple(TASKS)
        assert [len(row) for row in matrix.rows] == list(range(1, seen + 1))
        assert all(0 <= score <= 1 for row in matrix.rows for score in row)


@pytest.mark.parametrize(("method", "family"), CASES)
def test_earlier_snapshots_never_change(finished, method, family):
    _, _, stages = finished(method, family)
    snapshots = [{name: content for name, content in files.items() if "snapshots/" in name} for files in stages]
    assert [len(files) for files in snapshots] == [2, 4, 6]
    for earlier, later in itertools.pairwise(snapshots):
        assert earlier.items() <= later.items()


@pytest.mark.parametrize(("method", "family"), CASES)
def test_the_backbone_stays_bit_for_bit(finished, method, family, tmp_path, monkeypatch):
    """The very backbone that was trained on and answered with, against one that was only loaded."""
    used = []

    def remember(settings):
        used.append(load_backbone(settings))
        return used[-1]

    monkeypatch.setattr(trial_module, "load_backbone", remember)
    runs = Runs(tmp_path)
    runs.run(runs.packs(**changes(method, family)))
    (backbone,) = used
    fresh = load_backbone(BackboneSettings(name=family, dtype="float32")).model.state_dict()
    after = backbone.model.state_dict()
    assert after.keys() == fresh.keys()
    assert all(after[name].equal(weight) for name, weight in fresh.items())
    assert not backbone.model.training
    assert all(p.grad is None and not p.requires_grad for p in backbone.model.parameters())
    assert runs.files() == finished(method, family)[0].files(), "and the same seed repeats, byte for byte"


CUTS = [
    # what is under way, task, step; and the optimizer step that comes first when the run goes on
    pytest.param("learning", 0, 3, (0, 3), id="inside the first task"),
    pytest.param("learning", 1, 1, (1, 1), id="at the second task's first step"),
    pytest.param("learning", 2, 4, (2, 3), id="at the last step"),
    pytest.param("scoring", 1, 1, (2, 1), id="while the second row is scored"),
    pytest.param("done", 0, None, (1, 1), id="after the first task"),
    pytest.param("done", 1, None, (2, 1), id="after the second task"),
    pytest.param("done", 2, None, None, id="after the last task"),
]


@pytest.mark.parametrize(("doing", "task", "step", "goes_on_with"), CUTS)
@pytest.mark.parametrize(("method", "family"), CASES)
def test_cut_anywhere_and_run_again_ends_the_same(finished, method, family, tmp_path, doing, task, step, goes_on_with):
    def lose(event):
        if isinstance(event, Step):
            here = (event.doing, event.position, event.step)
        else:
            here = ("done", event.tasks_seen - 1, None)
        if here == (doing, task, step):
            raise Cut

    runs = Runs(tmp_path)
    with pytest.raises(Cut):
        runs.run(runs.packs(**changes(method, family)), lose)
    steps = []
    runs.run(runs.packs(**changes(method, family)), lambda e: steps.append(e) if learns(e) else None)
    assert runs.files() == finished(method, family)[0].files()
    first = (steps[0].position, steps[0].step) if steps else None
    assert first == goes_on_with, "what was done is not done again"
    assert not list((tmp_path / "checkpoints").glob("*"))


@pytest.mark.parametrize(("method", "family"), CASES)
def test_a_finished_run_has_nothing_to_do(finished, method, family, tmp_path):
    runs, _, _ = finished(method, family)
    copy = Runs(tmp_path / "copy")
    shutil.copytree(runs.folder, copy.folder)
    events = []
    copy.run(copy.packs(**changes(method, family)), events.append)
    assert events == []


@pytest.mark.parametrize(("method", "family"), CASES)
def test_another_seed_is_another_training(finished, method, family):
    first, second = (finished(method, family, seed)[0] for seed in (0, 1))
    names = [{path.name for path in (runs.folder / "snapshots").glob("*.safetensors")} for runs in (first, second)]
    assert not names[0] & names[1]
    contents = [
        {path.read_bytes() for path in (runs.folder / "snapshots").glob("*.safetensors")} for runs in (first, second)
    ]
    assert not contents[0] & contents[1]


@pytest.mark.parametrize(("method", "family"), CASES)
def test_the_parameter_count_is_what_a_snapshot_holds(finished, method, family):
    runs, _, _ = finished(method, family)
    (pack,) = runs.packs(**changes(method, family))
    shapes = target_shapes(KNOWN[family].family, KNOWN[family].config)
    count = pack.trials[0].method().parameter_count(shapes)
    for path in (runs.folder / "snapshots").glob("*.safetensors"):
        assert sum(tensor.numel() for tensor in load_file(path).values()) == count
