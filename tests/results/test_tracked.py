import random

from latent_sweep.results.tracked import _history, unsent


def stage(number, seen, value):
    return {"event": "stage", "time": float(number), "tasks_seen": seen, "scores": {}, "metrics": {"AP": value}}


def test_a_first_bringing_sends_the_newest_value_of_each_step():
    events = [stage(1, 1, 0.5), stage(2, 2, 0.25), stage(3, 1, 0.75)]
    assert [(point.step, point.value) for point in unsent(events, 0)] == [(1, 0.75), (2, 0.25)]


def test_what_has_arrived_is_not_sent_again_and_what_is_told_again_unchanged_is_no_news():
    events = [stage(1, 1, 0.5), stage(2, 1, 0.5), stage(3, 2, 0.25)]
    assert [(point.step, point.value) for point in unsent(events, 1)] == [(2, 0.25)]
    assert unsent(events, 3) == []


def test_the_end_tells_only_what_no_stage_has_told_wherever_the_last_bringing_ended():
    end = {"event": "finished", "time": 3.0, "metrics": {"AP": 0.25, "seconds": 9.0}}
    events = [stage(1, 1, 0.5), stage(2, 2, 0.25), end]
    for arrived in (0, 1, 2):
        assert [point.key for point in unsent(events, arrived)].count("seconds") == 1
    assert [(point.key, point.step) for point in unsent(events, 2)] == [("seconds", 2)]


def test_whenever_it_is_brought_and_whatever_is_lost_the_newest_values_are_there_in_the_end():
    """Bringings at random moments, some of which end after some of the points and before the mark."""
    chance = random.Random(5)
    for _ in range(300):
        events = [stage(n, chance.randint(1, 2), chance.choice([0.25, 0.5])) for n in range(chance.randint(1, 8))]
        sent, arrived = {}, 0
        for told in sorted(chance.sample(range(1, len(events) + 1), k=chance.randint(1, len(events)))):
            points = unsent(events[:told], arrived)
            is_cut = told < len(events) and chance.random() < 0.5
            for point in chance.sample(points, k=chance.randint(0, len(points))) if is_cut else points:
                sent[point.step, point.time] = point.value
            arrived = arrived if is_cut else told
        points = unsent(events, arrived)
        sent |= {(point.step, point.time): point.value for point in points}
        newest = {step: sent[step, time] for step, time in sorted(sent)}
        assert newest == {point.step: point.value for point in _history(events)}
