"""`report --baseline`: what is paired with what, from which files, and how tables say it."""

import csv
import io
import json
import random
import statistics

import numpy as np
import pytest
from helpers.sweep_folders import TASKS, run_to_end, run_with_answers, run_with_rows, start, write_sweep

from latent_sweep.cli.main import main
from latent_sweep.errors import ConfigError
from latent_sweep.labels import label
from latent_sweep.report import report
from latent_sweep.report.tables import sections
from latent_sweep.results import summaries
from latent_sweep.results.comparison import Difference
from latent_sweep.results.frames import SweepResults
from latent_sweep.storage.checksummed import sealed_json
from latent_sweep.storage.folders import open_sweep
from latent_sweep.tracking.contents import trial_content

AXES = {"method.name": ["seq_lora", "o_lora"], "seed": [0, 1, 2]}


def rows_of(average, seed, n=40):
    source = np.random.default_rng(seed)
    return {task: source.binomial(1, average, n).astype(float).tolist() for task in TASKS}


def section(summary, name):
    (found,) = (one for one in sections(summary) if one.name == name)
    return found


def compared(sweep, *baseline, over=()):
    """The comparison of each configuration, by its label."""
    summary = summaries.summarize(sweep, over, baseline)
    return {label(found.values): found.comparison for found in summary.configurations}


@pytest.fixture
def sweep(tmp_path):
    """seq_lora scores about 0.5, o_lora on the same rows a fifth more; FM 0.3 against 0.1, and a little."""
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        seed, better = trial.values["seed"], trial.values["method.name"] == "o_lora"
        rows = rows_of(0.5, seed)
        if better:
            rows = {task: [max(score, float(i % 5 == 0)) for i, score in enumerate(rows[task])] for task in TASKS}
        run_with_rows(trial, rows, (0.1 if better else 0.3) + 0.01 * seed * better)
    return sweep


def test_differences_are_those_of_pairs(sweep):
    found = compared(sweep, "method=seq_lora")
    assert found["method=seq_lora"] is None
    comparison = found["method=o_lora"]
    assert (comparison.baseline, comparison.n) == ("method=seq_lora", 3)
    assert comparison.differences["AP"].resampled == "repetitions and rows"
    first, second = (
        [trial.events()[-1].metrics["AP"] for trial in sweep if trial.values["method.name"] == name]
        for name in ("seq_lora", "o_lora")
    )
    difference = comparison.differences["AP"]
    assert difference.mean == pytest.approx(np.mean(second) - np.mean(first))
    assert difference.interval[0] < difference.mean < difference.interval[1]
    assert difference.told_apart
    assert comparison.differences["FM"].mean == pytest.approx(-0.19)
    assert comparison.differences["FM"].told_apart


def test_seeds_are_paired_whatever_their_places(tmp_path):
    """Between seeds scores differ by 40 points, within a seed by 1: only the right pairs tell that."""
    sweep = write_sweep(tmp_path, {"seed": [0, 1, 2], "method.name": ["seq_lora", "o_lora"]})
    for trial in sweep:
        seed, better = trial.values["seed"], trial.values["method.name"] == "o_lora"
        run_to_end(trial, 0.1 + 0.4 * seed + (0.01 + 0.001 * seed) * better, 0.0)
    comparison = compared(sweep, "method=seq_lora")["method=o_lora"]
    assert comparison.differences["AP"].mean == pytest.approx(0.011)
    assert comparison.differences["AP"].told_apart


def test_what_is_equal_cannot_be_told_apart(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_rows(trial, rows_of(0.5, trial.values["seed"]), 0.2)
    comparison = compared(sweep, "method=seq_lora")["method=o_lora"]
    assert comparison.differences["AP"].interval == comparison.differences["FM"].interval == (0.0, 0.0)
    text = report.render(summaries.summarize(sweep, baseline=["method=seq_lora"]))
    assert text.count("+0.00 [+0.00, +0.00] n.s.") == 4


def test_only_repetitions_that_both_have_finished_are_pairs(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for number, trial in enumerate(sweep):
        if number != 1:
            run_to_end(trial, 0.9 if number == 4 else 0.5, 0.0)  # whose partner has not finished
    comparison = compared(sweep, "method=seq_lora")["method=o_lora"]
    assert (comparison.n, comparison.differences["AP"].mean) == (2, 0.0)


def test_without_rows_repetitions_alone_are_taken(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for number, trial in enumerate(sweep):
        run_to_end(trial, 0.5 + 0.01 * number**2, 0.0)
    summary = summaries.summarize(sweep, baseline=["method=seq_lora"])
    assert summary.configurations[1].comparison.differences["AP"].resampled == "repetitions"
    assert "from repetitions alone: Student's t over them" in report.render(summary)


@pytest.mark.parametrize("damage", ["gone", "other", "rows"])
def test_rows_that_are_not_as_the_journal_says_are_not_read(sweep, damage):
    path = next(iter(sweep)).path / "predictions" / "summary.jsonl"
    content = {"other": path.read_text().replace("0.0", "1.0"), "rows": "not even JSON"}
    path.unlink() if damage == "gone" else path.write_text(content[damage])
    assert compared(sweep, "method=seq_lora")["method=o_lora"].differences["AP"].resampled == "repetitions"


def test_other_test_rows_are_no_pairs(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_rows(trial, rows_of(0.5, 0, n=30 if trial.values["method.name"] == "o_lora" else 40))
    summary = summaries.summarize(sweep, baseline=["method=seq_lora"])
    found = summary.configurations[1].comparison.differences["AP"]
    assert (found.resampled, found.interval) == ("nothing", None), "and equal differences say nothing of how they vary"
    assert "without brackets: all pairs have the same difference" in report.render(summary)


def test_the_same_number_of_other_test_rows_is_no_pair(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_rows(trial, rows_of(0.5, 0), rows_from=trial.values["method.name"])
    assert compared(sweep, "method=seq_lora")["method=o_lora"].differences["AP"].resampled == "repetitions"


def test_one_repetition_tells_of_rows_alone(tmp_path):
    sweep = write_sweep(tmp_path, AXES | {"seed": [0]})
    for number, trial in enumerate(sweep):
        run_with_rows(trial, rows_of(0.2 + 0.6 * number, 0), 0.1)
    summary = summaries.summarize(sweep, baseline=["method=seq_lora"])
    comparison = summary.configurations[1].comparison
    assert comparison.differences["AP"].resampled == "rows"
    assert comparison.differences["AP"].told_apart
    assert comparison.differences["FM"].interval is None
    assert "with one pair, an interval tells of other test rows, and nothing of another seed" in report.render(summary)


def test_one_repetition_without_rows_has_no_interval(tmp_path):
    sweep = write_sweep(tmp_path, AXES | {"seed": [0]})
    for number, trial in enumerate(sweep):
        run_to_end(trial, 0.5 + 0.1 * number, 0.0)
    summary = summaries.summarize(sweep, baseline=["method=seq_lora"])
    comparison = summary.configurations[1].comparison
    assert (comparison.differences["AP"].resampled, comparison.differences["AP"].interval) == ("nothing", None)
    assert "o_lora  1  +10.00  +10.00  +0.00  +0.00\n" in report.render(summary)


def test_before_anything_has_finished_there_is_nothing_to_compare(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    start(next(iter(sweep)))
    summary = summaries.summarize(sweep, baseline=["method=seq_lora"])
    assert summary.configurations[1].comparison.differences == {}
    assert all(report.render(summary, format) for format in report.FORMATS)


def test_intervals_that_are_there_are_counted(tmp_path):
    """At most four of each comparison; none of what has no pair."""
    sweep = write_sweep(tmp_path, {"method.rank": [4, 8, 16], "seed": [0, 1]})
    for trial in sweep:
        if trial.values["method.rank"] < 16:
            run_with_rows(trial, rows_of(0.5, trial.values["method.rank"]))
    text = report.render(summaries.summarize(sweep, baseline=["rank=4"]))
    assert text.count("[") == 3, "LA has the same difference in both pairs"
    assert "3 intervals, not corrected for their number: of those without a true difference, at least one in" in text


def test_what_is_equal_has_equal_intervals(tmp_path):
    """Whatever else is compared, and in which order."""
    sweep = write_sweep(tmp_path, {"method.rank": [4, 8, 16, 32], "seed": [0, 1, 2]})
    for trial in sweep:
        rank, seed = trial.values["method.rank"], trial.values["seed"]
        run_with_rows(trial, rows_of(0.5 if rank == 4 else 0.7, seed if rank < 16 else 7 * seed))
    found = compared(sweep, "rank=4")
    same, other = (found[f"rank={rank}"].differences["AP"] for rank in (16, 32))
    assert same.interval == other.interval != found["rank=8"].differences["AP"].interval


def test_few_pairs_are_said_to_be_few(tmp_path):
    """Only where an interval is from rows, and of so few pairs."""
    note = "two to four pairs"
    for n, with_rows, told in ((4, True, True), (5, True, False), (3, False, False), (1, True, False)):
        sweep = write_sweep(tmp_path / f"{n}{with_rows}", AXES | {"seed": list(range(n))})
        for trial in sweep:
            if with_rows:
                run_with_rows(trial, rows_of(0.5, trial.values["seed"]))
            else:
                run_to_end(trial, 0.5, 0.0)
        text = report.render(summaries.summarize(sweep, baseline=["method=seq_lora"]))
        assert (note in text) == told, (n, with_rows)
        assert ("hierarchical bootstrap" in text) == with_rows


# --- what the answers of every stage tell ----------------------------------------------------------------------------


def stages_of(seed, keeps, n=40):
    """Rows of three tasks after each of three stages: of those right when new, a later stage keeps so large a share.

    With little forgetting the first task scores best at the second stage, not when it is new, and the third one is
    learned better.
    """
    source = np.random.default_rng(seed)
    new = {task: source.binomial(1, 0.7, n).astype(float) for task in TASKS}
    kept = {task: new[task] * source.binomial(1, keeps, n) for task in TASKS}
    first, second, third = TASKS
    better = np.maximum(new[first], np.arange(n) % 4 == 0) if keeps > 0.7 else new[first]
    learned = np.maximum(new[third], np.arange(n) % 5 == 0) if keeps > 0.7 else new[third]
    rows = [{first: new[first]}, {first: better, second: new[second]}, kept | {third: learned}]
    return [{task: found.tolist() for task, found in stage.items()} for stage in rows]


@pytest.fixture
def answered(tmp_path):
    """seq_lora keeps half of its right answers, o_lora nine of ten."""
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        keeps = 0.9 if trial.values["method.name"] == "o_lora" else 0.5
        run_with_answers(trial, stages_of(trial.values["seed"], keeps))
    return sweep


def loops(measure, seed=3, resamples=3_000):
    """The difference of a measure, and its interval, with nothing but loops over the rows of each task."""
    source = random.Random(seed)
    first, second, third = TASKS

    def rows(keeps, repetition):
        at = stages_of(repetition, keeps)
        if measure == "AP":
            return {task: at[2][task] for task in TASKS}
        if measure == "LA":
            return {first: at[0][first], second: at[1][second], third: at[2][third]}
        before = at[1] if measure == "FM" else {first: at[0][first], second: at[1][second]}
        sign = 1 if measure == "FM" else -1
        return {task: [sign * (x - y) for x, y in zip(before[task], at[2][task], strict=True)] for task in before}

    pairs = [(rows(0.9, seed), rows(0.5, seed)) for seed in range(3)]
    apart = [{task: [x - y for x, y in zip(a[task], b[task], strict=True)] for task in a} for a, b in pairs]
    mean = statistics.fmean(statistics.fmean(statistics.fmean(r[t]) for t in r) for r in apart)
    values = []
    for _ in range(resamples):
        drawn = {task: source.choices(range(40), k=40) for task in TASKS}
        chosen = source.choices(apart, k=3)
        values.append(
            statistics.fmean(statistics.fmean(statistics.fmean(r[t][i] for i in drawn[t]) for t in r) for r in chosen)
        )
    values.sort()
    return mean, (values[round(0.025 * resamples)], values[round(0.975 * resamples)])


@pytest.mark.parametrize("measure", ["AP", "LA", "BWT", "FM"])
def test_every_measure_has_the_interval_of_its_rows(answered, measure):
    found = compared(answered, "method=seq_lora")["method=o_lora"].differences[measure]
    mean, interval = loops(measure)
    assert found.resampled == "repetitions and rows"
    assert found.mean == pytest.approx(mean)
    assert found.interval == pytest.approx(interval, abs=0.02)
    assert found.mean != 0


def test_one_repetition_tells_of_what_rows_forget(tmp_path):
    sweep = write_sweep(tmp_path, AXES | {"seed": [0]})
    for trial in sweep:
        run_with_answers(trial, stages_of(0, 0.9 if trial.values["method.name"] == "o_lora" else 0.5))
    found = compared(sweep, "method=seq_lora")["method=o_lora"].differences["FM"]
    assert (found.resampled, found.told_apart) == ("rows", True)


def test_a_single_task_has_nothing_to_forget(tmp_path, monkeypatch):
    monkeypatch.setattr("helpers.sweep_folders.TASKS", TASKS[:1])
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_answers(trial, [{TASKS[0]: rows_of(0.5, trial.values["seed"])[TASKS[0]]}])
    found = compared(sweep, "method=seq_lora")["method=o_lora"].differences
    assert set(found) == {"AP", "LA"}
    assert found["LA"].resampled == "repetitions and rows"
    summary = summaries.summarize(sweep, baseline=["method=seq_lora"])
    assert summary.configurations[0].forgetting is None
    (row,) = section(summary, "compared").table.rows
    assert [cell.text for cell in row[-2:]] == ["-", "-"]
    trials = SweepResults(sweep).trials()
    assert trials[["FM", "BWT"]].isna().all(axis=None) and trials["LA"].notna().all()


def test_the_first_of_equally_good_stages_counts(tmp_path):
    """So that the rows that were lost and gained since are seen, though their sum is nothing."""
    first, second, third = TASKS
    sweep = write_sweep(tmp_path, AXES | {"seed": [0]})
    for trial in sweep:
        changes = trial.values["method.name"] == "o_lora"
        new, later = [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0] if changes else [1.0, 1.0, 0.0, 0.0]
        stages = [{first: new}, {first: later, second: new}, {first: later, second: new, third: new}]
        run_with_answers(trial, stages)
    found = compared(sweep, "method=seq_lora")["method=o_lora"].differences["FM"]
    assert found.mean == 0
    assert found.interval[0] < 0 < found.interval[1]


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_without_the_answers_of_a_stage_repetitions_alone_tell_of_forgetting(answered, damage):
    path = next(iter(answered)).path / "answers" / "2.jsonl"
    path.unlink() if damage == "gone" else path.write_text(path.read_text().replace("1.0", "0.0"))
    found = compared(answered, "method=seq_lora")["method=o_lora"].differences
    assert {measure: each.resampled for measure, each in found.items()} == {
        "AP": "repetitions and rows",
        "LA": "repetitions",
        "BWT": "repetitions",
        "FM": "repetitions",
    }


def test_answers_of_some_stages_do_not_tell_of_forgetting(tmp_path):
    """A trial that went on with `run.keep_answers: last`."""
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_answers(
            trial, stages_of(trial.values["seed"], 0.5), kept=(1, 2) if trial.values["seed"] else (1, 2, 3)
        )
    found = compared(sweep, "method=seq_lora")["method=o_lora"].differences
    assert (found["AP"].resampled, found["FM"].resampled) == ("repetitions and rows", "repetitions")


# --- which one is the baseline ---------------------------------------------------------------------------------------

MIXED = {
    "method.name": ["seq_lora", "o_lora"],
    "router.combine": ["sum", "soft"],
    "benchmark.order": [1, 2],
    "seed": [0],
}


@pytest.mark.parametrize(
    "wanted",
    [
        ["method=seq_lora", "combine=soft"],
        ["method.name=seq_lora", "router.combine=soft"],
        ["method=seq_lora combine=soft order=1"],
    ],
)
def test_a_baseline_is_named_by_settings_or_by_its_label(tmp_path, wanted):
    axes = MIXED | {"benchmark.order": [1]}
    found = compared(write_sweep(tmp_path, axes), *wanted)
    assert found.pop("method=seq_lora combine=soft order=1") is None
    assert {comparison.baseline for comparison in found.values()} == {"method=seq_lora combine=soft order=1"}


@pytest.mark.parametrize("wanted", ["lambda=1e-5", "lambda=1e-05", "method.ortho_lambda=0.00001", "lambda=1.0E-5"])
def test_a_baseline_may_write_a_number_otherwise(tmp_path, wanted):
    sweep = write_sweep(tmp_path, {"method.ortho_lambda": [0.0, 1e-5], "seed": [0]})
    assert compared(sweep, wanted)["lambda=0.0"].baseline == "lambda=1e-05"
    with pytest.raises(ConfigError, match="'lambda=1e-4' fits no configuration; expected"):
        compared(sweep, "lambda=1e-4")


def test_each_configuration_is_compared_on_what_it_is_tested_on(tmp_path):
    found = compared(write_sweep(tmp_path, MIXED), "method=seq_lora", "combine=soft")
    assert found["method=o_lora combine=sum order=2"].baseline == "method=seq_lora combine=soft order=2"
    assert found["method=o_lora combine=sum order=1"].baseline == "method=seq_lora combine=soft order=1"


def test_of_several_baselines_the_one_with_the_same_backbone_is_taken(tmp_path):
    axes = {"backbone.name": ["t5-large", "t5-3b"], "method.name": ["seq_lora", "o_lora"], "seed": [0]}
    sweep = write_sweep(tmp_path, axes)
    found = compared(sweep, "method=seq_lora")
    assert found["backbone=t5-3b method=o_lora"].baseline == "backbone=t5-3b method=seq_lora"
    found = compared(sweep, "method=seq_lora", "backbone=t5-large")
    assert found["backbone=t5-3b method=o_lora"].baseline == "backbone=t5-large method=seq_lora"


def test_other_settings_of_the_benchmark_can_be_compared(tmp_path):
    found = compared(write_sweep(tmp_path, {"benchmark.train_per_task": [16, 64], "seed": [0]}), "train_per_task=16")
    assert found["train_per_task=64"].baseline == "train_per_task=16"


def test_orders_are_pairs_where_they_repeat(tmp_path):
    sweep = write_sweep(tmp_path, MIXED | {"router.combine": ["sum"], "seed": [0, 1]})
    for number, trial in enumerate(sweep):
        run_to_end(trial, 0.1 * (number % 4) + 0.2 * (number >= 4), 0.0)
    comparison = compared(sweep, "method=seq_lora", over=["order"])["method=o_lora combine=sum"]
    assert comparison.n == 4
    assert comparison.differences["AP"].mean == pytest.approx(0.2)


def resolved(sweep, settings, kept):
    """The sweep with those of its trials whose values are kept, and with what settings resolve to from these."""
    content = json.loads((sweep.path / "sweep.json").read_bytes())["content"]
    content["trials"] = [
        entry | {"params": entry["params"] | settings(entry["values"])}
        for entry in content["trials"]
        if kept(entry["values"])
    ]
    (sweep.path / "sweep.json").write_bytes(sealed_json(content))
    return open_sweep(sweep.path)


def routed_beside_oracle(tmp_path, **more):
    """The task known, two seeds, and two routers with K = 1 and two with K = 5, which the first do not read."""
    axes = {"router.combine": ["oracle", "soft"], "router.components": [None, 1, 5], "seed": [0, 1]}
    return resolved(
        write_sweep(tmp_path, axes | more),
        lambda values: {"router.components": values["router.components"] or 5},
        lambda values: (values["router.combine"] == "oracle") == (values["router.components"] is None),
    )


def test_what_does_not_read_what_repeats_is_compared_with_the_mean_over_it(tmp_path):
    """With K = 1 and 5 averaged for each seed: one K alone would give another difference."""
    sweep = routed_beside_oracle(tmp_path)
    for trial, average in zip(sweep, (0.3, 0.4, 0.4, 0.42, 0.5, 0.5), strict=True):
        run_with_rows(trial, {task: [average] * 5 for task in TASKS}, 0.0)
    found = compared(sweep, "combine=oracle", over=["K"])["combine=soft"]
    assert found.n == 2
    assert found.differences["AP"].mean == pytest.approx((0.15 + 0.06) / 2)
    assert found.differences["AP"].resampled == "repetitions and rows"
    text = report.render(summaries.summarize(sweep, ["K"], ["combine=oracle"]))
    assert "where only one of the two reads K, the trials of the other are averaged over it" in text
    assert compared(sweep, "combine=oracle")["combine=soft K=5"].n == 2


def test_a_bound_of_nothing_but_rounding_is_zero():
    assert not Difference(0.02, (1.7e-18, 0.05), "rows").told_apart
    assert not Difference(-0.02, (-0.05, -1.7e-18), "rows").told_apart
    assert Difference(0.02, (1e-3, 0.05), "rows").told_apart


def test_a_mean_over_what_the_other_does_not_read_is_one_over_all_of_it(tmp_path):
    """A seed that lacks one K has another mean: it is no pair until that has finished."""
    *whole, last = routed_beside_oracle(tmp_path)
    for trial, average in zip(whole, (0.5, 0.5, 0.3, 0.3, 0.7), strict=True):
        run_to_end(trial, average, 0.0)
    found = compared(open_sweep(tmp_path / "lambda"), "combine=oracle", over=["K"])["combine=soft"]
    assert (found.n, found.differences["AP"].mean) == (1, 0.0)
    run_to_end(last, 0.7, 0.0)
    assert compared(open_sweep(tmp_path / "lambda"), "combine=oracle", over=["K"])["combine=soft"].n == 2


def test_a_mean_waits_for_a_value_that_no_repetition_has_finished(tmp_path):
    """K = 5 is missing for both seeds, and in no trial that has finished."""
    oracle, other, *routed = routed_beside_oracle(tmp_path)
    for trial, average in zip((oracle, other, *routed[:2]), (0.5, 0.5, 0.3, 0.3), strict=True):
        run_to_end(trial, average, 0.0)
    assert compared(open_sweep(tmp_path / "lambda"), "combine=oracle", over=["K"])["combine=soft"].n == 0
    for trial in routed[2:]:
        run_to_end(trial, 0.7, 0.0)
    found = compared(open_sweep(tmp_path / "lambda"), "combine=oracle", over=["K"])["combine=soft"]
    assert (found.n, found.differences["AP"].mean) == (2, 0.0)


def test_both_may_be_averaged_over_what_some_of_their_trials_do_not_read(tmp_path):
    """Each of two rates has the task known, without K, and a router with two: all have finished, so all are pairs."""
    for trial in routed_beside_oracle(tmp_path, **{"training.learning_rate": [0.1, 0.2]}):
        run_to_end(
            trial, trial.values["training.learning_rate"] * (2 + (trial.values["router.combine"] == "soft")), 0.0
        )
    sweep = open_sweep(tmp_path / "lambda")
    found = compared(sweep, "learning_rate=0.1", over=["combine", "K"])["learning_rate=0.2"]
    assert (found.n, found.differences["AP"].mean) == (4, pytest.approx(0.25))


def test_a_setting_that_a_point_leaves_out_is_not_one_that_is_null(tmp_path):
    """What it resolves to differs by method: the other's modes are averaged, and none is left out unsaid."""
    axes = {"method.name": ["seq_lora", "latent_lora"], "router.combine": [None, "oracle"], "seed": [0, 1]}
    of_method = {"seq_lora": "last", "latent_lora": "soft"}
    sweep = resolved(
        write_sweep(tmp_path, axes),
        lambda values: {"router.combine": values["router.combine"] or of_method[values["method.name"]]},
        lambda values: values["method.name"] == "latent_lora" or values["router.combine"] is None,
    )
    scores = {"seq_lora": 0.4, "latent_lora": 0.5}
    for trial in sweep:
        run_to_end(trial, scores[trial.values["method.name"]] + 0.2 * (trial.values["router.combine"] is not None), 0.0)
    found = compared(open_sweep(sweep.path), "method=seq_lora", over=["combine"])["method=latent_lora"]
    assert (found.n, found.differences["AP"].mean) == (2, pytest.approx(0.2))


def test_what_an_entry_leaves_out_is_what_it_resolves_to(tmp_path):
    """In tables, data frames, a tracker and for `--baseline`; only what a trial does not read is nothing."""
    axes = {
        "router.combine": [None, "oracle"],
        "router.scope": [None, "prompt"],
        "benchmark.tasks": [None],
        "seed": [0],
    }
    sweep = resolved(
        write_sweep(tmp_path, axes),
        lambda values: {
            "router.combine": values["router.combine"] or "soft",
            "router.scope": values["router.scope"] or "input_only",
            "benchmark.tasks": "sentiment summary intent",
        },
        lambda values: values["router.combine"] is None or values["router.scope"] is None,
    )
    for trial in sweep:
        run_to_end(trial, 0.5, 0.0)
    told = [("soft", "input_only", None), ("soft", "prompt", None), ("oracle", None, None)]
    summary = summaries.summarize(sweep, baseline=["combine=soft", "router.scope=prompt"])
    records = report.records(summary)
    assert [(row["combine"], row["scope"], row["tasks"]) for row in records] == told
    assert [row["baseline"] for row in records] == ["scope=prompt", None, "scope=prompt"]
    assert report.render(summary).splitlines()[4].split()[:2] == ["combine=soft", "scope=input_only"]
    frame = SweepResults(sweep).trials()
    assert (
        list(zip(*(frame[name].replace({np.nan: None}) for name in ("combine", "scope", "tasks")), strict=True)) == told
    )
    params = [trial_content(sweep, trial, trial.events()).params for trial in sweep]
    assert [(each["combine"], each["scope"]) for each in params] == [told[0][:2], told[1][:2], ("oracle", "-")]


@pytest.mark.parametrize("null", ["max_steps=null", "max_steps=-", "method=seq_lora max_steps=-"])
def test_a_baseline_with_a_setting_that_is_null_is_named_by_it(tmp_path, null):
    """What leaves it open fits both, whatever the label of one of them is."""
    sweep = write_sweep(tmp_path, {"method.name": ["seq_lora"], "training.max_steps": [None, 8], "seed": [0]})
    with pytest.raises(ConfigError, match=r"fits several .*\n  method=seq_lora max_steps=-\n  method=seq_lora max_st"):
        compared(sweep, "method=seq_lora")
    assert compared(sweep, null)["method=seq_lora max_steps=8"].baseline == "method=seq_lora"


def test_null_is_a_value_that_repeats_like_any_other(tmp_path):
    """Not the sign of a setting that a trial does not read: then trials of all steps would be averaged."""
    axes = {"method.name": ["seq_lora", "o_lora"], "training.max_steps": [None, 8], "seed": [0, 1]}
    sweep = write_sweep(tmp_path, axes)
    for trial in sweep:
        if trial.values["method.name"] == "o_lora" or trial.values["training.max_steps"] is None:
            run_to_end(trial, 0.8 if trial.values["training.max_steps"] is None else 0.2, 0.0)
    found = compared(sweep, "method=seq_lora", over=["max_steps"])["method=o_lora"]
    assert (found.n, found.differences["AP"].mean) == (2, 0.0)
    assert found.averaged == ()


def test_a_baseline_named_by_its_method_is_that_of_the_same_tasks(tmp_path):
    """Where one of the subsets is null, the whole order, the name alone is the label of that configuration."""
    axes = {"benchmark.tasks": [None, ["sentiment"]], "method.name": ["seq_lora", "o_lora"], "seed": [0]}
    found = compared(write_sweep(tmp_path, axes), "method=seq_lora")
    assert {name: one.baseline for name, one in found.items() if "o_lora" in name} == {
        "method=o_lora": "method=seq_lora",
        'tasks=["sentiment"] method=o_lora': 'tasks=["sentiment"] method=seq_lora',
    }


def test_a_comparison_tells_of_trials_that_were_stopped(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    *others, last = sweep
    for trial in others:
        run_to_end(trial, 0.5, 0.0)
    start(last)
    last.journal.append("stopped", tasks_seen=1, reason="others had a higher AP")
    text = report.render(summaries.summarize(sweep, (), ["method=seq_lora"]))
    assert "a scheduler has stopped some trials, the worse ones: a difference of what is left" in text


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("method=gain_lora", r"'method=gain_lora' fits no configuration; expected .*\n  method=seq_lora combine=sum"),
        ("method=o_lora", r"'method=o_lora' fits several .* with order=1; .*\n  method=o_lora combine=sum order=1\n"),
        ("method=o_lora combine=sum order=1", r"fits no configuration with order=2"),
    ],
)
def test_a_baseline_that_is_not_one_names_what_there_is(tmp_path, wanted, expected):
    with pytest.raises(ConfigError, match=expected):
        compared(write_sweep(tmp_path, MIXED), wanted)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_the_tables_of_all_formats(sweep):
    summary = summaries.summarize(sweep, baseline=["method=seq_lora"])
    difference = summary.configurations[1].comparison.differences["AP"]
    low, high = (round(100 * bound, 2) for bound in difference.interval)
    cell = f"{100 * difference.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    text, markdown, latex = (report.render(summary, format) for format in ("text", "markdown", "latex"))
    assert "Differences from the baseline (percentage points)\n\nmethod  n  AP" in text
    assert "baseline: method=seq_lora\n" in text
    assert f"\no_lora  3  {cell}  +8.61 [" in text
    assert "  -19.00 [" in text
    escaped = cell.replace("[", r"\[").replace("]", r"\]")
    assert rf"| o_lora | 3 | {escaped} | +8.61 \[" in markdown
    assert "AP: repetitions and rows; LA, BWT, FM: repetitions" in " ".join(section(summary, "compared").notes)
    assert f"O-LoRA & $3$ & ${cell.replace(' [', chr(92) + ' [')}$ & $+8.61" in latex
    assert "baseline: SeqLoRA." in latex.partition(r"\label{tab:lambda-compared}")[2].partition(r"\end{table}")[0]
    baseline, ours = csv.DictReader(io.StringIO(report.render(summary, "csv")))
    assert (baseline["AP_difference"], baseline["baseline"], baseline["n_pairs"]) == ("", "", "0")
    assert [ours[f"AP_difference{part}"] for part in ("", "_low", "_high")] == [
        f"{100 * value:.4f}" for value in (difference.mean, *difference.interval)
    ]
    assert (ours["baseline"], ours["n_pairs"], ours["FM_difference"]) == ("method=seq_lora", "3", "-19.0000")
    assert (ours["AP_resampled"], ours["FM_resampled"]) == ("repetitions and rows", "repetitions")
    for measure, found in summary.configurations[1].comparison.differences.items():
        assert float(ours[f"{measure}_difference"]) == round(100 * found.mean, 4)
    assert "comparisons" not in text and "3; in brackets" in text
    assert "two to four pairs: too narrow an interval from rows" in text


def test_without_a_baseline_nothing_is_said_of_differences(sweep):
    summary = summaries.summarize(sweep)
    assert not any("ifference" in report.render(summary, format) for format in report.FORMATS)


def test_the_command_compares(sweep, capsys):
    assert main(["report", str(sweep.path), "--baseline", "method=seq_lora"]) == 0
    assert "Differences from the baseline" in capsys.readouterr().out
    assert main(["report", str(sweep.path), "--baseline", "method=lora"]) == 2
    assert "method=o_lora" in capsys.readouterr().err
