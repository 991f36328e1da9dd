"""The benchmark: it runs, its arithmetic is right, and what it compares with learns as well. No timing is tested."""

import gc
import json
import math
import pkgutil
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from helpers.patience import PATIENCE

from latent_sweep.bench import run as bench_run
from latent_sweep.bench import workbench
from latent_sweep.bench.answers import compared
from latent_sweep.bench.rows import Reading, Target, ratio, take_turns
from latent_sweep.bench.workbench import Subject, Workbench
from latent_sweep.cli.main import main
from latent_sweep.data.schema import load_benchmark
from latent_sweep.sweep.profile import Profile, profile_path, read_profile, write_profile

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.*:FutureWarning",  # transformers' own, of its own attribute
)

PROFILE = Profile("tiny-llama", "cpu", "float32", 120.5, 3.25, "2026-01-02T03:04:05+00:00", {"torch": "2.13.0"})


@pytest.fixture
def without_data(monkeypatch):
    monkeypatch.delenv("LATENT_SWEEP_DATA", raising=False)


@pytest.fixture
def quickly(monkeypatch):
    """Measure as little as `--quick` does, and keep what was measured."""
    monkeypatch.setattr(workbench, "CPU", workbench.QUICK)


RATES = {bench_run.TRAINING_RATE: "step", bench_run.GENERATION_RATE: "generate"}


def measuring(monkeypatch, **others):
    """Have the two parts that a profile needs measure nothing, and others be what they are here."""
    parts = {part: lambda bench, name=name: [Reading(name, 7.0, "tokens/s")] for name, part in RATES.items()}
    monkeypatch.setattr(bench_run, "PARTS", {"step": parts["step"]} | others | {"generate": parts["generate"]})


def bench(capsys, folder, *arguments, quick=True):
    """The report of `latent-sweep bench --quick --json` on a tiny backbone, and what went to standard error."""
    common = ["--backbone", "tiny-llama", "--device", "cpu", *["--quick"] * quick, "--json", "--storage", str(folder)]
    assert main(["bench", *common, *arguments]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def rows_of(report):
    return {row["name"]: row for table in report["tables"] for row in table["rows"]}


# --- the profile -----------------------------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = profile_path(tmp_path, "tiny-llama", "float32", "cpu")
    assert read_profile(path) is None
    write_profile(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert path == tmp_path / "profiles" / "tiny-llama-float32-cpu.json"


def test_profiles_of_hub_names_lie_in_the_same_folder(tmp_path):
    path = profile_path(tmp_path, "meta-llama/Llama-2-7b-hf", "bfloat16", "cuda")
    assert path.parent == tmp_path / "profiles"
    assert path.name == "meta-llama_Llama-2-7b-hf-bfloat16-cuda.json"


@pytest.mark.parametrize("content", ["{", "[]", '{"backbone": "x"}'])
def test_what_is_no_profile_is_named(tmp_path, capsys, content):
    from latent_sweep.errors import StoreError

    path = tmp_path / "profile.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(StoreError, match=r"profile\.json is not a profile.*delete it"):
        read_profile(path)


def test_reading_a_profile_needs_no_torch():
    script = "import sys, latent_sweep.bench; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE, check=False).returncode == 0


def test_a_part_that_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    """The others have taken their minutes, and the profile needs two of them."""

    def fails(bench):
        """Fail."""
        raise RuntimeError("no port at https://bob:hunter22@host")

    measuring(monkeypatch, sweep=fails)
    arguments = ["bench", "--backbone", "tiny-llama", "--only", "step", "sweep", "generate", "--storage", str(tmp_path)]
    assert main(arguments) == 1
    told = capsys.readouterr()
    assert "FAILED: RuntimeError: no port at https://***@host" in told.out and "hunter22" not in told.err
    assert [line.split()[-2] for line in told.out.splitlines() if "tokens/s" in line] == ["7", "7"]
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 1


@pytest.mark.parametrize("quick", [True, False])
def test_a_quick_look_says_so_and_leaves_the_profile_alone(quick, tmp_path, monkeypatch, capsys):
    measuring(monkeypatch)
    write_profile(profile_path(tmp_path, "tiny-llama", "float32", "cpu"), PROFILE)
    arguments = ["bench", "--backbone", "tiny-llama", "--device", "cpu", "--storage", str(tmp_path)]
    arguments += ["--quick"] * quick
    assert main(arguments) == 0
    assert ("quick: little of everything" in capsys.readouterr().out) is quick
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quick"] is quick
    profile = read_profile(profile_path(tmp_path, "tiny-llama", "float32", "cpu"))
    assert profile.tokens_per_second_train == (PROFILE.tokens_per_second_train if quick else 7.0)


def test_an_interrupted_measurement_leaves_what_it_has_found(tmp_path, monkeypatch, capsys):
    def interrupted(bench):
        """Be interrupted."""
        raise KeyboardInterrupt

    measuring(monkeypatch)
    monkeypatch.setattr(bench_run, "PARTS", bench_run.PARTS | {"store": interrupted})
    assert main(["bench", "--backbone", "tiny-llama", "--device", "cpu", "--storage", str(tmp_path), "--json"]) == 130
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["interrupted"] and [table["part"] for table in report["tables"]] == ["step", "generate"]
    assert told.err.endswith("interrupted\n"), "nothing goes on from here"
    assert read_profile(profile_path(tmp_path, "tiny-llama", "float32", "cpu")).tokens_per_second_train == 7.0


def test_a_storage_that_cannot_be_one_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    measured = []
    measuring(monkeypatch, sweep=lambda bench: measured.append(bench) or [])
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below", "s3://"):
        assert main(["bench", "--backbone", "tiny-llama", "--device", "cpu", "--storage", str(place)]) == 2
        assert "error: " in capsys.readouterr().err
    assert not measured


def test_a_profile_that_cannot_be_written_costs_nothing_of_the_report(tmp_path, monkeypatch, capsys):
    measuring(monkeypatch)
    (tmp_path / "profiles").touch()  # where its folder would be
    assert main(["bench", "--backbone", "tiny-llama", "--device", "cpu", "--storage", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.count("tokens/s") == 2
    assert "no profile for `latent-sweep plan`: " in told.err


def test_what_no_part_can_measure_is_refused_once(tmp_path, capsys):
    arguments = ["--backbone", str(tmp_path / "none"), "--only", "step", "generate", "--storage", str(tmp_path)]
    assert main(["bench", *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.count("error: ") == 1 and "Traceback" not in told.err and "FAILED" not in told.out


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_is_the_median_of_its_turns_between_their_quartiles():
    turns = [5.0, 1.0, 4.0, 2.0, 9.0]
    row = Reading.of("x", turns, "ms")
    assert row.value == np.median(turns)
    assert row.quartiles == pytest.approx(tuple(np.percentile(turns, [25, 75])))
    assert Reading.of("x", [3.0], "ms") == Reading("x", 3.0, "ms")


def test_a_ratio_is_taken_turn_by_turn():
    # the machine was ten times slower in the second turn; the two never differed but by a factor of two
    row = ratio("x", [2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    assert (row.value, row.quartiles, row.unit) == (2.0, (2.0, 2.0), "x")


@pytest.mark.parametrize(
    ("target", "value", "reached"),
    [(Target(1.05), 1.05, True), (Target(1.05), 1.06, False), (Target(5, at_most=False), 4.9, False)],
)
def test_a_target_is_reached_from_its_own_side(target, value, reached):
    row = Reading("x", value, "x", target=target)
    assert row.reached is reached
    assert row.content()["target"] == str(target)
    assert Reading("x", value, "x").reached is None


def test_contenders_take_turns():
    calls = []

    def contender(name):
        def measure():
            calls.append(name)
            return float(len(calls))

        return measure

    assert take_turns({"a": contender("a"), "b": contender("b")}, 2) == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert calls == ["a", "b", "b", "a"]


def test_packs_end_where_memory_does():
    import torch

    from latent_sweep.bench.steps import fitting

    def measure(members):
        if members > 3:
            raise torch.cuda.OutOfMemoryError("full")
        return 1.0

    assert list(fitting((1, 2), measure)) == [1, 2]
    assert list(fitting((1, 2, 4, 8), measure)) == [1, 2]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="full"):
        fitting((4, 8), measure)


# --- what evaluation would generate ----------------------------------------------------------------------------------


def one_hot(rows, task, seen):
    weights = np.zeros((rows, seen))
    weights[:, task] = 1.0
    return weights


def test_with_a_sure_router_only_the_newest_task_is_generated():
    from latent_sweep.bench.answers import generated_share

    counts = [5, 3, 4]
    weights = [[one_hot(counts[task], task, stage + 1) for task in range(stage + 1)] for stage in range(3)]
    share = generated_share(weights, [[1] * count for count in counts], batch_size=2)
    assert share == pytest.approx(sum(counts) / (5 + 5 + 3 + 5 + 3 + 4))


def test_one_changed_weight_generates_its_batch_again():
    from latent_sweep.bench.answers import generated_share

    later = one_hot(5, 0, 2)
    later[3] = [0.5, 0.5]
    # rows sorted by length are 4 3 | 2 1 | 0: row 3 shares its batch with row 4
    share = generated_share([[one_hot(5, 0, 1)], [later, one_hot(2, 1, 2)]], [[5, 4, 3, 2, 1], [1, 1]], batch_size=2)
    assert share == pytest.approx((5 + 2 + 2) / (5 + 5 + 2))


def test_moving_every_weight_generates_everything():
    from latent_sweep.bench.answers import generated_share

    weights = [[np.full((3, 1), 1.0)], [np.full((3, 2), 0.5), np.full((2, 2), 0.5)]]
    assert generated_share(weights, [[1, 1, 1], [1, 1]], batch_size=4) == 1.0


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quickly", "without_data")
def test_the_parts_of_one_process_run_and_leave_a_profile(tmp_path, capsys):
    parts = ["step", "packs", "history", "generate", "evaluate"]
    report, told = bench(capsys, tmp_path, "--only", *parts, quick=False)
    assert [table["part"] for table in report["tables"]] == ["step", "packs", "history", "generate", "evaluate"]
    assert report["benchmark"] == "builtin" and "a token for every byte" in report["benchmark_note"]
    assert {"peft", "torch", "transformers"} <= set(report["versions"])
    rows = rows_of(report)
    assert all(math.isfinite(row["value"]) for row in rows.values())
    assert all(row["value"] > 0 for row in rows.values() if row["unit"] != "share")
    assert {"latent / bare backbone", "latent / peft + Trainer", "15 earlier tasks / 1"} <= set(rows)
    assert all(row["reached"] in (True, False) for row in rows.values() if row["target"])
    # the same function, decoded by us and by transformers, and by us from a cache and anew
    equal = [row["value"] for name, row in rows.items() if name.startswith("equal answers")]
    assert equal == [1.0, 1.0, 1.0]
    assert rows["generations run there"]["value"] == pytest.approx(8 / 12)
    profile = read_profile(profile_path(tmp_path, "tiny-llama", "float32", "cpu"))
    assert profile is not None
    assert profile.tokens_per_second_train == rows["latent: tokens trained"]["value"]
    assert profile.rows_per_second_generate == rows["ours, trained adapter: rows answered"]["value"]
    assert "history (float32)" in told


def test_a_t5_backbone_and_a_second_type_for_the_step(tmp_path, capsys, without_data):
    types = ["--dtype", "float32", "bfloat16"]
    report, _ = bench(capsys, tmp_path, "--backbone", "tiny-t5", "--only", "step", "generate", *types)
    tables = [(table["part"], table["dtype"]) for table in report["tables"]]
    assert tables == [("step", "float32"), ("generate", "float32"), ("step", "bfloat16")]
    limits = [row["target"] for table in report["tables"] for row in table["rows"] if "/ bare" in row["name"]]
    assert limits == ["<= 1.05", "<= 1.05", "<= 1.08", "<= 1.08"]
    assert rows_of(report)["equal answers, trained adapter"]["value"] == 1.0


def test_decoding_is_compared_where_both_wrote_the_same():
    seconds = {"ours": [1.0, 1.0], "generate()": [2.0, 2.0]}
    equal, other = (compared("trained", seconds, ["a", "b"], theirs) for theirs in (["a", "b"], ["a", ""]))
    assert [(row.name, row.value) for row in equal] == [
        ("ours / generate(), trained", 0.5),
        ("equal answers, trained", 1.0),
    ]
    assert [(row.name, row.value) for row in other] == [("equal answers, trained", 0.5)]


def test_the_table_for_people_says_what_was_reached():
    from latent_sweep.bench.rows import Report, Table

    rows = [Reading.of("ours / theirs", [0.5, 0.6], "x", Target(0.56)), Reading("left out", 1234.5, "ms", note="once")]
    report = Report(
        "b", "cpu", "builtin", "why", "now", {"torch": "2"}, {"cpus": 2}, [Table("step", "float32", "?", rows)]
    )
    text = report.text()
    assert "step (float32): ?" in text and "why" in text
    assert "0.55 x" in text and "[0.525, 0.575]" in text and "<= 0.56  reached" in text
    assert "1234 ms" in text and "once" in text


def test_without_superni_the_built_in_benchmark_stands_in_and_says_why(without_data):
    from latent_sweep.bench.run import benchmark_for

    name, why = benchmark_for("smollm2-135m")
    assert name == "builtin" and "SuperNI is not at hand" in why and "LATENT_SWEEP_DATA" in why


def test_an_unknown_part_is_refused_with_the_nearest(capsys):
    assert main(["bench", "--only", "stepp"]) == 2
    assert "--only: found 'stepp'; did you mean 'step'?" in capsys.readouterr().err


def test_what_is_kept_is_timed_where_it_is_kept_and_nothing_of_it_stays(capsys, tmp_path):
    report, _ = bench(capsys, tmp_path, "--only", "store")
    (table,) = report["tables"]
    assert {row["unit"] for row in table["rows"]} == {"ms"}
    assert all(row["value"] > 0 for row in table["rows"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_parts_that_take_long_run_only_where_they_are_named(capsys):
    from latent_sweep.bench.run import ON_REQUEST, PARTS

    assert "methods" in ON_REQUEST and not set(PARTS) & set(ON_REQUEST)
    assert main(["bench", "--only", "method"]) == 2
    assert "did you mean 'methods'?" in capsys.readouterr().err


def test_backbones_with_random_weights_are_measured(tmp_path, capsys):
    report, _ = bench(capsys, tmp_path, "--backbone", "random:tiny-llama", "--only", "history", "packs")
    assert report["benchmark"] == "builtin" and "a token for every byte" in report["benchmark_note"]
    assert {"15 earlier tasks / 1", "pack of 2 / pack of 1"} <= set(rows_of(report))


@pytest.mark.filterwarnings("ignore:.*pseudo-samples.*")
def test_every_method_is_measured_early_and_late(tmp_path, capsys, without_data):
    from latent_sweep.methods import METHODS

    report, _ = bench(capsys, tmp_path, "--only", "methods")
    rows = rows_of(report)
    assert all(math.isfinite(row["value"]) for row in rows.values())
    for stage in (2, 3):
        learning = {name for name in METHODS if f"{name}: step at task {stage} / seq_lora's at 2" in rows}
        assert learning == set(METHODS) - {"zero_shot", "joint_lora"}
        assert {f"{name}: answers at task {stage} / seq_lora's at 2" for name in METHODS} <= set(rows)
        assert {f"{name}: outside steps, task {stage}" for name in learning} <= set(rows)
    assert rows["seq_lora: step at task 2 / seq_lora's at 2"]["value"] == 1.0
    # two layers, query (32 x 32) and value (16 x 32): R is 16 x 16 four times, a pair of rank 8 has 8 (m + n)
    trained = {name: rows[f"{name}: trained for a task"]["value"] for name in METHODS}
    assert trained["latent_lora"] == 4 * 16**2 and trained["seq_lora"] == 2 * 8 * (32 + 32 + 16 + 32)
    assert trained["zero_shot"] == 0 and trained["lfpt5"] == 20 * 32
    # four bytes a number, and the Fisher information beside the pair; the rest is names and shapes
    stored = {name: 1024 * rows[f"{name}: stored for task 3"]["value"] for name in METHODS}
    assert 0 < stored["latent_lora"] - 4 * trained["latent_lora"] < 400
    assert 0 < stored["ewc"] - 8 * trained["ewc"] < 600
    # one gate weight for each prompt; every other method has one blend for all
    assert rows["gain_lora: answers at task 3 / seq_lora's at 2"]["note"] == "a blend for each row"
    assert rows["inf_lora: answers at task 3 / seq_lora's at 2"]["note"] == "one blend for all rows"


def test_help_names_every_part(capsys):
    from latent_sweep.bench.run import ON_REQUEST, PARTS

    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    *others, last = ON_REQUEST
    assert " ".join(PARTS) in printed
    assert f"{', '.join(others)} and {last}" in printed


ALONE = """
import socket, sys
for name in ("ray", "mlflow", "deepspeed"):
    sys.modules[name] = None  # as where it is not installed
def refuse(*arguments):
    raise OSError("no network")
socket.socket.connect = refuse
from latent_sweep.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_steps_packs_and_answers_need_neither_cluster_nor_tracker_nor_network(tmp_path, without_data):
    parts = ["--only", "step", "packs", "generate", "--quick", "--json"]
    bench = ["bench", "--backbone", "tiny-llama", "--device", "cpu", "--storage", str(tmp_path), *parts]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *bench], timeout=PATIENCE, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [table["part"] for table in json.loads(done.stdout)["tables"]] == ["step", "packs", "generate"]


def test_without_peft_the_extra_is_named(capsys, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    assert main(["bench", "--backbone", "tiny-llama"]) == 2
    message = capsys.readouterr().err
    assert "pip install 'latent-sweep[bench]'" in message and "--only packs history evaluate" in message


# --- the usual way ---------------------------------------------------------------------------------------------------


@pytest.fixture
def usual(tmp_path, without_data):
    """The usual way's configuration of two built-in tasks on a tiny backbone."""
    from latent_sweep.bench.workbench import Subject, Workbench, first_trial

    subject = Subject("tiny-llama", "float32", "cpu", "builtin", str(tmp_path), True)
    workbench = Workbench(subject)
    benchmark = {"name": "builtin", "tasks": ["mood", "date"], "train_per_task": 32, "test_per_task": 6}
    return workbench.usual_config(first_trial(subject.sweep(benchmark, {})), steps=2)


def test_the_usual_ways_configuration_survives_its_file(tmp_path, usual):
    from latent_sweep.bench.usual_way import Config

    usual.write(tmp_path / "usual.json")
    again = Config.read(tmp_path / "usual.json")
    assert [task.name for task in again.tasks] == ["mood", "date"]
    assert again.tasks[1].train[3]["prompt_ids"] == list(usual.tasks[1].train[3]["prompt_ids"])
    assert again.learning_rate == usual.learning_rate


def test_the_usual_way_learns_an_adapter_per_task_and_routes_to_it(usual):
    from latent_sweep.bench.usual_way import UsualTrial

    trial = UsualTrial(usual, ortho_lambda=0.5, components=2, seed=0)
    assert 0.0 <= trial.run() <= 1.0
    weights = {name: parameter for name, parameter in trial.model.named_parameters() if "lora_B" in name}
    for task in usual.tasks:
        mine = [parameter for name, parameter in weights.items() if f".{task.name}." in name]
        assert len(mine) == 4 and all(bool(parameter.any()) for parameter in mine)  # both layers, query and value
    assert [trial.route(task.test) for task in usual.tasks] == [[0] * 6, [1] * 6]


@pytest.mark.parametrize(
    ("part", "children"),
    [("shards.shards", "shards._run_group"), ("processes.memory", "processes._child")],
)
def test_what_another_process_needs_is_given_back_first(tmp_path, monkeypatch, part, children):
    """The collector is off: nothing is freed by chance; and a GPU is imitated that was used."""
    held, emptied = [], []

    class Started(Exception):
        pass

    def child(*arguments):
        raise Started

    def with_a_backbone():
        measured = Workbench(Subject("tiny-llama", "float32", "cpu", "builtin", str(tmp_path), quick=True))
        held.append(weakref.ref(measured.backbone.model))
        measured.train([measured.training(measured.one_batch(), 1)])
        return measured

    monkeypatch.setattr(f"latent_sweep.bench.{children}", child)
    gc.disable()
    try:
        measured = with_a_backbone()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(held[0]()))
        with pytest.raises(Started):
            pkgutil.resolve_name(f"latent_sweep.bench.{part}")(measured)
    finally:
        gc.enable()
    assert emptied == [None]


def test_the_start_goes_to_the_first_step(monkeypatch, tmp_path, capsys):
    """And not to what a trial says before it: that it loads its backbone."""
    from latent_sweep.bench.processes import _measure_start
    from latent_sweep.training.events import Begun, Step

    seen = []

    def run_pack(pack, sweep, emit):
        for event in (Begun("loading the backbone"), Step(0, "learning", 1, 8, {"task": 1.0}, "t")):
            seen.append(event)
            emit(event)

    monkeypatch.setattr("latent_sweep.training.pack.run_pack", run_pack)
    monkeypatch.setattr("os._exit", lambda code: seen.append(code))
    subject = Subject("tiny-llama", "float32", "cpu", "builtin", str(tmp_path), True, str(tmp_path / "runs"))
    _measure_start(subject, "0")
    assert [type(event).__name__ for event in seen] == ["Begun", "Step", "int"]
    assert capsys.readouterr().out.count("stepped") == 1


@pytest.mark.slow
def test_the_parts_with_processes_of_their_own_run(tmp_path, capsys, without_data):
    report, _ = bench(capsys, tmp_path, "--only", "start", "threads", "memory")
    rows = rows_of(report)
    assert len(report["tables"]) == 3
    assert all(math.isfinite(row["value"]) and row["value"] > 0 for row in rows.values())
    assert rows["start to first step"]["value"] > rows["of which imports of others"]["value"]
    # each process says what it held itself, not what this one does
    assert rows["latent: peak memory"]["value"] != rows["bare backbone: peak memory"]["value"]


@pytest.mark.slow
def test_a_sweep_is_run_both_ways(tmp_path, capsys, without_data):
    report, _ = bench(capsys, tmp_path, "--only", "sweep")
    rows = rows_of(report)
    assert rows["usual way / ours"]["value"] == rows["usual way: sweep"]["value"] / rows["ours: sweep"]["value"]
    assert all(0 <= rows[f"{way}: AP"]["value"] <= 1 for way in ("ours", "usual way"))
    assert all(rows[f"{way}: AP"]["note"].startswith("of 1 trials, from ") for way in ("ours", "usual way"))


@pytest.mark.slow
def test_every_task_is_measured_beside_the_bare_backbone_and_the_usual_way(capsys, tmp_path, without_data):
    report, said = bench(capsys, tmp_path, "--only", "tasks")
    rows = rows_of(report)
    names = {name.partition(":")[0] for name in rows} - {"mean"}
    assert len(names) == len(load_benchmark("builtin").orders["1"])
    for other in ("bare backbone", "peft + Trainer"):
        ratios = [rows[f"{name}: latent / {other}"]["value"] for name in names]
        assert all(ratio > 0 for ratio in ratios)
        assert rows[f"mean: latent / {other}"]["value"] == pytest.approx(sum(ratios) / len(ratios))
    assert all("tokens instead of" in row["note"] for name, row in rows.items() if not name.startswith("mean"))
    told = [re.findall(r"\d+", rows[f"{name}: latent / bare backbone"]["note"]) for name in names]
    shares = [int(run) / int(padded) for run, padded in told]
    assert all(share < 1 for share in shares), "their rows begin alike"
    assert rows["mean: tokens run / padded tokens"]["value"] == pytest.approx(sum(shares) / len(shares))
    assert "mean: latent / bare backbone" in said, "told when it is known, and not at the end alone"
