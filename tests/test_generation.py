"""Greedy decoding, token by token against transformers' own `generate` with the adapters merged into the weights."""

import copy

import pytest
import torch
from conftest import load_tiny, random_rows

from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.adapters.factors import truncated_svd
from latent_sweep.adapters.latent import LatentSpace
from latent_sweep.generation import answer_text, generate

RANK, LONGEST = 6, 12
PROMPTS = [row["prompt_ids"] for row in random_rows(10, seed=3, shortest=1, longest=14)]


@pytest.fixture(params=["tiny-llama", "tiny-t5"], scope="module")
def setting(request):
    """A backbone that ends some of its answers early, its bank, and an adapter of its own for every prompt."""
    backbone = load_tiny(request.param)
    head = torch.randn(260, 32, generator=torch.Generator().manual_seed(1))
    head[backbone.eos_id] *= 3
    backbone.model.get_output_embeddings().weight = torch.nn.Parameter(head, requires_grad=False)
    factors = {name: truncated_svd(target.weight, RANK) for name, target in backbone.targets.items()}
    space = LatentSpace(factors, 1.0, "out")
    R = 0.7 * torch.randn(len(factors), len(PROMPTS), RANK, RANK, generator=torch.Generator().manual_seed(2))
    return backbone, AdapterBank(backbone.targets), space, R


def merged(backbone, space, R):
    """A copy of the model whose projections are W + U diag(S) R V^T, without any hook."""
    model = copy.deepcopy(backbone.model)
    for index, name in enumerate(backbone.targets):
        module = model.get_submodule(name)
        module._forward_hooks.clear()
        factors = truncated_svd(module.weight, RANK)
        with torch.no_grad():
            module.weight += factors.U @ torch.diag(factors.S) @ R[index] @ factors.V.T
    return model


def reference(backbone, model, prompt):
    """transformers' greedy answer to one prompt, without EOS."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONGEST, do_sample=False, num_beams=1, pad_token_id=0
    )[0].tolist()
    answer = out[len(prompt) :] if backbone.family == "llama" else out[1:]
    return answer[: answer.index(backbone.eos_id)] if backbone.eos_id in answer else answer


def test_one_adapter_for_a_ragged_batch(setting):
    backbone, bank, space, R = setting
    expected = [reference(backbone, merged(backbone, space, R[:, 0]), prompt) for prompt in PROMPTS]
    assert generate(backbone, bank, PROMPTS, space.deltas(R[:, 0]), LONGEST) == expected
    assert len({len(answer) for answer in expected}) > 1, "some answers must end before others"


def test_an_adapter_for_every_row(setting):
    backbone, bank, space, R = setting
    expected = [reference(backbone, merged(backbone, space, R[:, i]), prompt) for i, prompt in enumerate(PROMPTS)]
    found = generate(backbone, bank, PROMPTS, space.deltas(R), LONGEST)
    assert found == expected
    lengths = {len(answer) for answer in found}
    assert LONGEST in lengths and len(lengths) > 2, "rows must leave the batch at different steps"
    plain = generate(backbone, bank, PROMPTS, space.deltas(torch.zeros_like(R)), LONGEST)
    assert sum(a != b for a, b in zip(plain, found, strict=True)) > len(PROMPTS) // 2


def test_a_row_does_not_depend_on_its_batch(setting):
    backbone, bank, space, R = setting
    together = generate(backbone, bank, PROMPTS, space.deltas(R), LONGEST)
    for i, prompt in enumerate(PROMPTS):
        assert generate(backbone, bank, [prompt], space.deltas(R[:, i : i + 1]), LONGEST) == [together[i]]
    backwards = generate(backbone, bank, PROMPTS[::-1], space.deltas(R.flip(1)), LONGEST)
    assert backwards == together[::-1]


def test_nothing_is_left_active(setting):
    backbone, bank, space, R = setting
    ids = torch.arange(4, 14).reshape(2, 5)
    inputs = {"input_ids": ids} if backbone.family == "llama" else {"input_ids": ids, "decoder_input_ids": ids}
    with torch.no_grad():
        before = backbone.model(**inputs).logits
        generate(backbone, bank, PROMPTS, space.deltas(R), LONGEST)
        assert torch.equal(backbone.model(**inputs).logits, before)


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_a_shorter_limit_gives_a_prefix(setting, longest):
    backbone, bank, space, R = setting
    whole = generate(backbone, bank, PROMPTS, space.deltas(R), LONGEST)
    assert generate(backbone, bank, PROMPTS, space.deltas(R), longest) == [answer[:longest] for answer in whole]


def test_a_stop_string_ends_its_row_alone(setting):
    backbone, bank, space, R = setting
    whole = generate(backbone, bank, PROMPTS, space.deltas(R), LONGEST)
    texts = [backbone.tokenizer.decode(answer) for answer in whole]
    row = max(range(len(texts)), key=lambda i: len(texts[i].strip()))
    mark = texts[row].strip()[2]
    stopped = generate(backbone, bank, PROMPTS, space.deltas(R), LONGEST, stop=(mark,))
    for text, before, after in zip(texts, whole, stopped, strict=True):
        assert after == before[: len(after)]
        decoded = backbone.tokenizer.decode(after).lstrip()
        if mark in text.lstrip():
            assert decoded.count(mark) == 1 and decoded.endswith(mark)
        else:
            assert after == before
    assert len(stopped[row]) < len(whole[row])


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("  red \n blue", (), "red \n blue"),
        ("  red \n blue", ("\n",), "red"),
        ("\n\nred\nblue", ("\n",), "red"),  # blanks before the answer are no answer
        ("red; blue\ngreen", ("\n", ";"), "red"),
        ("", ("\n",), ""),
    ],
)
def test_the_text_of_an_answer_is_cut_at_the_first_stop(llama, text, stop, expected):
    ids = llama.tokenizer(text).input_ids
    assert answer_text(llama, [*ids, llama.pad_id], stop) == expected
