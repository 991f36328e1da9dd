"""EWC: the Fisher information of single rows, and the penalty that it weights."""

import pytest
import torch
from helpers.in_turn import (
    begin,
    equal,
    learned,
    method_at_work,
)
from helpers.methods import changes
from helpers.rounding import GRADIENT, assert_same_to_rounding
from helpers.tiny import Runs, bank_of, random_rows, task_data

from latent_sweep.adapters.bank import Adaptation
from latent_sweep.adapters.lora import LoraDeltas, outputs_of
from latent_sweep.backbones.batches import forward
from latent_sweep.errors import DataError, NonFiniteLoss
from latent_sweep.methods import ewc
from latent_sweep.methods.ewc import Ewc, diagonal_fisher
from latent_sweep.methods.protocol import MethodContext
from latent_sweep.methods.seq_lora import SeqLora
from latent_sweep.sweep.schema import TrainingSettings
from latent_sweep.training.loop import recomputing


def random_pair(backbone, rank=4, seed=0):
    source = torch.Generator().manual_seed(seed)
    outputs = outputs_of(backbone.targets)
    n = next(iter(backbone.targets.values())).in_features
    A = 0.1 * torch.randn(len(outputs), rank, n, generator=source)
    return A, 0.1 * torch.randn(sum(outputs), rank, generator=source)


def random_history(backbone, count):
    history = []
    for i in range(count):
        (A, B), (F_A, F_B) = random_pair(backbone, seed=2 * i), random_pair(backbone, seed=2 * i + 1)
        history.append({"A": A, "B": B, "fisher_A": F_A.square(), "fisher_B": F_B.square()})
    return history


def row_gradients(backbone, bank, pair, rows, scale):
    """Gradients of each row's mean loss, with one backward pass per row."""
    found = []
    for row in rows:
        A, B = (tensor.clone().requires_grad_(True) for tensor in pair)
        deltas = LoraDeltas(A, B, outputs_of(backbone.targets), scale)
        forward(backbone, bank, [row], Adaptation(deltas), len(row["target_ids"])).task_loss().backward()
        found.append((A.grad, B.grad))
    return found


# --- Fisher information ----------------------------------------------------------------------------------------------


def test_fisher_is_measured_with_gradient_checkpointing_if_training_uses_it(backbone, bank, tmp_path):
    """Otherwise it would need more memory than training; recomputed activations give the same numbers."""
    pair, rows = random_pair(backbone), random_rows(11, seed=3)
    measured = (pair, outputs_of(backbone.targets), 2.0, rows, MethodContext(backbone, bank, tmp_path, 4))
    passes, norms = [], [m for name, m in backbone.model.named_modules() if name.endswith(("layer_norm", "layernorm"))]
    handle = norms[0].register_forward_hook(lambda *_: passes.append(1))
    expected, once = diagonal_fisher(*measured), len(passes)
    settings = TrainingSettings(learning_rate=0.1, batch_size=4, epochs=1, gradient_checkpointing=True)
    with recomputing(backbone, settings):
        found = diagonal_fisher(*measured)
    handle.remove()
    assert len(passes) == 3 * once, "another forward pass, and its repetition during backward"
    for one, other in zip(found, expected, strict=True):
        assert_same_to_rounding(one, other, GRADIENT)


def test_finish_runs_with_the_checkpointing_of_training(tmp_path, monkeypatch):
    seen = []

    def fisher(pair, outputs, scale, rows, context, batch_size):
        seen.append(context.backbone.model.is_activation_checkpointing)
        return tuple(torch.ones_like(tensor) for tensor in pair)

    monkeypatch.setattr(ewc, "diagonal_fisher", fisher)
    for checkpointing in (True, False):
        content = changes("ewc", "tiny-llama")
        content["trial__training"] = content["trial__training"] | {"gradient_checkpointing": checkpointing}
        runs = Runs(tmp_path / str(checkpointing))
        runs.run(runs.packs(**content))
    assert set(seen[: len(seen) // 2]) == {True}
    assert set(seen[len(seen) // 2 :]) == {False}


@pytest.mark.parametrize(("micro_batch_size", "expected"), [(None, 4), (2, 2)])
def test_fisher_reads_at_most_the_rows_of_a_training_pass_at_once(micro_batch_size, expected, tmp_path, monkeypatch):
    measure, seen = ewc.diagonal_fisher, []
    monkeypatch.setattr(ewc, "diagonal_fisher", lambda *given: seen.append(given[-1]) or measure(*given))
    content = changes("ewc", "tiny-llama")
    content["trial__training"] = content["trial__training"] | {"batch_size": 4, "micro_batch_size": micro_batch_size}
    runs = Runs(tmp_path)
    runs.run(runs.packs(**content))
    assert set(seen) == {expected}


def test_fisher_is_the_mean_of_squared_row_gradients(backbone, bank, tmp_path):
    pair, rows = random_pair(backbone), random_rows(11, seed=3)
    gradients = row_gradients(backbone, bank, pair, rows, 2.0)
    found = diagonal_fisher(pair, outputs_of(backbone.targets), 2.0, rows, MethodContext(backbone, bank, tmp_path, 4))
    for F, of_rows in zip(found, zip(*gradients, strict=True), strict=True):
        stacked = torch.stack(of_rows).double()
        expected = stacked.square().mean(0)
        assert F.double().allclose(expected, rtol=1e-3, atol=1e-5 * float(expected.max()))
        of_the_batch = stacked.mean(0).square()
        assert not F.double().allclose(of_the_batch, rtol=0.1), "which is not the squared gradient of the batch"


def test_fisher_is_independent_of_row_order_and_leaves_no_gradients(llama, tmp_path):
    bank = bank_of(llama)
    context = MethodContext(llama, bank, tmp_path, 4)
    pair, rows = random_pair(llama), random_rows(10)
    trained = tuple(tensor.clone().requires_grad_(True) for tensor in pair)
    there = diagonal_fisher(trained, outputs_of(llama.targets), 2.0, rows, context)
    back = diagonal_fisher(pair, outputs_of(llama.targets), 2.0, rows[::-1], context)
    assert all(one.allclose(other, rtol=1e-4, atol=1e-9) for one, other in zip(there, back, strict=True))
    assert all(tensor.grad is None for tensor in trained)
    bank.remove()


def test_fisher_is_measured_on_a_random_sample(backbone, bank, tmp_path):
    rows = random_rows(9)

    def snapshot(samples):
        method = method_at_work(Ewc, backbone, bank, fisher_samples=samples)
        return method.begin_task(task_data(rows), []).finish()

    method = method_at_work(Ewc, backbone, bank)
    pair = method.fresh(task_data(rows))
    F_A, F_B = diagonal_fisher(pair, method.outputs, method.settings.s, rows, method.context)
    assert snapshot(9)["fisher_B"].allclose(F_B, rtol=1e-4, atol=1e-9)
    assert equal(snapshot(9), snapshot(1000)), "a task with fewer rows is measured on all of them"
    assert equal(snapshot(2), snapshot(2))
    of_single_rows = [b.square() for _, b in row_gradients(backbone, bank, pair, rows, 2.0)]
    drawn = snapshot(1)["fisher_B"]
    assert sum(drawn.allclose(F, rtol=1e-3, atol=1e-8) for F in of_single_rows) == 1
    assert not F_A.any(), "where B is zero, nothing depends on A"


def test_a_task_without_examples_is_refused(backbone, bank):
    with pytest.raises(DataError, match=r"'mood'.*benchmark\.tasks"):
        method_at_work(Ewc, backbone, bank).begin_task(task_data(name="mood"), [])


def test_fisher_that_is_not_finite_is_refused(backbone, bank):
    learner = begin(method_at_work(Ewc, backbone, bank))
    with torch.no_grad():
        learner.B.fill_(float("inf"))
    with pytest.raises(NonFiniteLoss, match=r"'task 0' .*7 rows"):
        learner.finish()


# --- the penalty -----------------------------------------------------------------------------------------------------


def distance(learner, fisher, pair):
    """sum_k F_k (theta_k - theta*_k)^2, entry by entry."""
    total = 0.0
    for F, anchor, parameter in zip(fisher, pair, (learner.A.detach(), learner.B.detach()), strict=True):
        for f, a, p in zip(F.flatten().tolist(), anchor.flatten().tolist(), parameter.flatten().tolist(), strict=True):
            total += f * (p - a) ** 2
    return total


def moved(learner):
    with torch.no_grad():
        for seed, parameter in enumerate(learner.parameters().values()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return learner


def test_penalty_and_gradient_are_zero_at_the_anchor(backbone, bank):
    learner = begin(method_at_work(Ewc, backbone, bank), random_history(backbone, 2))
    (penalty,) = learner.penalty().values()
    penalty.backward()
    assert float(penalty.detach()) == 0
    assert not learner.A.grad.any() and not learner.B.grad.any()


def test_separate_sums_a_penalty_for_each_earlier_task(backbone, bank):
    history = random_history(backbone, 3)
    learner = moved(begin(method_at_work(Ewc, backbone, bank, ewc_lambda=30.0, fisher="separate"), history))
    expected = sum(30.0 / 2 * distance(learner, (s["fisher_A"], s["fisher_B"]), (s["A"], s["B"])) for s in history)
    assert float(learner.penalty()["ewc_penalty"].detach()) == pytest.approx(expected, rel=1e-4)


def test_the_first_task_and_lambda_zero_have_no_penalty(backbone, bank, tmp_path):
    assert begin(method_at_work(Ewc, backbone, bank)).penalty() == {}
    assert begin(method_at_work(Ewc, backbone, bank, ewc_lambda=0.0), random_history(backbone, 1)).penalty() == {}
    free = learned(method_at_work(Ewc, backbone, bank, ewc_lambda=0.0), tmp_path, tasks=2)
    plain = learned(method_at_work(SeqLora, backbone, bank), tmp_path, tasks=2)
    for one, other in zip(free, plain, strict=True):
        assert equal({name: one[name] for name in "AB"}, other)
