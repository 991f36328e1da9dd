"""Which trials are tried again, and how: from what their journals say."""

import pytest

from latent_sweep.retries import Attempt, GivenUp, next_attempt, retries

STARTED, STAGE = {"event": "started"}, {"event": "stage", "tasks_seen": 1}


def lost(kind):
    return {"event": "lost", "kind": kind, "message": kind}


def failed(kind):
    return {"event": "failed", "kind": kind, "message": f"it was {kind}"}


def after(*ends, max_failures=1):
    return next_attempt([event for end in ends for event in (STARTED, end)], max_failures)


def test_a_trial_that_nothing_happened_to_is_simply_tried():
    assert next_attempt([], 3) == Attempt()
    assert next_attempt([STARTED, STAGE], 3) == Attempt()


@pytest.mark.parametrize("kind", ["preempted", "node_lost"])
def test_losing_the_node_is_free(kind):
    assert after(*[lost(kind)] * 20, max_failures=0) == Attempt(because=kind)


def test_a_worker_may_die_so_often_in_a_row():
    assert after(lost("worker_died")) == Attempt(because="worker_died")
    given_up = after(lost("worker_died"), lost("worker_died"))
    assert isinstance(given_up, GivenUp)
    assert "2 times" in given_up.because
    assert "max_failures" in given_up.because


def test_a_finished_task_begins_a_new_row_of_deaths():
    events = [STARTED, lost("worker_died"), STARTED, STAGE, lost("worker_died")]
    assert next_attempt(events, 1) == Attempt(because="worker_died")


def test_a_node_lost_in_between_does_not_excuse_deaths():
    assert isinstance(after(lost("worker_died"), lost("node_lost"), lost("worker_died")), GivenUp)


@pytest.mark.parametrize("end", [lost("out_of_memory"), failed("out_of_memory")])
def test_out_of_memory_is_tried_once_more_with_half_the_rows(end):
    assert after(end, max_failures=0) == Attempt(halved=True, because="out_of_memory")
    assert after(end, lost("node_lost")) == Attempt(halved=True, because="node_lost"), "and stays halved"
    assert isinstance(after(end, failed("out_of_memory")), GivenUp)


@pytest.mark.parametrize("kind", ["error", "non_finite"])
def test_a_fault_of_the_trial_is_not_tried_again(kind):
    assert after(failed(kind), max_failures=9) == GivenUp(f"it was {kind}")


def test_retries_are_told_with_their_reasons():
    events = [STARTED, lost("preempted"), STARTED, failed("out_of_memory"), STARTED, STAGE, failed("error")]
    assert retries(events) == ["preempted", "out_of_memory"], "the last end was not tried again"
    assert retries([]) == []
