"""TaSL: importance of weights and matrices, the four cases of its consolidation, and the scores that it accumulates."""

import numpy as np
import pytest
import torch
from helpers.in_turn import (
    begin,
    check_cut_and_resumed,
    check_identity_is_what_training_reads,
    equal,
    learned,
    lesson,
    method_at_work,
)
from helpers.tiny import bank_of
from pydantic import ValidationError

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
    """Run `after_step` with random weights and gradients; returns both for every step and parameter."""
    source, seen = torch.Generator().manual_seed(seed), []
    for step in range(count):
        for parameter in learner.parameters().values():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=source))
            parameter.grad = torch.randn(parameter.shape, generator=source)
        learner.after_step(step)
        seen.append({n: (p.detach().numpy().copy(), p.grad.numpy().copy()) for n, p in learner.parameters().items()})
    return seen


def direct_scores(seen, name, b1, b2):
    """I_bar U of every weight, in float64; the first step counts for nothing."""
    smoothed = spread = 0.0
    for step in seen[1:]:
        weight, gradient = (values.astype(np.float64) for values in step[name])
        importance = np.abs(weight * gradient)
        smoothed = b1 * smoothed + (1 - b1) * importance
        spread = b2 * spread + (1 - b2) * np.abs(importance - smoothed)
    return smoothed * spread


def direct_units(seen, outputs, b1=0.85, b2=0.85):
    """Score of every matrix: A of every projection, then B of every projection."""
    of_A = [scores.mean() for scores in direct_scores(seen, "A", b1, b2)]
    of_B = [scores.mean() for scores in np.split(direct_scores(seen, "B", b1, b2), np.cumsum(outputs)[:-1])]
    return np.array(of_A + of_B)


def normalised(scores):
    return (scores - scores.min()) / (scores.max() - scores.min())


# --- importance ------------------------------------------------------------------------------------------------------


def test_scores_are_means_of_smoothed_importance_over_each_matrix(backbone):
    learner = learner_of(backbone, random_snapshot(backbone, 0), sensitivity_decay=0.7, uncertainty_decay=0.9)
    learner._previous = None
    seen = random_steps(learner, 6)
    expected = normalised(direct_units(seen, learner.outputs, 0.7, 0.9))
    found = learner.finish()["scores"]
    assert found.shape == (2, len(learner.outputs), 1)
    assert np.allclose(found.flatten().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_a_single_step_has_no_importance(backbone):
    learner = learner_of(backbone, random_snapshot(backbone, 0))
    random_steps(learner, 1)
    assert not any(average.any() for average in learner.state().values())


def test_importance_is_of_the_weights_after_the_step_and_its_clipped_gradients(backbone, bank, tmp_path, monkeypatch):
    seen, after_step = [], TaslLearner.after_step

    def watch(self, step):
        after_step(self, step)
        seen.append({n: (p.detach().numpy().copy(), p.grad.numpy().copy()) for n, p in self.parameters().items()})

    monkeypatch.setattr(TaslLearner, "after_step", watch)
    method = method_at_work(Tasl, backbone, bank)
    snapshot, _, summary = lesson(method, [], tmp_path)
    assert len(seen) == summary.steps
    norms = [np.sqrt(sum((gradient**2).sum() for _, gradient in step.values())) for step in seen]
    assert max(norms) <= 1 + 1e-5
    assert np.array_equal(seen[-1]["B"][0], snapshot["B"].numpy()), "the last weights seen are those that are kept"
    expected = normalised(direct_units(seen, method.outputs))
    assert np.allclose(snapshot["scores"].flatten().numpy(), expected, rtol=1e-3, atol=1e-6)


def test_min_max():
    assert min_max(torch.tensor([3.0, 1.0, 2.0])).tolist() == [1.0, 0.0, 0.5]
    assert min_max(torch.full((3,), 7.0)).tolist() == [0.0, 0.0, 0.0]
    tiny = torch.tensor([1e-40, 3e-40], dtype=torch.float64)
    assert min_max(tiny).tolist() == [0.0, 1.0]


# --- consolidation ---------------------------------------------------------------------------------------------------


def test_the_four_cases(backbone):
    """Units by hand: with the median for a threshold, half of them are important to each side."""
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


def test_consolidation_matrix_by_matrix(backbone):
    previous = random_snapshot(backbone, 3)
    learner = learner_of(backbone, previous, percentile=60.0, both_share=0.2, score_share=0.4)
    seen = random_steps(learner, 5, seed=1)
    found, outputs = learner.finish(), learner.outputs
    now, before = normalised(direct_units(seen, outputs)), normalised(previous["scores"].double().numpy().flatten())
    over_now, over_before = (scores > np.percentile(scores, 60) for scores in (now, before))
    weights = []
    for important_now, important_before in zip(over_now, over_before, strict=True):
        if important_before:
            weights.append((0.2, 0.8) if important_now else (0.0, 1.0))
        else:
            weights.append((1.0, 0.0) if important_now else (0.5, 0.5))
    assert len(set(weights)) >= 3 and all(sum(pair) == 1 for pair in weights)
    old = [*previous["A"], *previous["B"].split(outputs)]
    new = [*learner.A.detach(), *learner.B.detach().split(outputs)]
    fused_matrices = [*found["A"], *found["B"].split(outputs)]
    for (w, v), matrix, a, b in zip(weights, fused_matrices, new, old, strict=True):
        assert matrix.allclose(w * a + v * b, atol=1e-6)
        assert v or torch.equal(matrix, a)
        assert w or torch.equal(matrix, b)
    expected = normalised(0.4 * now + 0.6 * before)
    assert np.allclose(found["scores"].flatten().numpy(), expected, atol=1e-5)


def test_shares_of_new_and_old_sum_to_one(backbone):
    """Fusing a pair with itself changes nothing, whatever the shares."""
    pair = random_snapshot(backbone, 0)
    source = torch.Generator().manual_seed(1)
    shares = torch.rand(2, len(pair["A"]), 1, dtype=torch.float64, generator=source)
    same = fused(pair, pair, shares, outputs_of(backbone.targets))
    assert all(same[name].allclose(pair[name], rtol=1e-6) for name in "AB")


# --- tasks -----------------------------------------------------------------------------------------------------------


def test_the_first_task_leaves_its_weights_as_they_are(backbone, bank, tmp_path):
    first = learned(method_at_work(Tasl, backbone, bank), tmp_path, tasks=1)[0]
    plain = learned(method_at_work(SeqLora, backbone, bank), tmp_path, tasks=1)[0]
    assert equal({name: first[name] for name in "AB"}, plain)
    assert float(first["scores"].min()) == 0 and float(first["scores"].max()) == 1
    assert begin(method_at_work(Tasl, backbone, bank)).facts() == {}


def test_the_next_task_starts_from_the_consolidated_weights(backbone, bank, tmp_path):
    method = method_at_work(Tasl, backbone, bank)
    history = learned(method, tmp_path, tasks=2)
    learner = begin(method, history)
    assert torch.equal(learner.A.detach(), history[1]["A"]) and torch.equal(learner.B.detach(), history[1]["B"])
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in history[1].values())
    assert sum(lesson(method, history, tmp_path)[1].facts().values()) == 2 * len(backbone.targets)


def test_a_task_without_steps_has_no_say(backbone, bank, tmp_path):
    """With no importance of its own, no unit is its own alone."""
    method = method_at_work(Tasl, backbone, bank)
    history = learned(method, tmp_path, tasks=1)
    after = begin(method, history).finish()
    assert all(after[name].allclose(history[0][name], rtol=1e-6) for name in ("A", "B", "scores"))


@pytest.mark.one_machine
def test_cut_and_resumed_ends_the_same(backbone, bank, tmp_path):
    method = method_at_work(Tasl, backbone, bank)
    check_cut_and_resumed(method, learned(method, tmp_path, tasks=1), tmp_path, step=5)


@pytest.mark.parametrize(
    "change",
    [
        {"percentile": 20.0},
        {"both_share": 0.9},
        {"score_share": 0.9},
        {"sensitivity_decay": 0.2},
        {"uncertainty_decay": 0.2},
    ],
    ids=str,
)
@pytest.mark.one_machine
def test_a_setting_changes_exactly_the_trainings_that_its_identity_names(llama, tmp_path, change):
    bank = bank_of(llama)
    check_identity_is_what_training_reads(Tasl, llama, bank, tmp_path, change, {"percentile": 40.0})
    bank.remove()


def test_the_released_scripts():
    settings = TaslSettings(preset="official")
    resolved = Tasl.resolve(settings, "tiny-t5", "superni")
    assert (resolved.rank, resolved.alpha, resolved.dropout) == (8, 16.0, 0.05)
    t5, llama = (Tasl.training_defaults(settings, family, "superni") for family in ("t5", "llama"))
    common = {"learning_rate": 3e-4, "epochs": 5, "warmup_steps": 50, "warmup_start": "zero", "schedule": "linear"}
    assert t5 == common | {"batch_size": 8, "weight_decay": 0.01, "backbone_dropout": 0.1, "group_by_length": False}
    assert llama == common | {"batch_size": 128, "backbone_dropout": 0.0, "group_by_length": True}
    assert Tasl.training_defaults(TaslSettings(), "t5", "superni") == {}


@pytest.mark.parametrize(
    "settings",
    [{"percentile": 101.0}, {"both_share": -0.1}, {"score_share": 1.1}, {"sensitivity_decay": 1.0}, {"beta1": 0.85}],
)
def test_values_out_of_range_are_refused(settings):
    with pytest.raises(ValidationError):
        TaslSettings(**settings)
