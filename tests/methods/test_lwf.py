"""LwF: the divergence from the previous pair's answers, token by token, and what it keeps."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.in_turn import (
    TRAINING,
    begin,
    check_cut_and_resumed,
    check_identity_is_what_training_reads,
    equal,
    learned,
    lesson,
    method_at_work,
)
from helpers.rounding import GRADIENT, PASS, assert_same_to_rounding, assert_trained_alike
from helpers.tiny import bank_of, checkpoint_at, random_rows
from pydantic import ValidationError

from latent_sweep.adapters.bank import Adaptation
from latent_sweep.adapters.lora import LoraDeltas
from latent_sweep.backbones.batches import forward
from latent_sweep.methods.lwf import Lwf, LwfSettings, divergence
from latent_sweep.methods.seq_lora import SeqLora
from latent_sweep.training.engine import Engine
from latent_sweep.training.loop import train_pack
from latent_sweep.training.trainer import Trainer


def direct_divergence(student, teacher, temperature):
    """tau^2 sum over tokens of KL(teacher || student), in plain numbers."""
    total = 0.0
    for student_token, teacher_token in zip(student.tolist(), teacher.tolist(), strict=True):
        softened = [[math.exp(x / temperature) for x in logits] for logits in (student_token, teacher_token)]
        q, p = ([x / sum(weights) for x in weights] for weights in softened)
        total += sum(b * math.log(b / a) for a, b in zip(q, p, strict=True))
    return temperature**2 * total


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_divergence_is_from_the_teacher_to_the_student(temperature):
    student, teacher = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    found = float(divergence(student, teacher, temperature))
    assert found == pytest.approx(direct_divergence(student, teacher, temperature), rel=1e-4)
    assert found != pytest.approx(direct_divergence(teacher, student, temperature), rel=1e-2)
    assert float(divergence(teacher, teacher, temperature)) == 0


@pytest.fixture
def at_work(backbone, bank, tmp_path):
    """LwF after one task: the method and its history."""
    method = method_at_work(Lwf, backbone, bank)
    return method, learned(method, tmp_path, tasks=1)


def terms(learner, rows, work, denominator):
    return learner.loss(forward(work.backbone, work.bank, rows, learner.adaptation(rows), denominator))


def moved(learner):
    with torch.no_grad():
        learner.B.add_(0.1 * torch.randn(learner.B.shape, generator=torch.Generator().manual_seed(1)))
    return learner


def test_a_student_that_is_its_teacher_has_no_distance_and_no_gradient(at_work):
    method, history = at_work
    learner = begin(method, history)
    distillation = terms(learner, random_rows(5, seed=4), method.context, 10.0)["distillation"]
    assert float(distillation.detach()) == 0
    distillation.backward()
    assert float(learner.A.grad.abs().max()) < 1e-6 and float(learner.B.grad.abs().max()) < 1e-6


def test_the_distance_is_the_mean_over_target_tokens_of_both_models_answers(at_work):
    method, history = at_work
    s, work, rows = method.settings, method.context, random_rows(4, seed=4)
    learner = moved(begin(method, history))
    targets = sum(len(row["target_ids"]) for row in rows)
    total = 0.0
    for row in rows:  # one at a time: nothing is padded
        pairs = (learner.A, learner.B), (history[0]["A"], history[0]["B"])
        outputs = [
            forward(work.backbone, work.bank, [row], Adaptation(LoraDeltas(*pair, method.outputs, s.s)))
            for pair in pairs
        ]
        total += direct_divergence(*(o.logits.detach() for o in outputs), s.temperature)
    found = terms(learner, rows, work, targets)["distillation"]
    assert float(found.detach()) == pytest.approx(s.alpha_kd * total / targets, rel=1e-4)


def test_the_teacher_does_not_drop_out(t5, tmp_path):
    """The student does, under `training.backbone_dropout`; transformers' own masks, drawn from one seed."""
    bank = bank_of(t5)
    method = method_at_work(Lwf, t5, bank)
    learner, rows = moved(begin(method, learned(method, tmp_path, tasks=1))), random_rows(4, seed=4)
    with torch.no_grad():
        teacher = forward(t5, bank, rows, learner._teacher)
    t5.model.train()
    with t5.dropout(0.3):
        student = forward(t5, bank, rows, learner.adaptation(rows), 1.0)
        found = learner.loss(student)["distillation"]
    t5.model.eval()
    of_targets = [o.logits.detach() for o in (student, teacher)]
    assert float(found.detach()) == pytest.approx(direct_divergence(*of_targets, method.settings.temperature), rel=1e-4)
    bank.remove()


def test_micro_batches_add_up(at_work):
    method, history = at_work
    learner, rows = moved(begin(method, history)), random_rows(6, seed=4)

    def gradients(parts):
        for parameter in learner.parameters().values():
            parameter.grad = None
        sums = {}
        for part in parts:
            found = terms(learner, part, method.context, 13.0)
            sum(found.values()).backward()
            sums = {name: sums.get(name, 0.0) + float(term.detach()) for name, term in found.items()}
        return sums, learner.A.grad.clone(), learner.B.grad.clone()

    whole, parts = gradients([rows]), gradients([rows[:1], rows[1:4], rows[4:]])
    assert parts[0] == pytest.approx(whole[0], rel=PASS)
    for found, expected in zip(parts[1:], whole[1:], strict=True):
        assert_same_to_rounding(found, expected, GRADIENT)


def test_beside_others_with_longer_rows_it_learns_as_alone(at_work, tmp_path):
    method, history = at_work
    work, sets = method.context, (random_rows(6, seed=1), random_rows(6, seed=2, longest=20, targets=9))

    def trainings(rows_of_learners):
        return [
            Trainer(begin(method, history), rows, TRAINING, ("seed", i), checkpoint_at(Path(tmp_path / f"{i}.none")))
            for i, rows in rows_of_learners
        ]

    together = trainings(enumerate(sets))
    summaries = train_pack(together, Engine(backbone=work.backbone), work.bank)
    for i, rows in enumerate(sets):
        (alone,) = trainings([(i, rows)])
        (tmp_path / f"{i}.none").unlink(missing_ok=True)
        (summary,) = train_pack([alone], Engine(backbone=work.backbone), work.bank)
        assert summaries[i].losses == pytest.approx(summary.losses, rel=1e-3)
        assert_trained_alike(together[i].learner.B.detach(), alone.learner.B.detach(), history[0]["B"])
        (tmp_path / f"{i}.none").unlink(missing_ok=True)


def test_the_teacher_stays_while_the_student_learns(at_work, tmp_path):
    method, history = at_work
    before = {name: tensor.clone() for name, tensor in history[0].items()}
    _, learner, summary = lesson(method, history, tmp_path)
    assert summary.losses.keys() == {"task", "distillation"}
    assert summary.first_losses["distillation"] < summary.losses["distillation"], "it starts at the teacher"
    assert equal(history[0], before)
    teacher = learner._teacher.deltas
    assert torch.equal(teacher.A, before["A"]) and torch.equal(teacher.B, before["B"])


def test_a_larger_weight_keeps_the_answers_nearer(at_work, tmp_path):
    method, history = at_work
    work, rows, distances = method.context, random_rows(7, seed=1), []
    for alpha_kd in (0.0, 1.0, 20.0):
        own = method_at_work(Lwf, work.backbone, work.bank, alpha_kd=alpha_kd)
        after = lesson(own, history, tmp_path / f"{alpha_kd}")[0]
        student, teacher = (
            forward(work.backbone, work.bank, rows, method.combine([snapshot], torch.ones(1, 1))).logits
            for snapshot in (after, history[0])
        )
        distances.append(float(divergence(student.flatten(0, 1), teacher.flatten(0, 1), 1.0).detach()))
    assert all(nearer < 0.8 * farther for farther, nearer in pairwise(distances))


def test_the_first_task_and_weight_zero_are_seq_lora(backbone, bank, tmp_path):
    free = learned(method_at_work(Lwf, backbone, bank, alpha_kd=0.0), tmp_path, tasks=2)
    plain = learned(method_at_work(SeqLora, backbone, bank), tmp_path, tasks=2)
    assert all(equal(one, other) for one, other in zip(free, plain, strict=True))
    assert equal(learned(method_at_work(Lwf, backbone, bank), tmp_path, tasks=1)[0], plain[0])


@pytest.mark.one_machine
def test_cut_and_resumed_ends_the_same(at_work, tmp_path):
    check_cut_and_resumed(*at_work, tmp_path, step=5)


@pytest.mark.parametrize(
    "change", [{"alpha_kd": 2.0}, {"alpha_kd": 0.0}, {"temperature": 1.0}, {"dropout": 0.2}], ids=str
)
@pytest.mark.one_machine
def test_a_setting_changes_exactly_the_trainings_that_its_identity_names(llama, tmp_path, change):
    bank = bank_of(llama)
    check_identity_is_what_training_reads(Lwf, llama, bank, tmp_path, change)
    bank.remove()


def test_without_a_distance_nothing_names_its_temperature():
    cold, warm = (Lwf(LwfSettings(alpha_kd=0.0, temperature=t)).stage_identity(1) for t in (1.0, 4.0))
    assert cold == warm


@pytest.mark.parametrize("settings", [{"alpha_kd": -1.0}, {"temperature": 0.0}, {"alpha_kd": "1"}, {"tau": 2.0}])
def test_values_out_of_range_are_refused(settings):
    with pytest.raises(ValidationError):
        LwfSettings(**settings)
