"""What a stage reads, it declares: equal lineages must mean equal snapshots, to the byte.

Every setting is changed in turn. Where the lineage stays what it was, the stage declares that it does not read the
setting; it is learned with both values, and must leave the same bytes behind. So a setting that a method reads and has
left out of `stage_identity` fails here, by name.
"""

import dataclasses
import itertools

import pytest
from helpers.fields import TASKS, leaves, trial_of, variants
from helpers.methods import OPTIONS
from helpers.sweeps import tiny
from helpers.tiny import bank_of, learn, random_rows, task_data
from safetensors.torch import save

from latent_sweep.backbones.identity import backbone_identity
from latent_sweep.learn.trial import run_pack
from latent_sweep.methods import METHODS
from latent_sweep.methods.capabilities import tasks_learned
from latent_sweep.methods.latent_lora import LatentLora
from latent_sweep.methods.protocol import MethodContext
from latent_sweep.settings import Settings, as_written
from latent_sweep.store.folders import open_sweep
from latent_sweep.sweep.config import flatten, parse_sweep
from latent_sweep.sweep.groups import TrainingSettings
from latent_sweep.sweep.plan import expand, pack

ROWS = [[row | {"input_ids": row["prompt_ids"][1:]} for row in random_rows(6, seed)] for seed in range(len(TASKS))]
"""Training rows of each task: two batches, the second one smaller."""


def with_group(trial, name, group):
    settings = trial.settings.model_copy(update={name: group})
    return dataclasses.replace(trial, settings=settings, backbone=backbone_identity(settings.backbone))


# --- stages of a method ----------------------------------------------------------------------------------------------


class Lessons:
    """Learns single stages on a tiny backbone; the snapshots of earlier ones are learned once for each lineage."""

    def __init__(self, backbone, bank, folder):
        self.backbone, self.bank, self.folder = backbone, bank, folder
        self.known, self.number = {}, itertools.count()

    def snapshot(self, trial, position, longer=0, largest_rank=16):
        """Tensors that a stage leaves behind, in a trial with more tasks to come, or beside ones of larger ranks."""
        s, task = trial.settings, trial.tasks[position]
        method = type(trial.method())(s.method, MethodContext(self.backbone, self.bank, self.folder, largest_rank))
        reads = range(position if method.reads_history(position) else 0)
        history = [self.remembered(trial, earlier) for earlier in reads]
        data = task_data(ROWS[position], position, s.seed, len(trial.tasks) + longer, task.name)
        learner = method.begin_task(data, history)
        checkpoint = self.folder / f"checkpoint-{next(self.number)}"
        learn(learner, ROWS[position], self.backbone, self.bank, s.training, checkpoint, (s.seed, task.name))
        return learner.finish()

    def remembered(self, trial, position):
        lineage = trial.lineages()[position]
        if lineage not in self.known:
            self.known[lineage] = self.snapshot(trial, position)
        return self.known[lineage]

    def differs(self, base, position, trial, **context):
        """Whether the same stage leaves other bytes behind in this trial, or under these circumstances."""
        try:
            snapshot = self.snapshot(trial, position, **context)
        except RuntimeError:  # with a scale of zero there is nothing to learn
            return True
        return save(snapshot) != save(self.remembered(base, position))


@pytest.fixture
def trainings(llama, tmp_path):
    bank = bank_of(llama)
    yield Lessons(llama, bank, tmp_path)
    bank.remove()


def declared(trial, position):
    """Names of what a stage says that it reads."""
    content = trial.stage_contents()[position]
    return frozenset(flatten("", content["settings"])), bool(content["parents"])


def changed(trial, written):
    """The trial with one setting of its method changed, as written or once resolved; by path, with what is written."""
    kind, s = type(trial.method()), trial.settings

    def resolved(group):
        return kind.resolve(group, s.backbone.name, s.benchmark.name)

    found = {(path, resolved(group)): group for path, group in [*variants(resolved(written)), *variants(written)]}
    trials = [(path, group, with_group(trial, "method", complete)) for (path, complete), group in found.items()]
    return [change for change in trials if change[2].settings != s]


def starts(method, position):
    """Trials to change settings of, with their written settings, one for each set of settings that a stage declares.

    The settings as they are, and neighbours: without a penalty, say, how it is measured is left out.
    """
    base = trial_of(method)
    kind = as_written(type(base.settings.method))
    written = kind.model_validate({"name": method, **OPTIONS.get(method, {})})
    found = {}
    for _, group, trial in [("", written, base), *changed(base, written)]:
        found.setdefault(declared(trial, position), (group, trial))
    return list(found.values())


def undeclared(trainings, method, position):
    """Settings of a method that change what a stage leaves behind and not its lineage."""
    found = set()
    for written, start in starts(method, position):
        if not tasks_learned(start.method(), position, len(start.tasks)):
            continue
        lineage = start.lineages()[position]
        same = [(path, trial) for path, _, trial in changed(start, written) if trial.lineages()[position] == lineage]
        found |= {path for path, trial in same if trainings.differs(start, position, trial)}
    return found


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.one_machine
def test_a_method_reads_what_it_declares(method, position, trainings):
    assert undeclared(trainings, method, position) == set()


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_stage_reads_nothing_of_what_comes_later_or_runs_beside_it(method, position, trainings):
    trial = trial_of(method)
    if tasks_learned(trial.method(), position, 2) == tasks_learned(trial.method(), position, 5) != ():
        assert not trainings.differs(trial, position, trial, longer=3)
        assert not trainings.differs(trial, position, trial, largest_rank=32)


@pytest.mark.parametrize("method", METHODS)
def test_every_setting_of_a_method_is_tried(method):
    tried = {path for written, trial in starts(method, 1) for path, _, _ in changed(trial, written)}
    assert leaves(trial_of(method).settings.method) - tried == {"name"}


# --- everything beside the method ------------------------------------------------------------------------------------

UNTYPED = {
    "benchmark": {"data_dir": "elsewhere"},
    "backbone": {"name": "tiny-t5", "revision": "main", "tokenizer": "tiny-t5", "device": "cpu"},
    "router": {"epsilon": 0.5},
    "training": {"checkpoint_every": 1},
}
"""Other values of the settings whose types do not tell one, or not the one that is worth trying."""

ROUNDED = {"micro_batch_size"}
"""Settings of `training` that may change the last bits of a snapshot, as they say."""


def others(name, group):
    """Each field of a group with another value, where there is one."""
    found = dict(reversed(variants(group)))  # the first candidate of each
    written = {field: group.model_copy(update={field: value}) for field, value in UNTYPED.get(name, {}).items()}
    return {path: changed for path, changed in {**found, **written}.items() if path not in ROUNDED}


def together(group, changes, path=""):
    """One group with the fields `changes` as they are there, each in a group of its own."""
    values = {}
    for name in type(group).model_fields:
        value, here = getattr(group, name), f"{path}{name}"
        if isinstance(value, Settings):
            values[name] = together(value, changes, f"{here}.")
        elif here in changes:
            values[name] = changes[here]
    return group.model_copy(update=values)


def leaf(group, path):
    for name in path.split("."):
        group = getattr(group, name)
    return group


@pytest.fixture(scope="module")
def first_snapshot(tmp_path_factory):
    """Runs a trial on its own and gives the bytes of its first snapshot; a second time, what is known."""
    known = {}

    def run(trial):
        if trial.settings not in known:
            folder = tmp_path_factory.mktemp("run")
            (alone,) = pack([trial])
            run_pack(alone, open_sweep(folder / "tiny"), lambda event: None)
            known[trial.settings] = (folder / "snapshots" / f"{trial.lineages()[0]}.safetensors").read_bytes()
        return known[trial.settings]

    return run


def beside(name, select):
    """A trial, the same with everything in a group changed that its first lineage does not hold, and what that is."""
    changes = {
        "trial__benchmark": {"name": "builtin", "tasks": TASKS[:1], "train_per_task": 12, "test_per_task": 2},
        "trial__training": {"learning_rate": 0.05, "epochs": 1, "batch_size": 4, "select": select},
        "trial__router": {"components": 2},
    }
    (base,) = expand(parse_sweep(tiny(**changes, search={}), "test"))
    group = getattr(base.settings, name)
    free = {
        path: leaf(other, path)
        for path, other in others(name, group).items()
        if with_group(base, name, other).lineages() == base.lineages()
    }
    trial = with_group(base, name, together(group, free))
    assert free and trial.lineages() == base.lineages()
    return base, trial, free


@pytest.mark.parametrize("name", ["training", "benchmark", "router", "backbone", "evaluation"])
@pytest.mark.parametrize("select", ["last", "best_validation"])
def test_what_no_lineage_holds_changes_no_snapshot(name, select, first_snapshot):
    base, trial, free = beside(name, select)
    same = first_snapshot(trial) == first_snapshot(base)
    assert same, f"training reads one of {', '.join(free)}, and no lineage holds it"


# --- this test can fail ----------------------------------------------------------------------------------------------


class WithoutAlpha(LatentLora):
    """Leaves out what its scale comes from."""

    def stage_identity(self, position):
        return {name: value for name, value in super().stage_identity(position).items() if name != "scale"}


class WithoutNorm(LatentLora):
    """Leaves out how the penalty is measured."""

    def stage_identity(self, position):
        return {name: value for name, value in super().stage_identity(position).items() if name != "ortho"}


class LooksAhead(LatentLora):
    """Learns something else in a longer trial."""

    def begin_task(self, task, history):
        return super().begin_task(
            dataclasses.replace(task, generator=lambda p: task.generator(f"{p}{task.n_tasks}")), history
        )


@pytest.fixture
def registered(monkeypatch):
    def register(kind):
        monkeypatch.setitem(METHODS, "latent_lora", f"{__name__}:{kind.__name__}")

    return register


def test_a_setting_that_is_left_out_is_found(registered, trainings):
    registered(WithoutAlpha)
    assert undeclared(trainings, "latent_lora", 0) == {"alpha", "scale"}


def test_a_setting_is_found_only_where_it_is_read(registered, trainings):
    registered(WithoutNorm)
    assert undeclared(trainings, "latent_lora", 0) == set()
    assert undeclared(trainings, "latent_lora", 1) == {
        "ortho.include_scale",
        "ortho.reduce",
        "ortho.norm",
        "ortho.normalise",
    }


def test_a_setting_of_the_training_that_is_left_out_is_found(monkeypatch, first_snapshot):
    whole = TrainingSettings.training_identity
    monkeypatch.setattr(TrainingSettings, "training_identity", lambda s: whole(s) | {"gradient_clip": None})
    base, trial, free = beside("training", "last")
    assert "gradient_clip" in free
    assert first_snapshot(trial) != first_snapshot(base)


def test_looking_ahead_is_found(registered, trainings):
    registered(LooksAhead)
    trial = trial_of("latent_lora")
    assert trainings.differs(trial, 0, trial, longer=3)
