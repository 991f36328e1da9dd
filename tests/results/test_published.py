"""The paper's numbers next to those of a sweep."""

import pytest
from helpers.sweep_folders import finished_sweep, run_to_end, write_sweep

from latent_sweep.report import report
from latent_sweep.results import summaries
from latent_sweep.results.published import content, find_published

STREAMS = {"1": "superni", "2": "superni", "3": "long_sequence", "4": "long_sequence"}
T5 = {"backbone.name": "t5-large", "method.name": "latent_lora", "benchmark.order": "1", "router.combine": "soft"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 48.60, 0.01)),
        ({"benchmark.order": 4}, (1, 79.87, 0.73)),
        ({"method.name": "o_lora", "router.combine": "sum"}, (1, 27.91, 17.23)),
        ({"method.name": "seq_lora", "router.combine": None, "benchmark.order": "2"}, (1, 7.17, 47.22)),
        ({"method.name": "gain_lora", "router.combine": "gates", "backbone.name": "llama-2-13b"}, (3, 54.93, 1.98)),
        ({"backbone.name": "t5-3b", "benchmark.order": "3"}, (2, 81.61, 0.74)),
        ({"router.combine": "sum", "method.ortho_lambda": 0.0}, (4, 16.71, 30.11)),
        ({"router.combine": "sum", "method.ortho_lambda": 1e-5}, (4, 33.30, 12.94)),
        ({"router.combine": "hard"}, None),
        ({"method.name": "o_lora", "router.combine": "soft"}, None),
        ({"backbone.name": "smollm2-135m"}, None),
        ({"backbone.name": "llama-2-7b", "benchmark.order": "3"}, None),
        ({"router.combine": "sum"}, None),
        ({"benchmark.name": "own/benchmark.yaml"}, None),
        ({"benchmark.name": "long_sequence"}, None),
        ({"benchmark.score_on": "validation"}, None),
        ({"benchmark.prompts.definition": "none"}, None),
    ],
)
def test_configurations_and_their_cells(changes, expected):
    order = str((T5 | changes)["benchmark.order"])
    result = find_published(T5 | {"benchmark.name": STREAMS[order]} | changes, 15)
    numbers = None if result is None else (result.table, 100 * result.average_performance, 100 * result.forgetting)
    assert numbers == (None if expected is None else pytest.approx(expected))
    assert find_published(T5 | {"benchmark.name": STREAMS[order]} | changes, 5) is None


def test_all_cells_are_stored():
    counts = {}
    for row in content()["rows"]:
        counts[row["table"]] = counts.get(row["table"], 0) + len(row["orders"])
        assert all(0 <= value <= 100 for numbers in row["orders"].values() for value in numbers)
    assert counts == {1: 11 * 4, 2: 3 * 4, 3: 9 * 2, 4: 2 * 4}


@pytest.fixture
def reproduced(tmp_path, monkeypatch):
    """Two methods on streams that count as the paper's."""
    monkeypatch.setattr("latent_sweep.results.published.TASKS", 3)
    sweep = finished_sweep(
        tmp_path,
        {"method.name": ["latent_lora", "ours:Method"], "router.combine": ["soft"], "seed": [0, 1]},
        (0.50, 0.48, 0.3, 0.3),
        forgetting=0.02,
    )
    return summaries.summarize(sweep)


def test_the_gap_is_ours_minus_the_papers(reproduced):
    text = report.render(reproduced)
    lines = text.partition("Compared with the paper\n\n")[2].splitlines()
    assert lines[0].split("  ")[0] == "method"
    assert lines[2].split() == ["latent_lora", "soft", "1", "48.60", "49.00", "+0.40", "0.01", "2.00", "+1.99", "-"]
    assert lines[3] == ""  # a plugin method has no cell


def test_reduced_protocols_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("latent_sweep.results.published.TASKS", 3)
    sweep = write_sweep(tmp_path, {"router.combine": ["soft"], "benchmark.train_per_task": [96], "seed": [0]})
    run_to_end(next(iter(sweep)), 0.5, 0.0)
    assert "benchmark.train_per_task=96\n" in report.render(summaries.summarize(sweep))
