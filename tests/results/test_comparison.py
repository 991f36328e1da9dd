"""`report --baseline`: what is paired with what, from which files, and how tables say it."""

import csv
import io

import numpy as np
import pytest
from helpers.sweep_folders import TASKS, run_to_end, run_with_rows, start, write_sweep

from latent_sweep.cli import main
from latent_sweep.errors import ConfigError
from latent_sweep.labels import label
from latent_sweep.results import report, summaries

AXES = {"method.name": ["seq_lora", "o_lora"], "seed": [0, 1, 2]}


def rows_of(average, seed, n=40):
    source = np.random.default_rng(seed)
    return {task: source.binomial(1, average, n).astype(float).tolist() for task in TASKS}


def compared(sweep, *baseline, over=()):
    """The comparison of each configuration, by its label."""
    summary = summaries.summarise(sweep, over, baseline)
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
    assert comparison.resampled == "repetitions and rows"
    first, second = (
        [trial.events()[-1]["metrics"]["AP"] for trial in sweep if trial.values["method.name"] == name]
        for name in ("seq_lora", "o_lora")
    )
    difference = comparison.average_performance
    assert difference.mean == pytest.approx(np.mean(second) - np.mean(first))
    assert difference.interval[0] < difference.mean < difference.interval[1]
    assert difference.told_apart
    assert comparison.forgetting.mean == pytest.approx(-0.19)
    assert comparison.forgetting.told_apart


def test_seeds_are_paired_whatever_their_places(tmp_path):
    """Between seeds scores differ by 40 points, within a seed by 1: only the right pairs tell that."""
    sweep = write_sweep(tmp_path, {"seed": [0, 1, 2], "method.name": ["seq_lora", "o_lora"]})
    for trial in sweep:
        seed, better = trial.values["seed"], trial.values["method.name"] == "o_lora"
        run_to_end(trial, 0.1 + 0.4 * seed + (0.01 + 0.001 * seed) * better, 0.0)
    comparison = compared(sweep, "method=seq_lora")["method=o_lora"]
    assert comparison.average_performance.mean == pytest.approx(0.011)
    assert comparison.average_performance.told_apart


def test_what_is_equal_cannot_be_told_apart(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_rows(trial, rows_of(0.5, trial.values["seed"]), 0.2)
    comparison = compared(sweep, "method=seq_lora")["method=o_lora"]
    assert comparison.average_performance.interval == comparison.forgetting.interval == (0.0, 0.0)
    text = report.render(summaries.summarise(sweep, baseline=["method=seq_lora"]))
    assert text.count("+0.00 [+0.00, +0.00], cannot be told apart") == 2


def test_only_repetitions_that_both_have_finished_are_pairs(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for number, trial in enumerate(sweep):
        if number != 1:
            run_to_end(trial, 0.9 if number == 4 else 0.5, 0.0)  # whose partner has not finished
    comparison = compared(sweep, "method=seq_lora")["method=o_lora"]
    assert (comparison.n, comparison.average_performance.mean) == (2, 0.0)


def test_without_rows_repetitions_alone_are_taken(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for number, trial in enumerate(sweep):
        run_to_end(trial, 0.5 + 0.01 * number, 0.0)
    summary = summaries.summarise(sweep, baseline=["method=seq_lora"])
    assert summary.configurations[1].comparison.resampled == "repetitions"
    assert "AP from repetitions alone: Student's t over them" in report.render(summary)


@pytest.mark.parametrize("damage", ["gone", "other", "rows"])
def test_rows_that_are_not_as_the_journal_says_are_not_read(sweep, damage):
    path = next(iter(sweep)).path / "predictions" / "summary.jsonl"
    content = {"other": path.read_text().replace("0.0", "1.0"), "rows": "not even JSON"}
    path.unlink() if damage == "gone" else path.write_text(content[damage])
    assert compared(sweep, "method=seq_lora")["method=o_lora"].resampled == "repetitions"


def test_other_test_rows_are_no_pairs(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_rows(trial, rows_of(0.5, 0, n=30 if trial.values["method.name"] == "o_lora" else 40))
    assert compared(sweep, "method=seq_lora")["method=o_lora"].resampled == "repetitions"


def test_the_same_number_of_other_test_rows_is_no_pair(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    for trial in sweep:
        run_with_rows(trial, rows_of(0.5, 0), rows_from=trial.values["method.name"])
    assert compared(sweep, "method=seq_lora")["method=o_lora"].resampled == "repetitions"


def test_one_repetition_tells_of_rows_alone(tmp_path):
    sweep = write_sweep(tmp_path, AXES | {"seed": [0]})
    for number, trial in enumerate(sweep):
        run_with_rows(trial, rows_of(0.2 + 0.6 * number, 0), 0.1)
    summary = summaries.summarise(sweep, baseline=["method=seq_lora"])
    comparison = summary.configurations[1].comparison
    assert comparison.resampled == "rows"
    assert comparison.average_performance.told_apart
    assert comparison.forgetting.interval is None
    assert "with one pair, an interval tells of other test rows, and nothing of another seed" in report.render(summary)


def test_one_repetition_without_rows_has_no_interval(tmp_path):
    sweep = write_sweep(tmp_path, AXES | {"seed": [0]})
    for number, trial in enumerate(sweep):
        run_to_end(trial, 0.5 + 0.1 * number, 0.0)
    summary = summaries.summarise(sweep, baseline=["method=seq_lora"])
    comparison = summary.configurations[1].comparison
    assert (comparison.resampled, comparison.average_performance.interval) == ("nothing", None)
    assert "o_lora  1  +10.00  +0.00  nothing" in report.render(summary)


def test_before_anything_has_finished_there_is_nothing_to_compare(tmp_path):
    sweep = write_sweep(tmp_path, AXES)
    start(next(iter(sweep)))
    summary = summaries.summarise(sweep, baseline=["method=seq_lora"])
    assert summary.configurations[1].comparison.average_performance is None
    assert all(report.render(summary, format) for format in report.FORMATS)


# --- which one is the baseline ---------------------------------------------------------------------------------------

MIXED = {"method.name": ["seq_lora", "o_lora"], "router.mode": ["sum", "soft"], "benchmark.order": [1, 2], "seed": [0]}


@pytest.mark.parametrize(
    "wanted",
    [
        ["method=seq_lora", "mode=soft"],
        ["method.name=seq_lora", "router.mode=soft"],
        ["method=seq_lora mode=soft order=1"],
    ],
)
def test_a_baseline_is_named_by_settings_or_by_its_label(tmp_path, wanted):
    axes = MIXED | {"benchmark.order": [1]}
    found = compared(write_sweep(tmp_path, axes), *wanted)
    assert found.pop("method=seq_lora mode=soft order=1") is None
    assert {comparison.baseline for comparison in found.values()} == {"method=seq_lora mode=soft order=1"}


def test_each_configuration_is_compared_on_what_it_is_tested_on(tmp_path):
    found = compared(write_sweep(tmp_path, MIXED), "method=seq_lora", "mode=soft")
    assert found["method=o_lora mode=sum order=2"].baseline == "method=seq_lora mode=soft order=2"
    assert found["method=o_lora mode=sum order=1"].baseline == "method=seq_lora mode=soft order=1"


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
    sweep = write_sweep(tmp_path, MIXED | {"router.mode": ["sum"], "seed": [0, 1]})
    for number, trial in enumerate(sweep):
        run_to_end(trial, 0.1 * (number % 4) + 0.2 * (number >= 4), 0.0)
    comparison = compared(sweep, "method=seq_lora", over=["order"])["method=o_lora mode=sum"]
    assert comparison.n == 4
    assert comparison.average_performance.mean == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("method=gain_lora", r"'method=gain_lora' fits no configuration with order=1; .*\n  method=seq_lora mode=sum"),
        ("method=o_lora", r"'method=o_lora' fits several .* with order=1; .*\n  method=o_lora mode=sum order=1\n"),
        ("method=o_lora mode=sum order=1", r"fits no configuration with order=2"),
    ],
)
def test_a_baseline_that_is_not_one_names_what_there_is(tmp_path, wanted, expected):
    with pytest.raises(ConfigError, match=expected):
        compared(write_sweep(tmp_path, MIXED), wanted)


# --- tables ----------------------------------------------------------------------------------------------------------


def test_the_tables_of_all_formats(sweep):
    summary = summaries.summarise(sweep, baseline=["method=seq_lora"])
    difference = summary.configurations[1].comparison.average_performance
    low, high = (round(100 * bound, 2) for bound in difference.interval)
    cell = f"{100 * difference.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    text, markdown, latex = (report.render(summary, format) for format in ("text", "markdown", "latex"))
    assert "Differences from the baseline (percentage points)\n\nmethod  n  AP" in text
    assert "baseline: method=seq_lora\n" in text
    assert f"\no_lora  3  {cell}  -19.00 [" in text
    escaped = cell.replace("[", r"\[").replace("]", r"\]")
    assert rf"| o_lora | 3 | {escaped} | -19.00 \[" in markdown
    assert "| repetitions and rows |" in markdown
    escaped = cell.replace("[", "{[}").replace("]", "{]}")
    assert rf"o\_lora & 3 & {escaped} & -19.00 {{[}}" in latex
    assert "% baseline: method=seq_lora\n" in latex
    baseline, ours = csv.DictReader(io.StringIO(report.render(summary, "csv")))
    assert (baseline["AP_difference"], baseline["baseline"], baseline["n_pairs"]) == ("", "", "0")
    assert [ours[f"AP_difference{part}"] for part in ("", "_low", "_high")] == [
        f"{100 * value:.2f}" for value in (difference.mean, *difference.interval)
    ]
    assert (ours["baseline"], ours["n_pairs"], ours["FM_difference"]) == ("method=seq_lora", "3", "-19.00")
    assert ours["AP_resampled"] == "repetitions and rows"
    assert "comparisons" not in text
    assert "AP of two to four pairs: too narrow an interval" in text


def test_without_a_baseline_nothing_is_said_of_differences(sweep):
    summary = summaries.summarise(sweep)
    assert not any("ifference" in report.render(summary, format) for format in report.FORMATS)


def test_several_comparisons_carry_a_warning(tmp_path):
    sweep = write_sweep(tmp_path, {"method.rank": [4, 8, 16], "seed": [0, 1]})
    for number, trial in enumerate(sweep):
        run_to_end(trial, 0.1 * number, 0.0)
    text = report.render(summaries.summarise(sweep, baseline=["rank=4"]))
    assert "2 comparisons, not corrected for their number" in text


def test_the_command_compares(sweep, capsys):
    assert main(["report", str(sweep.path), "--baseline", "method=seq_lora"]) == 0
    assert "Differences from the baseline" in capsys.readouterr().out
    assert main(["report", str(sweep.path), "--baseline", "method=lora"]) == 2
    assert "method=o_lora" in capsys.readouterr().err
