"""Random kills do not change what a sweep ends with; thirty of them, also with Ray and objects: `make chaos`."""

from collections import Counter

import pytest
from helpers.messages import mentions
from helpers.sweep_folders import finish, learn, run_to_end, start, write_sweep
from tools import chaos

from latent_sweep.errors import StorageError


@pytest.mark.slow
def test_a_sweep_that_is_killed_at_random_ends_as_if_it_had_not_been(capsys):
    assert chaos.main(["--seed", "5", "--kills", "3", "--modes", "local"]) == 0, capsys.readouterr().out
    assert "3 kills in" in capsys.readouterr().out


def test_a_seed_always_means_the_same_kills():
    kills = chaos.planned(7, 30)
    assert chaos.planned(7, 30) == kills != chaos.planned(8, 30)
    assert Counter(kill.mode for kill in kills) == dict.fromkeys(chaos.MODES, 10)
    assert {kill.kind for kill in kills} == set(chaos.KINDS)
    assert {(kill.mode, kill.target) for kill in kills} == {(m, t) for m in chaos.MODES for t in chaos.TARGETS[m]}


def test_steps_that_were_taken_again_belong_to_the_kill_before():
    def landed(step):
        return chaos.Landed(chaos.planned(0, 1)[0], "", step)

    steps = ["a 0 1", "a 0 2", "b 0 1", "a 0 2", "a 0 3", "b 0 1", "b 0 2", "a 1 1", "a 0 3", "a 1 1"]
    kills = [landed(3), landed(8)]
    assert chaos.repeated(steps, kills) == 0
    assert [kill.twice for kill in kills] == [{"a": 1, "b": 1}, {"a": 2}]
    assert kills[1].row(2).endswith("| 2 |")
    assert chaos.repeated(steps, []) == 4, "a step that is taken twice though nothing was killed"
    left_behind = [landed(1)]  # what a driver's worker still does before it notices counts too
    assert chaos.repeated(["a 0 1", "a 0 2", "a 0 1", "a 0 2"], left_behind) == 0
    assert left_behind[0].twice == {"a": 2}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("steps 99bd9a11191c301e 1 32", "step 32 of task 2 of 99bd"),
        ("files before replace /tiny/trials/511ede3f9f2c8011/a.json", "before replace of `tiny/trials/511e/a.json`"),
        (f"files after fsync /tiny/.sweep.json.{'0f' * 16}.partial", "after fsync of `tiny/sweep.json`"),
    ],
)
def test_a_moment_is_described_briefly(what, words):
    assert chaos.moment(what) == words


def test_what_differs_from_the_undisturbed_run_is_named():
    expected = {"scores.json": b"1", "snapshot": b"2"}
    assert chaos.differences(expected, dict(expected)) == []
    (changed,) = chaos.differences(expected, {**expected, "snapshot": b"3"})
    assert changed.startswith("snapshot differs")
    assert len(chaos.differences(expected, {"another": b"1"})) == 3


def test_a_journal_that_lacks_something_is_named(tmp_path):
    sweep = write_sweep(tmp_path, {"seed": [0, 1]})
    whole, cut = sweep
    run_to_end(whole, 0.5, 0.0)
    start(cut)
    learn(cut, 1, 0.5)
    assert len(chaos.journal_faults(sweep)) == 1
    assert mentions(chaos.journal_faults(sweep)[0], "running", "[1]")
    finish(cut, 0.5, 0.0)
    (missing,) = chaos.journal_faults(sweep)
    assert mentions(missing, "finished", "[1]")
    journal = whole.path / "journal.jsonl"
    journal.write_text(
        "".join(line for line in journal.read_text().splitlines(keepends=True) if '"seq": 1,' not in line)
    )
    with pytest.raises(StorageError, match=r"journal\.jsonl, line 2: "):
        chaos.journal_faults(sweep)
