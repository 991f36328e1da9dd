"""run_pack: for each task, learn what is missing, score what is missing, say so."""

import itertools

import pytest
from helpers.tiny import learns

from latent_sweep.errors import ConfigError, NonFiniteLoss
from latent_sweep.storage.journal import status
from latent_sweep.training.engine import forget_backbone
from latent_sweep.training.events import StageDone
from latent_sweep.training.pack import run_pack

SMALL = {"trial__benchmark": {"name": "builtin", "tasks": ["mood", "ticket"], "train_per_task": 8, "test_per_task": 3}}
BRIEF = {"learning_rate": 0.1, "epochs": 1, "batch_size": 4}


def small(**changes):
    return SMALL | {"trial__training": BRIEF} | changes


def doing(event):
    """What an event tells of, and of which task."""
    return ("said", event.tasks_seen - 1) if isinstance(event, StageDone) else (event.doing, event.position)


def told(runs, pack):
    """The events of each trial's journal."""
    return [[event.name for event in runs.sweep.journal(trial.trial_id).read()] for trial in pack.trials]


def stages(runs, trial):
    return [event for event in runs.sweep.journal(trial.trial_id).read() if event.name == "stage"]


def test_each_task_is_learned_then_scored_then_said(runs):
    (pack,) = runs.packs(**small(search={"router.components": [1, 2]}))
    events = []
    runs.run([pack], events.append)
    order = [what for what, _ in itertools.groupby(map(doing, events))]
    assert order == [("learning", 0), ("scoring", 0), ("said", 0), ("learning", 1), ("scoring", 1), ("said", 1)]
    assert [len(event.matrices) for event in events if isinstance(event, StageDone)] == [2, 2], "one for each trial"
    assert told(runs, pack) == [["started", "stage", "stage", "finished"]] * 2


def test_what_takes_a_while_is_told_when_it_begins(runs):
    (pack,) = runs.packs(**small(search={"router.components": [1]}))
    events = []
    forget_backbone()
    run_pack(pack, runs.sweep, events.append)
    order = [what for what, _ in itertools.groupby(map(doing, events))]
    checking, router, answering = ("checking", None), ("fitting the router", 0), ("answering", 0)
    assert order[: order.index(("said", 0))] == [
        ("loading the backbone", None),
        *(checking, ("preparing", None), checking),  # the method itself, and back at what it was made for
        *(("tokenizing", 0), checking, ("tokenizing", 1), checking) * 2,  # rows to learn from, and those of tests
        *(router, checking, ("fitting the router", 1), checking) * 2,  # the tasks' records, and the stages
        *(("preparing", 0), ("learning", 0)),
        *(router, answering, ("scoring", 0)),
    ]


def test_a_variant_that_comes_later_is_scored_and_not_learned(runs):
    runs.run(runs.packs(**small(search={"router.components": [1]})))
    (pack,), events = runs.packs(**small(search={"router.components": [1, 2]})), []
    runs.run([pack], events.append)
    assert not any(map(learns, events))
    assert [doing(event) for event in events if isinstance(event, StageDone)] == [("said", 0), ("said", 1)]
    assert told(runs, pack) == [["started", "stage", "stage", "finished"]] * 2


def test_definitions_of_test_prompts_share_what_is_learned(runs):
    """A trial each, one training; each is scored on prompts of its own."""
    axis = {"benchmark.prompts.definition": ["verbatim", "paraphrase", "none"]}
    (pack,) = runs.packs(**small(search=axis))
    events = []
    runs.run([pack], events.append)
    assert len({(event.position, event.step) for event in events if learns(event)}) == sum(map(learns, events))
    assert told(runs, pack) == [["started", "stage", "stage", "finished"]] * 3
    shares = [stage.metrics["generated_share"] for trial in pack.trials for stage in stages(runs, trial)[:1]]
    assert shares == [1.0] * 3, "no prompt of one is another's"


def test_a_member_that_fails_leaves_and_the_others_go_on(runs):
    rates = {"training.learning_rate": [0.1, 1e30]}
    (pack,) = runs.packs(**small(search=rates, run__pack=["training.learning_rate"]))
    with pytest.raises(NonFiniteLoss):
        runs.run([pack])
    well, ill = told(runs, pack)
    assert well == ["started", "stage", "stage", "finished"]
    assert ill[-1] == "failed"
    assert "stage" not in ill[2:]


def test_what_stops_the_whole_pack_is_told_to_all_its_trials(runs, monkeypatch):
    (pack,) = runs.packs(**small(search={"seed": [0, 1]}, run__pack=["seed"]))
    monkeypatch.setattr("latent_sweep.training.context.backbone_identity", lambda settings: {"weights": "others"})
    with pytest.raises(ConfigError, match="the sweep was planned with"):
        runs.run([pack])
    assert told(runs, pack) == [["started", "failed"]] * 2


def test_a_trial_that_a_scheduler_has_stopped_goes_no_further(runs):
    (pack,), trials = runs.packs(**small(search={"router.components": [1, 2]})), []

    def stop_one(event):
        if isinstance(event, StageDone) and event.tasks_seen == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run([pack], stop_one)
    first, second = (runs.sweep.journal(trial.trial_id) for trial in pack.trials)
    first.append("stopped", tasks_seen=1, reason="others had a higher AP")
    runs.run([pack], trials.append)
    assert [event.name for event in first.read()] == ["started", "stage", "stopped"]
    assert status(second.read()) == "finished"
    assert [len(event.matrices) for event in trials if isinstance(event, StageDone)] == [1, 1], "the other's alone"


def test_a_pack_with_nothing_to_do_loads_nothing(runs, monkeypatch):
    (pack,) = runs.packs(**small(search={"seed": [0]}))
    runs.run([pack])
    monkeypatch.setattr("latent_sweep.training.engine.load_backbone", lambda settings: pytest.fail("nothing is needed"))
    run_pack(pack, runs.sweep, lambda event: pytest.fail("there is nothing to say"))
