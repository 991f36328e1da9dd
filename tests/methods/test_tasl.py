"""TaSL: edge cases of importance, and the four cases of consolidation."""

import torch
from helpers.in_turn import (
    begin,
    equal,
    learned,
    method_at_work,
)

from latent_sweep.adapters.lora import outputs_of
from latent_sweep.methods._skill_importance import fused, min_max
from latent_sweep.methods.seq_lora import SeqLora
from latent_sweep.methods.tasl import Tasl, TaslLearner, TaslSettings

SETTINGS = TaslSettings(rank=4, alpha=8.0, dropout=0.0)


def random_snapshot(backbone, seed):
    source = torch.Generator().manual_seed(seed)
    outputs = outputs_of(backbone.targets)
    n = next(iter(backbone.targets.values())).in_features
    A, B = torch.randn(len(outputs), 4, n, generator=source), torch.randn(sum(outputs), 4, generator=source)
    return {"A": A, "B": B, "scores": torch.rand(2, len(outputs), 1, generator=source)}


def learner_of(backbone, previous, **settings):
    s = SETTINGS.model_copy(update=settings)
    return TaslLearner((previous["A"], previous["B"]), outputs_of(backbone.targets), s, previous)


def random_steps(learner, count, seed=0):
    """Call `after_step` with random weights and gradients."""
    source, seen = torch.Generator().manual_seed(seed), []
    for step in range(count):
        for parameter in learner.parameters().values():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=source))
            parameter.grad = torch.randn(parameter.shape, generator=source)
        learner.after_step(step)
        seen.append({n: (p.detach().numpy().copy(), p.grad.numpy().copy()) for n, p in learner.parameters().items()})
    return seen


# --- importance ------------------------------------------------------------------------------------------------------


def test_a_single_step_has_no_importance(backbone):
    learner = learner_of(backbone, random_snapshot(backbone, 0))
    random_steps(learner, 1)
    assert not any(average.any() for average in learner.state().values())


def test_min_max():
    assert min_max(torch.tensor([3.0, 1.0, 2.0])).tolist() == [1.0, 0.0, 0.5]
    assert min_max(torch.full((3,), 7.0)).tolist() == [0.0, 0.0, 0.0]
    tiny = torch.tensor([1e-40, 3e-40], dtype=torch.float64)
    assert min_max(tiny).tolist() == [0.0, 1.0]


# --- consolidation ---------------------------------------------------------------------------------------------------


def test_the_four_cases(backbone):
    """With the median as threshold, half of the units are important to each side."""
    learner = learner_of(backbone, random_snapshot(backbone, 0), percentile=50.0, both_share=0.3)
    before, now = torch.tensor([0.9, 1.0, 0.1, 0.0]), torch.tensor([0.8, 0.0, 1.0, 0.1])
    shares = learner.shares(before.double().view(2, 2, 1), now.double().view(2, 2, 1))
    assert shares.flatten().tolist() == [0.3, 0.0, 1.0, 0.5]
    assert learner.facts() == {
        "units_of_both": 1.0,
        "units_of_past": 1.0,
        "units_of_present": 1.0,
        "units_of_neither": 1.0,
    }


def test_a_unit_at_the_threshold_is_not_important(backbone):
    learner = learner_of(backbone, random_snapshot(backbone, 0), percentile=100.0)
    scores = torch.rand(2, 4, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (learner.shares(scores, scores) == 0.5).all()


def test_fusing_a_pair_with_itself_changes_nothing(backbone):
    """The shares of new and old values sum to one."""
    pair = random_snapshot(backbone, 0)
    source = torch.Generator().manual_seed(1)
    shares = torch.rand(2, len(pair["A"]), 1, dtype=torch.float64, generator=source)
    same = fused(pair, pair, shares, outputs_of(backbone.targets))
    assert all(same[name].allclose(pair[name], rtol=1e-6) for name in "AB")


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_the_first_task_is_not_fused(backbone, bank, tmp_path):
    first = learned(method_at_work(Tasl, backbone, bank), tmp_path, tasks=1)[0]
    plain = learned(method_at_work(SeqLora, backbone, bank), tmp_path, tasks=1)[0]
    assert equal({name: first[name] for name in "AB"}, plain)
    assert float(first["scores"].min()) == 0 and float(first["scores"].max()) == 1
    assert begin(method_at_work(Tasl, backbone, bank)).facts() == {}


def test_a_task_without_steps_changes_nothing(backbone, bank, tmp_path):
    """No unit is important to it alone."""
    method = method_at_work(Tasl, backbone, bank)
    history = learned(method, tmp_path, tasks=1)
    after = begin(method, history).finish()
    assert all(after[name].allclose(history[0][name], rtol=1e-6) for name in ("A", "B", "scores"))
