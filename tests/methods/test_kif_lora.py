"""KIFLoRA: edge cases of importance and of the orthogonality term."""

import torch

from latent_sweep.adapters.lora import outputs_of
from latent_sweep.methods.kif_lora import KifLoraLearner, KifLoraSettings

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


# --- importance and fusion -------------------------------------------------------------------------------------------


def test_tiny_gradients_give_distinct_scores(backbone):
    """A slice's score is a product of four small numbers, too small for float32."""
    learner = learner_of(backbone, random_snapshot(backbone, 0))
    learner._previous = None
    for step in range(4):
        for seed, parameter in enumerate(learner.parameters().values()):
            source = torch.Generator().manual_seed(10 * step + seed)
            parameter.grad = 1e-12 * torch.randn(parameter.shape, generator=source)
        learner.after_step(step)
    scores = learner.finish()["scores"]
    assert len(scores.unique()) == scores.numel()


# --- orthogonality ---------------------------------------------------------------------------------------------------


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
