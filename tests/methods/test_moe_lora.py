"""MoELoRA: experts against direct formulas, what a task starts from, and what is refused."""

import pytest
import torch
from helpers.in_turn import begin, method_at_work
from helpers.rounding import assert_same_to_rounding
from helpers.sweeps import tiny

from latent_sweep.adapters.experts import ExpertDelta, ExpertDeltas
from latent_sweep.adapters.lora import LoraDeltas
from latent_sweep.errors import ConfigError
from latent_sweep.methods.moe_lora import MoeLora
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.plan import expand


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def method(backbone, bank):
    return method_at_work(MoeLora, backbone, bank, rank=6, experts=3)


def test_a_single_expert_is_a_lora_pair():
    A, B, h = drawn(2, 3, 5), drawn(8, 3), drawn(2, 7, 5)
    experts = ExpertDeltas(A, B, drawn(2, 1, 5), [4, 4], 2.0)
    pair = LoraDeltas(A, B, [4, 4], 2.0)
    for one, other in zip(experts, pair, strict=True):
        assert_same_to_rounding(one(h, torch.zeros(2, 7, 4)), other(h, torch.zeros(2, 7, 4)))


def test_dropout_spares_the_router():
    A, B, router, h = drawn(6, 5), drawn(4, 6), drawn(3, 5), drawn(2, 7, 5)
    torch.manual_seed(3)
    dropped = ExpertDelta(A, B, router, 0.5)
    actual = dropped(h, torch.zeros(2, 7, 4))
    torch.manual_seed(3)
    x = torch.nn.functional.dropout(h, 0.5)
    gates = (h @ router.T).softmax(-1).repeat_interleave(2, -1)
    assert_same_to_rounding(actual, ((x @ A.T) * gates) @ B.T)
    assert not dropped.uniform and ExpertDelta(A, B, router, 0.0).uniform


def test_the_first_task_starts_as_released(method):
    start = begin(method).parameters()
    assert not start["B"].any()
    assert float(start["A"].detach().std()) == pytest.approx(0.01, rel=0.2)
    bound = max(method.inputs) ** -0.5
    assert 0.9 * bound < float(start["routers"].detach().abs().max()) <= bound


@pytest.mark.parametrize(
    ("method", "backbone", "path"),
    [({"rank": 6}, "tiny-llama", "experts"), ({"preset": "official"}, "tiny-t5", "preset")],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused_while_the_sweep_is_planned(method, backbone, path):
    changes = {"trial__method": {"name": "moe_lora", **method}, "trial__backbone": {"name": backbone}, "search": {}}
    with pytest.raises(ConfigError, match=rf"method.*: .*{path}|method\.{path}"):
        expand(parse_sweep(tiny(**changes), "sweep.yaml"))
