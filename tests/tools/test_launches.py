"""Launches of a step at real depth, worked out from shallow models: every layer more costs the same."""

import pytest
from helpers.steady_steps import workshop
from tools.launches import DEPTHS, shallow

SHALLOW = 2, 3
MOST_ABOVE_BARE = 8
"""Launches per adapted projection: two products forward, three or four backward, and adding gradients."""

MORE_OF_A_PACK = {("t5-large", "apart"): 0.04, ("llama-2-7b", "apart"): 0.055, ("llama-2-7b", "prefix"): 0.085}
"""How much more a pack of 8 launches than a pack of 1, at most, by the kind of its rows.

Whatever the depth, 27 for each member more: its own cross-entropy, its penalty, and their gradients. Where rows share a
prefix, in every layer 14 more that add up what its rows say of it, and 4 copies.
"""


def launches(name, kind, depth, folder):
    """Of the bare backbone, one learner and a pack of 8, and how many projections there are."""
    with workshop(shallow(name, depth), folder) as here:
        steps = [here.bare_step(kind), *(here.step("latent_lora", members, kind) for members in (1, 8))]
        return [*(step.launches.total() for step in steps), len(here.backbone.targets)]


@pytest.mark.parametrize(("name", "kind"), MORE_OF_A_PACK)
def test_launches_at_real_depth(name, kind, tmp_path):
    less, more = (launches(name, kind, depth, tmp_path) for depth in SHALLOW)
    a_layer = [b - a for a, b in zip(less, more, strict=True)]
    bare, one, _, projections = a_layer
    assert 4 <= (one - bare) / projections <= MOST_ABOVE_BARE
    _, one, pack, _ = (a + (DEPTHS[name] - SHALLOW[0]) * each for a, each in zip(less, a_layer, strict=True))
    assert 1 < pack / one <= 1 + MORE_OF_A_PACK[name, kind]


@pytest.mark.slow
def test_every_layer_costs_the_same(tmp_path):
    few, some, many = (launches("llama-3-8b", "prefix", depth, tmp_path) for depth in (2, 4, 8))
    assert [b - a for a, b in zip(few, some, strict=True)] == [(b - a) / 2 for a, b in zip(some, many, strict=True)]
