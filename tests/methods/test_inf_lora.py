"""InfLoRA: where its A lies, what is trained, what names its snapshots."""

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
from helpers.tiny import bank_of, random_rows, task_data
from pydantic import ValidationError

from latent_sweep.backbones.batches import collate, label_logits
from latent_sweep.backbones.registry import REGISTRY, target_shapes
from latent_sweep.errors import DataError
from latent_sweep.methods._gpm import GpmSettings
from latent_sweep.methods.inf_lora import InfLora, InfLoraSettings

GPM = {"eps_0": 0.7, "chunks": 1, "mask_padding": True, "cross_attention_v": "own_input"}
BASE = {"design": "svd", "old_branch_grad": "flow", "gpm": GPM}
DESIGNS = ("svd", "random_project")


@pytest.fixture
def method_of(backbone, bank):
    def build(**settings):
        return method_at_work(InfLora, backbone, bank, **BASE | settings)

    return build


def blocks_of(method, history):
    return begin(method, history)._memory._blocks


def memory_of(history, block):
    return torch.cat([snapshot[f"memory.{block.name}"] for snapshot in history], 1)


# --- what is learned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("design", DESIGNS)
def test_A_lies_outside_of_everything_stored(method_of, tmp_path, design, chunks):
    method = method_of(design=design, gpm=GPM | {"chunks": chunks})
    history = learned(method, tmp_path)
    for t in range(1, 3):
        for block in blocks_of(method, history[:t]):
            M, A = memory_of(history[:t], block), history[t]["A"][list(block.projections)]
            assert M.shape[1] >= 1
            assert (A[..., block.dimensions] @ M).abs().max() < 1e-5
            assert A.flatten(1).any(1).all()


@pytest.mark.parametrize("design", DESIGNS)
def test_only_B_is_trained(method_of, tmp_path, design):
    method = method_of(design=design)
    history = learned(method, tmp_path, tasks=1)
    before = {name: tensor.clone() for name, tensor in history[0].items()}
    learner = begin(method, history)
    designed = learner.A.clone()
    assert learner.parameters().keys() == {"B"} and not learner.B.any()
    snapshot, *_ = lesson(method, history, tmp_path, learner=learner)
    assert snapshot["A"].equal(designed) and snapshot["B"].any()
    assert equal(history[0], before)


def test_the_first_A_is_the_svd_of_the_tasks_own_inputs(method_of, backbone):
    rows, seen = random_rows(7, seed=0), []
    first = next(iter(backbone.targets.values()))
    handle = first.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        for row in rows:  # alone, so that there is no padding
            label_logits(backbone, collate([[row]], backbone))
    handle.remove()
    directions = torch.linalg.svd(torch.cat(seen).double().T).U[:, :4]
    learner = begin(method_of(), rows=rows)
    found = 3**0.5 * learner.A[0].double() @ directions
    assert torch.allclose(found.abs(), torch.eye(4, dtype=torch.float64), atol=1e-4)
    assert learner.A[0].equal(learner.A[1]), "query and value read one input"


def test_a_random_A_is_projected_from_the_second_task_on(method_of, tmp_path):
    method = method_of(design="random_project")
    first = begin(method)
    assert first.A.equal(method.fresh(task_data(name="task 0"))[0])
    history = learned(method, tmp_path, tasks=1)
    drawn, second = method.fresh(task_data(name="task 1"))[0], begin(method, history)
    assert torch.allclose(second.A.norm(dim=-1), torch.tensor(3**-0.5))
    for block in blocks_of(method, history):
        M = memory_of(history, block)
        for i in block.projections:
            expected = drawn[i] - drawn[i] @ M @ M.T
            assert torch.allclose(second.A[i], expected / expected.norm(dim=-1, keepdim=True) / 3**0.5, atol=1e-5)


def test_the_model_whose_inputs_are_read_has_the_earlier_pairs(method_of, tmp_path):
    """Deeper inputs move with them, the first layer's do not."""
    history = learned(method_of(), tmp_path, tasks=1)
    summed, alone = (begin(method_of(train_active=active), history).A for active in ("sum", "current"))
    assert summed[0].equal(alone[0])
    assert not summed.equal(alone)


def test_the_memory_is_of_the_model_that_has_learned(method_of, tmp_path):
    method = method_of()
    untrained = begin(method).finish()
    (trained,) = learned(method, tmp_path, tasks=1)
    names = [name for name in trained if name.startswith("memory.")]
    assert trained[names[0]].equal(untrained[names[0]]), "the first layer's input"
    assert not all(trained[name].equal(untrained[name]) for name in names)


@pytest.mark.one_machine
def test_a_lesson_that_is_cut_goes_on_with_the_A_that_it_began_with(method_of, tmp_path):
    method = method_of()
    check_cut_and_resumed(method, learned(method, tmp_path, tasks=1), tmp_path, step=5)
    learner = begin(method)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    learner.load_state({name: -tensor for name, tensor in state.items()})
    assert learner.A.equal(-state["A"]) and learner.finish()["A"].equal(-state["A"])


def test_a_projection_without_a_direction_left_does_not_look_like_a_lost_signal(method_of, tmp_path):
    method = method_of()
    history = learned(method, tmp_path, tasks=1)
    first = blocks_of(method, history)[0]
    full = history[0] | {f"memory.{first.name}": torch.eye(32)}
    snapshot, learner, _ = lesson(method, [full], tmp_path)
    assert not snapshot["A"][list(first.projections)].any()
    rows_of_first = slice(0, sum(learner.outputs[i] for i in first.projections))
    assert not snapshot["B"][rows_of_first].any() and snapshot["B"].any()


def test_a_task_without_rows_is_a_fault(method_of):
    with pytest.raises(DataError, match="task task"):
        method_of().begin_task(task_data([]), [])


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"gpm": GPM | {"energy": "sigma2"}},
        {"gpm": GPM | {"eps_0": 0.8}},
        {"gpm": GPM | {"chunks": 2}},
        {"gpm": GPM | {"mask_padding": False}},
        {"gpm": GPM | {"batch_size": 3, "max_batches": 1}},
        {"design": "random_project"},
        {"train_active": "current"},
    ],
    ids=lambda change: str(next(iter(change))),
)
@pytest.mark.one_machine
def test_settings_name_what_they_change(llama, tmp_path, change):
    bank = bank_of(llama)
    check_identity_is_what_training_reads(InfLora, llama, bank, tmp_path, change, BASE)
    bank.remove()


def test_the_first_task_does_not_know_the_ramp():
    one, other = (
        InfLora(InfLoraSettings(**BASE | {"gpm": GPM | {"ramp": ramp}}, rank=4, alpha=8.0, dropout=0.0))
        for ramp in (5, 15)
    )
    assert one.stage_identity(0) == other.stage_identity(0)
    assert one.stage_identity(1) != other.stage_identity(1)
    assert [one.reads_history(position) for position in range(3)] == [False, True, True]


@pytest.mark.one_machine
def test_v_of_cross_attention_is_constrained_by_what_it_reads(t5, tmp_path):
    bank = bank_of(t5)
    gpm = GPM | {"cross_attention_v": "decoder_state"}
    check_identity_is_what_training_reads(InfLora, t5, bank, tmp_path, {"gpm": gpm}, BASE)
    bank.remove()


@pytest.mark.parametrize(
    ("backbone_name", "benchmark", "expected"),
    [
        ("t5-large", "superni", (4, 32.0, "random_project", 1)),
        ("t5-large", "long_sequence", (8, 32.0, "random_project", 1)),
        ("llama-2-7b", "long_sequence", (4, 32.0, "random_project", 4)),
    ],
)
def test_presets(backbone_name, benchmark, expected):
    official = InfLora.resolve(InfLoraSettings(preset="official"), backbone_name, benchmark)
    assert (official.rank, official.alpha, official.design, official.gpm.chunks) == expected
    assert (official.old_branch_grad, official.gpm.mask_padding) == ("detach", False)
    unified = InfLora.resolve(InfLoraSettings(), backbone_name, benchmark)
    assert (unified.rank, unified.alpha, unified.design, unified.gpm.chunks) == (8, 16.0, "svd", 1)
    assert (unified.old_branch_grad, unified.gpm.eps_0) == ("flow", 0.995)
    own = InfLora.resolve(InfLoraSettings(preset="official", gpm=GpmSettings(chunks=2)), backbone_name, benchmark)
    assert (own.gpm.chunks, own.gpm.mask_padding) == (2, False), "what is given stays, the rest is the preset's"
    assert InfLora.combinations[0] == "sum"


def test_numbers_per_task():
    method = InfLora(InfLora.resolve(InfLoraSettings(), "t5-large", "superni"))
    assert method.parameter_count(target_shapes("t5", REGISTRY["t5-large"].config), 1024) == 1_179_648


@pytest.mark.parametrize(
    "gpm", [{"eps_0": 1.0}, {"eps_0": 0.0}, {"ramp": 0}, {"chunks": 0}, {"energy": "sigma"}, {"max_batches": 0}]
)
def test_ranges(gpm):
    with pytest.raises(ValidationError):
        InfLoraSettings(gpm=gpm)
