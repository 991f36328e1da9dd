"""Launches of a step at real depth, worked out from shallow models: every layer more costs the same."""

import pytest
from helpers.steady_steps import workshop
from tools.launches import DEPTHS, shallow

SHALLOW = 2, 3
MOST_ABOVE_BARE = 8
"""Launches per adapted projection: two products forward, three or four backward, and adding gradients."""

MORE_OF_A_PACK = 0.02
"""How much more a pack of 8 launches than a pack of 1, at most.

Whatever the depth, some six for each member more: its loss is a sum of its own, and its gradient arrives by itself.
"""


def launches(name, kind, depth, folder, method="latent_lora"):
    """Of the bare backbone, one learner and a pack of 8, and how many projections there are."""
    with workshop(shallow(name, depth), folder) as here:
        steps = [here.bare_step(kind), *(here.step(method, members, kind) for members in (1, 8))]
        return [*(step.launches.total() for step in steps), len(here.backbone.targets)]


@pytest.mark.parametrize(
    ("name", "kind", "method"),
    [
        ("t5-large", "apart", "latent_lora"),
        ("llama-2-7b", "apart", "latent_lora"),
        pytest.param("llama-2-7b", "apart", "seq_lora", marks=pytest.mark.slow),
        ("llama-2-7b", "prefix", "latent_lora"),
    ],
)
def test_launches_at_real_depth(name, kind, method, tmp_path):
    less, more = (launches(name, kind, depth, tmp_path, method) for depth in SHALLOW)
    a_layer = [b - a for a, b in zip(less, more, strict=True)]
    bare, one, _, projections = a_layer
    assert 4 <= (one - bare) / projections <= MOST_ABOVE_BARE
    _, one, pack, _ = (a + (DEPTHS[name] - SHALLOW[0]) * each for a, each in zip(less, a_layer, strict=True))
    assert 1 < pack / one <= 1 + MORE_OF_A_PACK


@pytest.mark.slow
def test_every_layer_costs_the_same(tmp_path):
    few, some, many = (launches("llama-3-8b", "prefix", depth, tmp_path) for depth in (2, 4, 8))
    assert [b - a for a, b in zip(few, some, strict=True)] == [(b - a) / 2 for a, b in zip(some, many, strict=True)]
