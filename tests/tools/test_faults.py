"""Faults injected into a real sweep cost a few steps and nothing else; all of them: `make faults`."""

from collections import Counter

import pytest
from helpers.sweep_folders import run_to_end, write_sweep
from tools import faults


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return faults.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.SHORT)
def test_a_fault_costs_a_few_steps_and_nothing_else(name, tmp_path, undisturbed):
    outcome = faults.disturb(faults.FAULTS[name], tmp_path, undisturbed)
    assert outcome.broken() == [], outcome


def taken(*stages):
    """Steps of stages: (training, position, first step, last step)."""
    return Counter((training, at, step) for training, at, first, last in stages for step in range(first, last + 1))


def test_steps_and_stages_that_were_done_twice_are_told_apart():
    resumed = taken(("a", 0, 1, 9), ("a", 1, 1, 7), ("a", 1, 5, 9), ("b", 0, 1, 9))
    assert faults.learned_again(resumed) == []
    assert faults.taken_twice(resumed) == {"a": 3}
    learned_again = resumed + taken(("b", 0, 1, 9))
    assert faults.learned_again(learned_again) == [("b", 0)]
    assert faults.taken_twice(learned_again) == {"a": 3}


def test_a_promise_that_was_not_kept_is_named():
    fault = faults.FAULTS["worker"]
    kept = {"committed": 9, "lost": [], "twice": [faults.CHECKPOINT_EVERY, 3], "again": 0, "equal": True}
    assert faults.Outcome(fault, **kept, seen="", seconds=1.0).broken() == []
    broken = {"lost": ["row 0 of t"], "twice": [faults.CHECKPOINT_EVERY + 1], "again": 1, "equal": False}
    promises = faults.Outcome(fault, **kept | broken, seen="", seconds=1.0).broken()
    assert [promise.split()[0] for promise in promises] == ["lost:", "a", "1", "the"]
    snapshot = faults.Outcome(faults.FAULTS["snapshot"], **kept, seen="", seconds=1.0)
    assert snapshot.broken() == ["0 stages were learned twice; expected 1"], "the corrupt one was used"


def test_what_was_committed_and_is_gone_or_changed_is_seen(tmp_path):
    sweep = write_sweep(tmp_path, {"seed": [0]})
    (trial,) = sweep
    run_to_end(trial, 0.5, 0.0)
    (tmp_path / "snapshots" / "a.json").write_text("{}")
    (tmp_path / "snapshots" / "a.safetensors").write_bytes(b"1")
    before = faults.committed(sweep)
    assert len(before) == 5 + 3 + 2  # events, rows, the two files of a snapshot; one without facts is not committed
    (tmp_path / "snapshots" / "a.safetensors").write_bytes(b"2")
    (trial.path / "scores.json").unlink()
    rows = [f"row {number} of {trial.trial_id}" for number in range(3)]
    assert faults.lost(before, faults.committed(sweep)) == [*rows, "a.safetensors"]
