"""Several drivers split one sweep by the identities of its trials."""

import random

import pytest
from helpers.sweeps import tiny

from latent_sweep.errors import ConfigError
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.packs import pack
from latent_sweep.sweep.plan import expand
from latent_sweep.sweep.shards import Shard

SEARCH = {"seed": [0, 1, 2, 3], "method.ortho_lambda": [0.0, 1e-5, 1e-3], "router.epsilon": [0.01, 0.1]}
"""Four groups of three trainings that share their first stage, with two trials each."""


@pytest.fixture(scope="module")
def trials():
    return expand(parse_sweep(tiny(search=SEARCH), "test"))


def parts(packs, count, separable=False):
    """The ids of the trials of each shard."""
    shards = [Shard(number, count).of(packs, separable) for number in range(1, count + 1)]
    return [frozenset(trial.trial_id for one in shard for trial in one.trials) for shard in shards]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 12, 20])
@pytest.mark.parametrize(("together", "separable"), [(1, False), (2, False), (["seed"], False), ("auto", True)])
def test_the_parts_are_disjoint_and_complete(trials, together, separable, count):
    packs = pack(trials, together)
    shards = parts(packs, count, separable)
    assert sum(map(len, shards)) == len(trials)
    assert frozenset().union(*shards) == {trial.trial_id for trial in trials}
    if not separable:
        whole = {one.pack_id for one in packs}
        assert {one.pack_id for n in range(count) for one in Shard(n + 1, count).of(packs)} == whole


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_the_split_does_not_depend_on_the_order(trials, count):
    shuffled = list(trials)
    random.Random(0).shuffle(shuffled)
    assert parts(pack(shuffled), count) == parts(pack(trials), count)
    assert parts(pack(shuffled, "auto"), count, True) == parts(pack(trials, "auto"), count, True)


def test_trainings_that_share_a_stage_stay_together(trials):
    seeds = {trial.trial_id: trial.settings.seed for trial in trials}
    for count in (2, 4):
        shards = parts(pack(trials), count)
        assert [len({seeds[trial_id] for trial_id in shard}) for shard in shards] == [4 // count] * count
        assert {len(shard) for shard in shards} == {len(trials) // count}
    assert all(parts(pack(trials), 8)), "with more shards than groups, packs are dealt out"
    assert sorted(map(len, parts(pack(trials), 20)), reverse=True) == [2] * 12 + [0] * 8, "trials of a training stay"


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/0", "-1/2", "a/b", "1/2/3", ""])
def test_an_impossible_shard_is_refused(text):
    with pytest.raises(ConfigError, match="--shard"):
        Shard.parse(text)


def test_a_shard_is_parsed():
    assert Shard.parse("3/8") == Shard(3, 8)
    assert Shard.parse("8/8").name == "8-of-8"
