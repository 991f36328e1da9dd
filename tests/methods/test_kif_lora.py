"""KIFLoRA: importance of rank-one slices, their fusion by softmax, and the term that keeps them orthonormal."""

import math

import numpy as np
import pytest
import torch
from helpers.in_turn import (
    begin,
    check_cut_and_resumed,
    check_identity_is_what_training_reads,
    learned,
    lesson,
    method_at_work,
)
from helpers.tiny import bank_of
from pydantic import ValidationError

from latent_sweep.adapters.lora import outputs_of
from latent_sweep.methods.kif_lora import KifLora, KifLoraLearner, KifLoraSettings

SETTINGS = KifLoraSettings(rank=4, alpha=8.0, dropout=0.0)


def random_snapshot(backbone, seed):
    source = torch.Generator().manual_seed(seed)
    outputs = outputs_of(backbone.targets)
    n = next(iter(backbone.targets.values())).in_features
    A, B = torch.randn(len(outputs), 4, n, generator=source), torch.randn(sum(outputs), 4, generator=source)
    return {"A": A, "B": B, "scores": torch.rand(1, len(outputs), 4, generator=source)}


def learner_of(backbone, previous, **settings):
    s = SETTINGS.model_copy(update=settings)
    return KifLoraLearner((previous["A"], previous["B"]), outputs_of(backbone.targets), s, previous)


def random_steps(learner, count):
    """Run `after_step` with random weights and gradients; returns I_bar U of every weight, computed in float64."""
    source = torch.Generator().manual_seed(0)
    smoothed, spread = (dict.fromkeys("AB", 0.0) for _ in range(2))
    for step in range(count):
        for name, parameter in learner.parameters().items():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=source))
            parameter.grad = torch.randn(parameter.shape, generator=source)
            product = (parameter.detach().double() * parameter.grad.double()).numpy()
            importance = np.abs(product - 0.5 * product**2)
            if step > 0:
                smoothed[name] = 0.85 * smoothed[name] + 0.15 * importance
                spread[name] = 0.85 * spread[name] + 0.15 * np.abs(importance - smoothed[name])
        learner.after_step(step)
    return {name: smoothed[name] * spread[name] for name in "AB"}


def slices(scores, outputs):
    """Mean of the outer product of every slice's scores, (M, r), by outer products."""
    of_B = np.split(scores["B"], np.cumsum(outputs)[:-1])
    return np.array(
        [[np.outer(b[:, k], a[k]).mean() for k in range(a.shape[0])] for a, b in zip(scores["A"], of_B, strict=True)]
    )


def normalised(scores):
    return (scores - scores.min()) / (scores.max() - scores.min())


# --- importance and fusion -------------------------------------------------------------------------------------------


def test_fusion_slice_by_slice(backbone):
    previous = random_snapshot(backbone, 3)
    learner = learner_of(backbone, previous, temperature=0.4, score_share=0.6)
    outputs = learner.outputs
    now = normalised(slices(random_steps(learner, 5), outputs))
    before = normalised(previous["scores"][0].double().numpy())
    found = learner.finish()
    columns = zip(
        found["B"].split(outputs), learner.B.detach().split(outputs), previous["B"].split(outputs), strict=True
    )
    for m, (fused_B, new_B, old_B) in enumerate(columns):
        for k in range(4):
            past, present = math.exp(before[m, k] / 0.4), math.exp(now[m, k] / 0.4)
            v, w = past / (past + present), present / (past + present)
            assert v + w == pytest.approx(1)
            row = w * learner.A.detach()[m, k] + v * previous["A"][m, k]
            assert found["A"][m, k].allclose(row, rtol=1e-4, atol=1e-5)
            assert fused_B[:, k].allclose(w * new_B[:, k] + v * old_B[:, k], rtol=1e-4, atol=1e-5)
    expected = normalised(0.6 * now + 0.4 * before)
    assert found["scores"].shape == (1, len(outputs), 4)
    assert np.allclose(found["scores"][0].numpy(), expected, atol=1e-5)
    assert 0 < learner.facts()["share_of_present"] < 1


def test_scores_of_tiny_gradients_still_tell_slices_apart(backbone):
    """A slice's score is a product of four small numbers: below what float32 can hold."""
    learner = learner_of(backbone, random_snapshot(backbone, 0))
    learner._previous = None
    for step in range(4):
        for seed, parameter in enumerate(learner.parameters().values()):
            source = torch.Generator().manual_seed(10 * step + seed)
            parameter.grad = 1e-12 * torch.randn(parameter.shape, generator=source)
        learner.after_step(step)
    scores = learner.finish()["scores"]
    assert len(scores.unique()) == scores.numel()


def test_the_first_task_is_not_fused(backbone, bank, tmp_path):
    method = method_at_work(KifLora, backbone, bank)
    snapshot, learner, summary = lesson(method, [], tmp_path)
    assert torch.equal(snapshot["A"], learner.A.detach()) and torch.equal(snapshot["B"], learner.B.detach())
    assert summary.losses.keys() == {"task", "orthogonality"}
    assert learner.facts() == {}


def test_the_next_task_starts_from_the_fused_weights(backbone, bank, tmp_path):
    method = method_at_work(KifLora, backbone, bank)
    history = learned(method, tmp_path, tasks=1)
    second, learner, _ = lesson(method, history, tmp_path)
    assert not torch.equal(second["A"], learner.A.detach()), "it is fused"
    third = begin(method, [*history, second])
    assert torch.equal(third.A.detach(), second["A"]) and torch.equal(third.B.detach(), second["B"])
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in second.values())


@pytest.mark.one_machine
def test_cut_and_resumed_ends_the_same(backbone, bank, tmp_path):
    method = method_at_work(KifLora, backbone, bank)
    check_cut_and_resumed(method, learned(method, tmp_path, tasks=1), tmp_path, step=5)


# --- the term beside the loss ----------------------------------------------------------------------------------------


def test_orthogonality_is_the_mean_distance_of_all_matrices(backbone):
    learner = learner_of(backbone, random_snapshot(backbone, 0), orthogonality=0.3)
    norms = [np.linalg.norm(a @ a.T - np.eye(4)) for a in learner.A.detach().double().numpy()]
    of_B = learner.B.detach().double().split(learner.outputs)
    norms += [np.linalg.norm(b.T @ b - np.eye(4)) for b in map(np.asarray, of_B)]
    (penalty,) = learner.penalty().values()
    assert float(penalty.detach()) == pytest.approx(0.3 * np.mean(norms), rel=1e-5)


def test_orthonormal_slices_have_no_penalty_and_finite_gradients(backbone):
    outputs = outputs_of(backbone.targets)
    n = next(iter(backbone.targets.values())).in_features
    A = torch.eye(4, n).expand(len(outputs), 4, n)
    B = torch.cat([torch.eye(m, 4) for m in outputs])
    learner = KifLoraLearner((A, B), outputs, SETTINGS, None)
    (penalty,) = learner.penalty().values()
    penalty.backward()
    assert float(penalty.detach()) == 0
    assert learner.A.grad.isfinite().all() and learner.B.grad.isfinite().all()
    zero = KifLoraLearner((A, torch.zeros_like(B)), outputs, SETTINGS, None)
    zero.penalty()["orthogonality"].backward()
    assert not zero.B.grad.any(), "at B = 0 it moves nothing"


def test_without_weight_there_is_no_term(backbone):
    assert learner_of(backbone, random_snapshot(backbone, 0), orthogonality=0.0).penalty() == {}


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1.0},
        {"orthogonality": 0.5},
        {"score_share": 0.9},
        {"sensitivity_decay": 0.2},
        {"uncertainty_decay": 0.2},
    ],
    ids=str,
)
@pytest.mark.one_machine
def test_a_setting_changes_exactly_the_trainings_that_its_identity_names(llama, tmp_path, change):
    bank = bank_of(llama)
    check_identity_is_what_training_reads(KifLora, llama, bank, tmp_path, change)
    bank.remove()


def test_the_released_scripts():
    settings = KifLoraSettings(preset="official")
    resolved = KifLora.resolve(settings, "tiny-t5", "superni")
    assert (resolved.rank, resolved.alpha, resolved.dropout) == (8, 16.0, 0.05)
    expected = {"learning_rate": 3e-4, "batch_size": 8, "epochs": 1, "schedule": "linear"}
    expected |= {"warmup_steps": 50, "warmup_start": "zero", "group_by_length": False}
    assert KifLora.training_defaults(settings, "t5", "superni") == expected | {"backbone_dropout": 0.1}


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"orthogonality": -0.1}, {"tau": 0.25}])
def test_values_out_of_range_are_refused(settings):
    with pytest.raises(ValidationError):
        KifLoraSettings(**settings)
