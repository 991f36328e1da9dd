from pathlib import Path

import pytest
import torch
from helpers.sweeps import tiny, write, write_benchmark

from latent_sweep.cli.main import main
from latent_sweep.data.schema import DATA_VARIABLE
from latent_sweep.settings import content_hash
from latent_sweep.storage.snapshots import Snapshot, SnapshotStorage
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.explain import explain_plan
from latent_sweep.sweep.plan import expand

NOWHERE = Path("nowhere")
THREE = {"trial__benchmark__tasks": ["mood", "ticket", "past"]}
TURNED = {"trial__benchmark__tasks": ["mood", "topic"]}
"""Two tasks that the other order learns the other way round."""
LAMBDAS = [0.0, 0.01, 0.1]


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    """Whatever data the machine has, plans here see none of it."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


def explained(storage=NOWHERE, search=None, **changes):
    """The explanation of a sweep over three tasks, blocks of lines without their alignment."""
    sweep = parse_sweep(tiny(**THREE | changes, search=search or {}), "sweep.yaml")
    text = explain_plan(sweep, expand(sweep), SnapshotStorage(Storage(storage)))
    return [[" ".join(line.split()) for line in block.splitlines()] for block in text.split("\n\n")]


def keep(storage, which, **changes):
    """Put stages of a sweep with one trial into the store, as learning them does."""
    (trial,) = expand(parse_sweep(tiny(**THREE | changes, search={}), "sweep.yaml"))
    for content in [trial.stage_contents()[position] for position in which]:
        facts = {"task": content["tasks"][0], "stage": content}
        SnapshotStorage(Storage(storage)).append(Snapshot(content_hash(content), {"R": torch.zeros(1)}, facts))


def test_a_grid_in_three_groups():
    search = {"seed": [0, 1], "method.ortho_lambda": LAMBDAS, "router.components": [1, 2, 4]}
    assert explained(search=search) == [
        ["which stages are shared", "router.components 3 values cost no training"],
        [
            "task 1: 2 stages for 18 trials, to train",
            "seed not shared: 0, 1",
            "method.ortho_lambda shared by all 3 values, not read",
        ],
        [
            "tasks 2-3, method.ortho_lambda=0.0: 4 stages for 6 trials, to train, reads no earlier tasks",
            "seed not shared: 0, 1",
            "method.ortho_lambda not shared: not read (others 0.01, 0.1)",
        ],
        [
            "tasks 2-3: 8 stages for 12 trials, to train, reads the earlier tasks",
            "seed not shared: 0, 1",
            "method.ortho_lambda not shared: 0.01, 0.1 (others not read)",
        ],
    ]


def test_methods_whose_settings_are_equal_are_kept_apart_by_their_names():
    blocks = explained(search={"method.name": ["seq_lora", "lwf"]}, trial__method={"name": "seq_lora", "rank": 4})
    assert [lines for lines in blocks[1:] if lines[0].startswith("task 1")] == [
        ["task 1: 2 stages for 2 trials, to train", "method.name not shared: seq_lora, lwf"]
    ]


def test_every_stage_stands_in_one_group():
    search = {"seed": [0, 1], "method.ortho_lambda": LAMBDAS, "method.train_active": ["current", "sum"]}
    _, *groups = explained(search=search)
    sweep = parse_sweep(tiny(**THREE, search=search), "sweep.yaml")
    distinct = {lineage for trial in expand(sweep) for lineage in trial.lineages()}
    counts = [int(title.partition(": ")[2].split()[0]) for title, *_ in groups]
    assert sum(counts) == len(distinct)


def test_a_field_other_than_the_axis_is_named():
    _, first, _ = explained(search={"method.alpha": [16.0, 32.0]})
    assert first[1:] == ["method.alpha not shared: method.scale 1.0, 2.0"]
    _, first, _ = explained(search={"backbone.name": ["tiny-llama", "tiny-t5"]})
    assert "backbone.name not shared: backbone.weights.family llama, t5" in first[1]


def test_an_order_separates_stages_that_read_earlier_tasks():
    _, first, later = explained(search={"benchmark.order": [1, 2]}, **TURNED)
    assert first[1:] == later[1:] == ["benchmark.order not shared: the tasks before it"]


def test_without_a_penalty_an_order_costs_no_training():
    head, group = explained(search={"benchmark.order": [1, 2]}, trial__method__ortho_lambda=0.0, **TURNED)
    assert head[1:] == ["benchmark.order 2 values cost no training"]
    assert group == ["tasks 1-2: 2 stages for 2 trials, to train, reads no earlier tasks"]


def test_a_setting_that_only_earlier_tasks_read_is_named():
    # the start of the first R is drawn; later tasks start from the one before and read no R_std of their own
    _, first, later = explained(search={"method.R_std": [1e-5, 1e-3]}, trial__method__R_init="prev")
    assert first == ["task 1: 2 stages for 2 trials, to train", "method.R_std not shared: 1e-05, 0.001"]
    assert later == [
        "tasks 2-3: 4 stages for 2 trials, to train, reads the earlier tasks",
        "method.R_std not shared: method.R_std of the tasks before it",
    ]


def test_some_values_may_share_what_others_do_not():
    _, first, *_ = explained(search={"method.R_init": ["normal", "prev", "zero"]})
    # at the first task there is no earlier R to start from
    assert first == [
        "task 1: 1 stage for 2 trials, to train",
        "method.R_init shared by 2 of 3 values, not shared: normal (others zero)",
    ]


def test_random_draws_are_one_axis():
    search = {"training.learning_rate": {"uniform": [0.1, 0.2]}, "router.temperature": {"uniform": [1.0, 2.0]}}
    _, first, _ = explained(search=search, run__search__num_samples=2)
    assert first[0] == "task 1: 2 stages for 2 trials, to train"
    assert first[1].startswith("the random draws not shared: training.learning_rate 0.1")
    assert "temperature" not in first[1]


def test_long_lists_are_cut():
    _, first, _ = explained(search={"seed": list(range(9))})
    assert first[1] == "seed not shared: 0, 1, 2, 3, 4, 5, 3 more"


# --- compared with the storage ----------------------------------------------------------------------------------------


def test_what_is_stored_is_no_longer_to_learn(tmp_path):
    keep(tmp_path, [0, 1])
    _, *groups = explained(tmp_path)
    assert [title for title, *_ in groups] == [
        "task 1: 1 stage for 1 trial, stored",
        "task 2: 1 stage for 1 trial, stored, reads the earlier tasks",
        "task 3: 1 stage for 1 trial, to train, reads the earlier tasks",
    ]


def test_a_change_of_the_sweep_file_is_compared_with_the_nearest_stage(tmp_path):
    keep(tmp_path, [0, 1], trial__training__epochs=7, trial__training__batch_size=8)
    keep(tmp_path, [0, 1], trial__training__epochs=4)
    _, first, second, third = explained(tmp_path)
    wanted = "the storage has the task with other settings: training.epochs 5 (others 4)"
    assert first[1] == second[1] == wanted
    assert third == ["task 3: 1 stage for 1 trial, to train, reads the earlier tasks"]


def test_changed_training_rows_are_named(tmp_path):
    own = {"trial__benchmark": {"name": str(write_benchmark(tmp_path / "own"))}, "trial__benchmark__tasks": None}
    keep(tmp_path, [0, 1], **own)
    rows = tmp_path / "own" / "right" / "train.json"
    rows.write_text(rows.read_text().replace("row 3", "line 3"))
    _, first, second = explained(tmp_path, **own)
    assert first == ["task 1: 1 stage for 1 trial, stored"]
    assert second[1:] == ["the storage has the task with other settings: training rows"]


def test_an_earlier_stage_with_other_settings_is_looked_into(tmp_path):
    keep(tmp_path, [0, 1, 2], trial__method__R_init="prev", trial__method__R_std=1e-3)
    _, _, later = explained(tmp_path, trial__method__R_init="prev", trial__method__R_std=1e-5)
    assert later[1:] == ["the storage has the task with other settings: method.R_std of the tasks before it"]


def test_a_snapshot_without_its_content_is_ignored(tmp_path):
    store = SnapshotStorage(Storage(tmp_path))
    store.append(Snapshot("0" * 16, {"R": torch.zeros(1)}, {"task": "mood"}))
    (store.folder / "1.json").write_text("{")
    assert explained(tmp_path) == explained(NOWHERE)


# --- the command -----------------------------------------------------------------------------------------------------


def test_plan_explains_when_asked(tmp_path, capsys):
    path = write(tmp_path, tiny())
    assert main(["plan", path]) == 0
    plain = capsys.readouterr().out
    assert main(["plan", path, "--explain"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(plain)
    assert printed.removeprefix(plain).splitlines()[:3] == [
        "",
        "which stages are shared",
        "  router.epsilon  2 values cost no training",
    ]


def test_without_data_there_is_nothing_to_explain(tmp_path, capsys):
    path = write(tmp_path, tiny(trial__benchmark={"name": "superni"}, search={}))
    assert main(["plan", path, "--explain"]) == 2
    assert "no data folder is set" in capsys.readouterr().err
