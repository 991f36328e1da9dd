import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from helpers.events import fields_of
from helpers.sweeps import tiny, write, write_benchmark

from latent_sweep.backbones.registry import BackboneSettings
from latent_sweep.backbones.tokenizers import tokenizer_at_hand
from latent_sweep.cli.main import main
from latent_sweep.data.loaders import DATA_VARIABLE
from latent_sweep.data.schema import load_benchmark
from latent_sweep.errors import StorageError
from latent_sweep.storage.checksummed import write_checksummed_json
from latent_sweep.storage.folders import open_sweep
from latent_sweep.storage.journal import stages
from latent_sweep.storage.snapshots import Snapshot, SnapshotStorage
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.data_checks import Reader
from latent_sweep.sweep.forecast import Span, describe_plan, estimate, training_tokens
from latent_sweep.sweep.plan import expand, pack
from latent_sweep.sweep.planning import Plan
from latent_sweep.sweep.profile import profile_path

SWEEPS = sorted((Path(__file__).parents[2] / "sweeps").glob("*.yaml"))
NOWHERE = open_sweep(Path("nowhere") / "tiny")


@pytest.fixture(autouse=True)
def no_data(monkeypatch):
    """Whatever data the machine has, plans here see none of it."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


def trials_of(**changes):
    return expand(parse_sweep(tiny(**changes), "sweep.yaml"))


def over(mode, **search):
    """Trials with a penalty on three tasks of 12 test rows, over axes given as `router__components=[1, 2]`."""
    return trials_of(
        trial__benchmark__tasks=["mood", "ticket", "date"],
        trial__router={"combine": mode},
        search={path.replace("__", "."): values for path, values in search.items()},
    )


# --- stages ----------------------------------------------------------------------------------------------------------


def test_the_stages_of_a_grid():
    # lambda = 0, 0.01, 0.1; two seeds; K = 1, 2; three tasks. For each seed: the first task is one stage for all three
    # lambdas; then two tasks for each lambda. That is 1 + 2 + 2 + 2 = 7, and 14 for two seeds.
    trials = over("soft", method__ortho_lambda=[0.0, 0.01, 0.1], seed=[0, 1], router__components=[1, 2])
    found = estimate(trials, NOWHERE)
    assert (found.trials, found.trainings, found.stages, found.missing_data) == (12, 6, 36, None)
    assert (found.reuse.distinct, found.reuse.stored) == (14, 0)
    assert found.reuse.steps == 14 * 5 * 32 // 4  # five epochs of 32 rows in batches of four
    assert len(pack(trials)) == 6


def test_stored_snapshots_are_counted(tmp_path):
    import torch

    trials = trials_of(search={"seed": [0, 1]})
    store = SnapshotStorage(Storage(tmp_path))
    store.append(Snapshot(trials[0].lineages()[0], {"R": torch.zeros(1)}, {}))
    found = estimate(trials, open_sweep(tmp_path / "tiny"))
    assert (found.reuse.distinct, found.reuse.stored, found.reuse.steps) == (4, 1, 3 * 40)


def test_validation_rows_and_a_limit_of_steps_shorten_a_stage():
    (held_out,) = trials_of(search={}, trial__training__select="best_validation")
    (limited,) = trials_of(search={}, trial__training__max_steps=5)
    assert estimate([held_out], NOWHERE).reuse.steps == 2 * 5 * 8  # 29 of 32 rows: eight batches, the last of 1
    assert estimate([limited], NOWHERE).reuse.steps == 2 * 5


def test_without_data_a_plan_says_what_is_missing():
    found = estimate(trials_of(trial__benchmark={"name": "superni"}, search={}), NOWHERE)
    assert (found.stages, found.passes, found.reuse) == (15, 120, None)
    assert "no data folder is set" in found.missing_data


# --- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "least", "most"),
    [
        # three tasks: six passes; with two values of lambda, which share the first stage: twelve, one of them shared
        ("sum", 11, 11),  # every stage has other histories
        ("last", 11, 11),  # every stage answers with its own snapshot: 1 + 2 + 3, less the one that is shared
        ("oracle", 5, 5),  # a task's own snapshot answers it at every stage: 3 + 2
        ("soft", 5, 11),  # one that is always right is an oracle; one that never is sure is like a sum
        ("hard", 5, 11),
        ("ngram", 5, 11),
    ],
)
def test_passes_by_mode(mode, least, most):
    found = estimate(over(mode, method__ortho_lambda=[0.01, 0.1]), NOWHERE)
    assert found.passes == 12
    assert found.reuse.passes == found.reuse.open_passes == Span(least, most)
    assert found.reuse.answers == 12 * 12
    assert found.reuse.open_answers == Span(12 * least, 12 * most)


def test_inference_axes_multiply_only_what_a_router_decides():
    alone, four = (estimate(over("soft", **axes), NOWHERE) for axes in ({}, {"router__components": [1, 2, 3, 4]}))
    assert (alone.reuse.passes, four.passes) == (Span(3, 6), 24)
    # one task leaves nothing to route; the five passes of the other stages, for each K
    assert four.reuse.passes == Span(3, 1 + 4 * 5)


def test_what_is_scored_how_shares_no_answers_but_its_metric_does():
    assert estimate(over("oracle", benchmark__test_per_task=[6, 12]), NOWHERE).reuse.open_answers.most == 3 * 18
    assert estimate(over("oracle", evaluation__batch_size=[4, 16]), NOWHERE).reuse.passes == Span(6, 6)
    metrics = estimate(over("oracle", benchmark__classification_metric=["accuracy", "rouge_l"]), NOWHERE)
    assert (metrics.trials, metrics.reuse.passes) == (2, Span(3, 3))


QUICK = {
    "trial__method": {"name": "latent_lora", "rank": 4, "ortho_lambda": 1e-3},
    "trial__benchmark": {
        "name": "builtin",
        "tasks": ["mood", "ticket", "past"],
        "train_per_task": 8,
        "test_per_task": 3,
        "max_target_length": 6,
    },
    "trial__training": {"learning_rate": 0.05, "epochs": 1, "batch_size": 4},
}


@pytest.mark.parametrize("mode", ["sum", "last", "oracle", "soft", "hard", "ngram"])
def test_a_run_learns_and_answers_what_was_foreseen(mode, runs):
    """Every file of known answers is a batch; here a task's test rows are one batch."""
    changes = QUICK | {
        "trial__router": {"combine": mode},
        "search": {"method.ortho_lambda": [0.0, 1e-3], "router.components": [1, 2]},
    }
    trials, packs = trials_of(**changes), runs.packs(**changes)
    before = estimate(trials, runs.sweep).reuse
    runs.run(packs[:1])
    between = estimate(trials, runs.sweep).reuse
    runs.run(packs[1:])
    after = estimate(trials, runs.sweep).reuse

    stored = [json.loads(path.read_text())["facts"] for path in (runs.folder / "snapshots").glob("*.json")]
    assert (before.distinct, before.steps) == (len(stored), sum(facts["steps"] for facts in stored))
    answered = len(list((runs.folder / "predictions").glob("*/*.json")))
    assert before.open_passes.least <= answered <= before.open_passes.most
    assert before.open_answers == Span(3 * before.open_passes.least, 3 * before.open_passes.most)
    if mode in ("sum", "last", "oracle"):
        assert before.open_passes == Span(answered, answered)
    assert (between.stored, between.to_learn, between.steps) == (3, before.distinct - 3, 2 * 2)
    assert 0 < between.open_passes.most < before.open_passes.most
    assert (after.stored, after.steps, after.open_passes) == (before.distinct, 0, Span(0, 0))
    for path in (runs.folder / "snapshots").glob("*.*"):
        path.unlink()
    gone = estimate(trials, runs.sweep).reuse
    assert (gone.stored, gone.to_learn, gone.steps) == (0, 0, 0), "what has ended is not learned again"
    assert estimate(trials, open_sweep(runs.folder / "elsewhere")).reuse.to_learn == before.distinct


def test_rows_whose_settings_changed_are_to_be_scored_again(runs):
    runs.run(runs.packs(**QUICK, search={}))
    same = trials_of(**QUICK, search={})
    assert estimate(same, runs.sweep).reuse.open_passes.most == 0
    shutil.rmtree(runs.sweep.storage.folder / "predictions")
    journal = open_sweep(runs.folder / "tiny").journal(same[0].trial_id)
    _, _, second, *_ = journal.read()
    journal.append("stage", **fields_of(second) | {"key": "another"})
    assert estimate(same, runs.sweep).reuse.open_passes.most == 5
    journal.path.unlink()
    assert estimate(same, runs.sweep).reuse.open_passes.most == 6


# --- time ------------------------------------------------------------------------------------------------------------


def write_profile(storage, **changes):
    content = {
        "backbone": "tiny-llama",
        "device": "cpu",
        "dtype": "float32",
        "tokens_per_second_train": 0.5,
        "rows_per_second_generate": 0.25,
        "measured_at": "2030-01-02T03:04:05+00:00",
        "versions": {},
    }
    write_checksummed_json(profile_path(storage, "tiny-llama", "float32"), content | changes)


def own_benchmark(folder, **training):
    """One trial on two tasks of 24 rows in the layout `<row>` -> `ax`."""
    benchmark = {"name": str(write_benchmark(folder)), "max_source_length": 64}
    return trials_of(trial__benchmark=benchmark, trial__training=training, search={})


BYTES = Reader("llama", tokenizer_at_hand(BackboneSettings(name="tiny-llama")))
UNREAD = Reader("llama", None)


def test_tokens_are_the_rows_in_characters(tmp_path):
    trials = own_benchmark(tmp_path / "own", epochs=3, batch_size=5, learning_rate=0.1)
    characters = 0
    for task in ("left", "right"):
        for row in json.loads((tmp_path / "own" / task / "train.json").read_text()):
            characters += len(f"{row['input']}\nOutput: ") + len(row["output"])
    assert training_tokens(trials, SnapshotStorage(Storage(tmp_path)), BYTES) == pytest.approx(3 * characters)
    assert training_tokens(trials, SnapshotStorage(Storage(tmp_path)), UNREAD) == pytest.approx(3 * characters / 4)
    # four of the five steps of an epoch
    limited = own_benchmark(tmp_path / "again", max_steps=4, epochs=3, batch_size=5, learning_rate=0.1)
    assert training_tokens(limited, SnapshotStorage(Storage(tmp_path)), BYTES) == pytest.approx(4 / 5 * characters)


def test_characters_of_several_bytes_are_several_tokens(tmp_path):
    folder = write_benchmark(tmp_path / "own")
    for path in folder.glob("*/train.json"):
        path.write_text(path.read_text().replace("row", "\u4e00" * 3))
    benchmark = {"name": str(folder), "max_source_length": 64}
    (trial,) = trials_of(trial__benchmark=benchmark, trial__training={"epochs": 1, "max_steps": 100}, search={})
    tokens = sum(
        len(f"{row['input']}\nOutput: {row['output']}".encode())
        for path in folder.glob("*/train.json")
        for row in json.loads(path.read_text())
    )
    # the prompts of a task differ by a digit, and its targets count as if they were like them
    assert training_tokens([trial], SnapshotStorage(Storage(tmp_path)), BYTES) == pytest.approx(tokens, rel=0.05)


def test_a_long_prompt_counts_as_far_as_it_is_read(tmp_path):
    trials = own_benchmark(tmp_path / "own", epochs=1, batch_size=8, learning_rate=0.1)
    shortest = trials[0].settings.benchmark.model_copy(update={"max_source_length": 2})
    cut = [type(t)(**vars(t) | {"settings": t.settings.model_copy(update={"benchmark": shortest})}) for t in trials]
    assert training_tokens(cut, SnapshotStorage(Storage(tmp_path)), BYTES) == pytest.approx(48 * (2 + 2))


def plan_of(storage, **changes):
    sweep = parse_sweep(tiny(**changes), "sweep.yaml")
    trials = expand(sweep)
    return describe_plan(Plan(sweep, trials, pack(trials), []), Storage(storage)), trials


def test_a_profile_turns_work_into_hours(tmp_path):
    without, trials = plan_of(tmp_path)
    assert "one worker" not in without
    write_profile(tmp_path)
    text, _ = plan_of(tmp_path)
    (line,) = [line for line in text.splitlines() if "one worker" in line]
    hours = training_tokens(trials, SnapshotStorage(Storage(tmp_path)), BYTES) / 0.5 / 3600
    # per seed: two passes with certainty, 12 rows each at four seconds; at most one more for each K
    least, most = 2 * 2 * 12 * 4 / 60, 2 * (1 + 2 * 2) * 12 * 4 / 60
    assert line.strip() == (
        f"about {hours:,.1f} h of learning and {least:.0f} min to {most:.0f} min of answering with one worker: "
        "tiny-llama (float32) on cpu, measured 2030-01-02"
    )


def test_hours_without_a_tokenizer_say_what_they_take_for_a_token(tmp_path):
    write_profile(tmp_path)
    profile_path(tmp_path, "tiny-llama", "float32").rename(profile_path(tmp_path, "t5-large", "float32"))
    text, _ = plan_of(tmp_path, trial__backbone={"name": "t5-large", "dtype": "float32", "tokenizer": "nobody/has-it"})
    assert "measured 2030-01-02; taking 4 characters for a token" in text


def test_a_profile_of_another_precision_says_nothing(tmp_path):
    write_profile(tmp_path)
    assert "one worker" not in plan_of(tmp_path, trial__backbone={"name": "tiny-llama", "dtype": "bfloat16"})[0]


def test_a_damaged_profile_is_named(tmp_path):
    write_profile(tmp_path)
    profile_path(tmp_path, "tiny-llama", "float32").write_text("{")
    with pytest.raises(StorageError, match=r"tiny-llama-float32-cpu\.json"):
        plan_of(tmp_path)


# --- the text --------------------------------------------------------------------------------------------------------


def test_the_text_of_a_plan(tmp_path):
    text, _ = plan_of(tmp_path, run__resources={"cpus": 2, "gpus": 0.5, "accelerator": "A100"})
    assert text.splitlines()[4:] == [
        "",
        "  4 trials, 2 distinct trainings in 2 packs",
        "  8 tasks to learn if every trial trained for itself",
        "  4 distinct stages, 0 in the store, 4 to learn: 160 optimizer steps",
        "  12 test passes if every trial answered for itself: 144 answers",
        "  4 to 10 distinct passes, 4 to 10 to answer: 48 to 120 answers",
        "    at least with a router that is always sure of the right task, at most with one that never is",
        "  each pack asks for 2 CPU, 0.5 GPU of type A100",
        *[line for line in text.splitlines() if "a worker to learn" in line],
        "",
        "  training          trials",
        *text.splitlines()[-2:],
    ]
    assert [line[20:] for line in text.splitlines()[-2:]] == [
        "2: seed=0 | epsilon=0.01, epsilon=0.1",
        "2: seed=1 | epsilon=0.01, epsilon=0.1",
    ]


REPLAYING = """
from latent_sweep.methods.lora import TaskAdapterMethod, TaskAdapterSettings, LoraLearner


class ReplayingSettings(TaskAdapterSettings):
    name: str


class ReplayingLearner(LoraLearner):
    def examples(self, rows):
        return [*rows, rows[0]]


class Replaying(TaskAdapterMethod):
    settings_class = ReplayingSettings
    replays = True

    def begin_task(self, task, history):
        return ReplayingLearner(self.fresh(task), self.outputs, self.settings, self.active(history))
"""


def test_rows_that_a_method_adds_are_said_to_be_left_out(tmp_path, monkeypatch):
    (tmp_path / "replaying.py").write_text(REPLAYING)
    monkeypatch.syspath_prepend(str(tmp_path))
    replaying, lfpt5, ewc = ({"method": {"name": name}} for name in ("replaying:Replaying", "lfpt5", "ewc"))
    replaying["method"]["rank"] = ewc["method"]["rank"] = 8

    def steps(*methods):
        text, _ = plan_of(tmp_path, trial__method=None, trial__router=None, search={"trial": list(methods)})
        return re.search("optimizer steps.*", text)[0]

    assert steps(ewc) == "optimizer steps"
    assert steps(replaying, ewc) == "optimizer steps, without the rows that replaying:Replaying adds"
    assert steps(replaying, lfpt5) == "optimizer steps, without the rows that replaying:Replaying and lfpt5 add"


def test_trainings_of_one_pack_stand_together():
    sweep = parse_sweep(tiny(search={"seed": [0, 1, 2]}), "sweep.yaml")
    trials = expand(sweep)
    lines = describe_plan(Plan(sweep, trials, pack(trials, 2), []), NOWHERE.storage).splitlines()
    assert "3 trials, 3 distinct trainings in 2 packs" in "\n".join(lines)
    assert [line[:2] for line in lines[-3:]] == [" |", " |", "  "]


# --- memory ----------------------------------------------------------------------------------------------------------

LARGE = {
    "trial__backbone": {"name": "llama-2-13b", "dtype": "bfloat16"},
    "trial__training": {"batch_size": 4, "gradient_checkpointing": True, "learning_rate": 0.1},
    "search": {},
}


def memory_of(**changes):
    """The lines of a plan on memory."""
    text, _ = plan_of(NOWHERE.storage.folder, **LARGE | changes)
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "a worker to learn" in line)
    return lines[first : lines.index("", first)]


def test_memory_is_told_with_its_parts():
    assert memory_of() == [
        "  up to 27.1 GiB a worker to learn (weights 24.2, factors 0.024, earlier adapters 0.00023, activations 2.8, "
        "logits 0.0029, adapter and optimizer 0.00031), 38.8 to answer with prompts of 1,024 tokens; on a CPU the "
        "process itself takes some 1.8 GiB besides"
    ]
    (line,) = memory_of(trial__method={"name": "inf_lora", "rank": 8})
    assert re.search(r"\), [\d.]+ to measure its inputs, 38\.8 to answer", line)
    (line,) = memory_of(trial__method={"name": "ewc", "rank": 8})
    assert re.search(r"\), [\d.]+ to measure its Fisher information, 38\.8 to answer", line)


@pytest.mark.parametrize(("accelerator", "as_with"), [("A100-80G", False), ("A100-40G", True), (None, False)])
def test_automatic_checkpointing_is_told_as_it_will_be_on_the_card(accelerator, as_with):
    def told(checkpointing):
        training = {**LARGE["trial__training"], "gradient_checkpointing": checkpointing}
        return memory_of(trial__training=training, run__resources={"gpus": 1, "accelerator": accelerator})[0]

    assert told("auto") == told(as_with) != told(not as_with)


def test_memory_of_shards_names_engine_and_host():
    def engine(**resources):
        settings = {"name": "deepspeed", "offload": "cpu"} if "workers" not in resources else {"name": "deepspeed"}
        return memory_of(run__engine=settings, run__resources={"gpus": 1, **resources})

    (line,) = engine(workers=2)
    assert "weights 12.1, gathered weights 1.0" in line and line.endswith("; ZeRO-3 over 2 workers")
    (line,) = engine()
    assert line.endswith("; ZeRO-3; 24.2 GiB more in host memory")


@pytest.mark.parametrize(
    ("accelerator", "rows", "warning"),
    [
        ("A100-80G", 16, None),
        ("A100", 4, None),
        ("A100", 16, "A100 has with 40 GB, though it fits 80 GB; see evaluation.batch_size and run.engine"),
        ("V100", 1, "V100 has with 16 GB, though it fits 32 GB; see training.micro_batch_size, "),
        ("V100", 16, "V100 has with 16 GB or 32 GB; see training.micro_batch_size, training.gradient_checkpointing, "),
    ],
)
def test_a_card_that_is_too_small_is_named(accelerator, rows, warning):
    run = {"gpus": 1, "accelerator": accelerator}
    _, *warnings = memory_of(run__resources=run, trial__evaluation={"batch_size": rows})
    assert [warning] == (warnings or [None]) or warning in warnings[0]


def test_memory_is_told_for_each_backbone_and_what_the_hub_knows_alone_is_left_out():
    search = {"backbone.name": ["tiny-llama", "tiny-t5", "somebody/a-model"]}
    lines = memory_of(search=search)
    backbones = [line.rpartition(" tokens, ")[2].partition(";")[0] for line in lines]
    assert backbones == ["on tiny-llama (bfloat16)", "on tiny-t5 (bfloat16)"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder with a row for every task of both published benchmarks."""
    root = tmp_path_factory.mktemp("data") / "CL_Benchmark"
    for name in ("superni", "long_sequence"):
        spec = load_benchmark(name)
        for task in spec.tasks:
            folder = root / spec.folder / task.folder
            folder.mkdir(parents=True)
            for split in ("train", "test"):
                rows = [f'{{"input": "{split} row {i}", "output": "yes"}}' for i in range(24)]
                (folder / f"{split}.json").write_text(f"[{', '.join(rows)}]")
    return str(root.parent)


@pytest.mark.parametrize("path", SWEEPS, ids=[path.stem for path in SWEEPS])
@pytest.mark.parametrize("at_hand", [False, True], ids=["without data", "with data"])
def test_every_sweep_of_the_repository_passes_plan(path, at_hand, data, monkeypatch, capsys, tmp_path):
    if at_hand:
        monkeypatch.setenv(DATA_VARIABLE, data)
    assert main(["plan", str(path), "--set", f"run.storage={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    builtin = yaml.safe_load(path.read_text())["trial"].get("benchmark", {}).get("name") == "builtin"
    assert ("distinct stages, 0 in the store" in printed) == (at_hand or builtin)
    assert ("the data is not at hand" in printed) == (not at_hand and not builtin)


@pytest.mark.parametrize("mode", ["sum", "soft"])
def test_answers_that_are_scored_otherwise_are_not_generated_again(tmp_path, capsys, mode):
    """A metric of the benchmark's file makes other trials, whose answers are those that are there."""
    own = write_benchmark(tmp_path / "own")
    content = tiny(trial__benchmark={"name": str(own)}, trial__router={"combine": mode}, search={})
    path = write(tmp_path, content)
    assert main(["run", path, "--local"]) == 0
    file = own / "benchmark.yaml"
    assert "metric: accuracy" in file.read_text()
    file.write_text(file.read_text().replace("metric: accuracy", "metric: chrf"))
    trials = expand(parse_sweep(yaml.safe_load(Path(path).read_text()), path))
    (before,) = open_sweep(tmp_path / "runs" / "tiny")
    assert trials[0].trial_id != before.trial_id

    found = estimate(trials, open_sweep(tmp_path / "runs" / "tiny")).reuse
    assert (found.to_learn, found.open_passes, found.open_answers) == (0, Span(0, 0), Span(0, 0))
    assert main(["run", path, "--local", "--replace"]) == 0
    (trial,) = open_sweep(tmp_path / "runs" / "tiny")
    assert [event.metrics["generated_share"] for event in stages(trial.events())] == [0.0, 0.0]
    assert {metric for event in stages(trial.events()) for metric in event.scored_by.values()} == {"chrf"}

    # whoever deletes the cache has them generated again
    shutil.rmtree(tmp_path / "runs" / "predictions")
    file.write_text(file.read_text().replace("metric: chrf", "metric: edit_similarity"))
    trials = expand(parse_sweep(yaml.safe_load(Path(path).read_text()), path))
    assert estimate(trials, open_sweep(tmp_path / "runs" / "tiny")).reuse.open_answers.least > 0
