"""Factors: exact against numpy's and torch's own SVD, unique, cached once for every rank of a sweep."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.linalg import subspace_angles

from latent_sweep.adapters import factors
from latent_sweep.adapters.factors import load_factors, truncated_svd
from latent_sweep.errors import ConfigError


def weight(rows, columns, seed=0, spectrum=None):
    """A weight as flat as pretrained ones: singular values fall by two per cent from one to the next."""
    source = torch.Generator().manual_seed(seed)
    side = min(rows, columns)
    left, _ = torch.linalg.qr(torch.randn(rows, side, generator=source, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, side, generator=source, dtype=torch.float64))
    values = 0.98 ** torch.arange(side, dtype=torch.float64) if spectrum is None else spectrum
    return (left * values @ right.T).float()


def assert_exact(found, W, rank, tolerance=2e-6):
    """The triplets of numpy's SVD in float64, which takes another route (no Gram matrix, no power iteration)."""
    U, S, Vh = np.linalg.svd(W.numpy().astype(np.float64), full_matrices=False)
    assert found.U.shape == (W.shape[0], rank)
    assert found.V.shape == (W.shape[1], rank)
    np.testing.assert_allclose(found.S.numpy(), S[:rank], rtol=tolerance)
    assert subspace_angles(found.U.double().numpy(), U[:, :rank]).max() < 1e-4
    assert subspace_angles(found.V.double().numpy(), Vh[:rank].T).max() < 1e-4
    best = (U[:, :rank] * S[:rank]) @ Vh[:rank]
    np.testing.assert_allclose((found.U * found.S) @ found.V.T, best, atol=1e-4 * S[0])
    for side in (found.U, found.V):
        torch.testing.assert_close(side.T @ side, torch.eye(rank), atol=2e-5, rtol=0)


SHAPES = [(40, 40), (24, 64), (64, 24)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 8, 24])
def test_exact_factors_are_those_of_a_full_svd(shape, rank):
    W = weight(*shape)
    found = truncated_svd(W, rank)
    assert_exact(found, W, rank)
    assert all(part.dtype == torch.float32 and part.is_contiguous() for part in (found.U, found.S, found.V))


@pytest.mark.parametrize("shape", [(160, 160), (128, 192), (192, 128)])
def test_block_power_iteration_is_as_exact(shape, monkeypatch):
    monkeypatch.setattr(factors, "GRAM_COLUMNS", 16)
    W = weight(*shape)
    assert_exact(truncated_svd(W, 12), W, 12)


def test_a_flat_spectrum_stops_the_block_power_iteration(monkeypatch):
    monkeypatch.setattr(factors, "GRAM_COLUMNS", 16)
    monkeypatch.setattr(factors, "SPARE_COLUMNS", 0)
    monkeypatch.setattr(factors, "MOST_ITERATIONS", 3)
    with pytest.raises(RuntimeError, match=r"96 x 96 weight did not converge at rank 8: .* another method\.rank"):
        truncated_svd(weight(96, 96, spectrum=torch.linspace(1, 0.999, 96, dtype=torch.float64)), 8)


def test_a_weight_of_lower_rank_has_factors_too():
    spectrum = torch.tensor([3.0, 2.0, 1.0] + [0.0] * 21, dtype=torch.float64)
    for W in (weight(24, 64, spectrum=spectrum), torch.zeros(24, 64)):
        found = truncated_svd(W, 8)
        torch.testing.assert_close((found.U * found.S) @ found.V.T, W, atol=1e-6, rtol=0)
        for side in (found.U, found.V):
            torch.testing.assert_close(side.T @ side, torch.eye(8), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_signs_are_a_matter_of_the_weight_alone(shape):
    W = weight(*shape)
    found, mirrored = truncated_svd(W, 8), truncated_svd(-W, 8)
    peaks = found.V.gather(0, found.V.abs().argmax(0, keepdim=True))
    assert bool((peaks > 0).all())
    torch.testing.assert_close(mirrored.V, found.V, atol=1e-5, rtol=0)
    torch.testing.assert_close(mirrored.U, -found.U, atol=1e-5, rtol=0)
    assert found.S.tolist() == sorted(found.S.tolist(), reverse=True)


def test_a_low_precision_weight_is_factored_in_high_precision():
    W = weight(24, 40).bfloat16()
    assert_exact(truncated_svd(W, 8), W.float(), 8)


def test_the_randomised_subspace_is_another_one():
    """Its purpose: what LoRA-XS does differs from the exact truncation where the spectrum has no gap."""
    source = torch.Generator().manual_seed(0)
    W = torch.randn(300, 300, generator=source)
    exact, randomised = truncated_svd(W, 8), truncated_svd(W, 8, "randomized")
    assert subspace_angles(exact.V.numpy(), randomised.V.numpy()).max() > 0.05
    state = torch.get_rng_state()
    again = truncated_svd(W, 8, "randomized")
    assert torch.equal(again.V, randomised.V)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("algorithm", ["exact", "randomized"])
def test_a_rank_that_does_not_fit_is_refused(algorithm):
    with pytest.raises(ValueError, match="rank 25 exceeds the smaller side of a 24 x 64 weight"):
        truncated_svd(weight(24, 64), 25, algorithm)


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def targets():
    layers = {"a": torch.nn.Linear(40, 24, bias=False), "b": torch.nn.Linear(40, 40, bias=False)}
    for seed, layer in enumerate(layers.values()):
        layer.weight.data = weight(*layer.weight.shape, seed)
    return layers


def files(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def parts(found):
    return {f"{name}.{part}": getattr(f, part) for name, f in found.items() for part in "USV"}


def test_one_file_serves_every_smaller_rank(targets, tmp_path):
    largest = load_factors(targets, "digest", 16, tmp_path)
    stored = load_file(tmp_path / "digest-exact-r16.safetensors")
    smaller = load_factors(targets, "digest", 8, tmp_path)
    assert files(tmp_path) == ["digest-exact-r16.safetensors"]
    for name, tensor in parts(smaller).items():
        assert tensor.shape[-1] == 8
        assert torch.equal(tensor, stored[name][..., :8])
        assert torch.equal(tensor, parts(largest)[name][..., :8])
    torch.testing.assert_close(smaller["a"].S, torch.linalg.svdvals(targets["a"].weight)[:8])


def test_the_largest_rank_of_a_sweep_is_computed_at_once(targets, tmp_path):
    found = load_factors(targets, "digest", 4, tmp_path, compute_rank=12)
    assert files(tmp_path) == ["digest-exact-r12.safetensors"]
    assert found["b"].S.shape == (4,)


def test_a_sweep_rank_beyond_this_backbone_stops_at_its_narrowest_projection(targets, tmp_path):
    load_factors(targets, "digest", 4, tmp_path, compute_rank=64)
    assert files(tmp_path) == ["digest-exact-r24.safetensors"]


def test_a_larger_rank_than_the_cached_one_is_computed(targets, tmp_path):
    load_factors(targets, "digest", 8, tmp_path)
    assert load_factors(targets, "digest", 16, tmp_path)["a"].S.shape == (16,)
    assert files(tmp_path) == ["digest-exact-r16.safetensors", "digest-exact-r8.safetensors"]


def test_a_rank_beyond_the_narrowest_projection_is_refused(targets, tmp_path):
    with pytest.raises(ConfigError, match=r"method\.rank: found 25; the smallest side .* is 24"):
        load_factors(targets, "digest", 25, tmp_path)
    assert files(tmp_path) == []


def test_other_weights_and_another_algorithm_have_files_of_their_own(targets, tmp_path):
    for digest, algorithm in (("one", "exact"), ("two", "exact"), ("one", "randomized")):
        load_factors(targets, digest, 4, tmp_path, algorithm)
    assert files(tmp_path) == [
        "one-exact-r4.safetensors",
        "one-randomized-r4.safetensors",
        "two-exact-r4.safetensors",
    ]


@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_a_damaged_file_is_set_aside_and_computed_again(targets, tmp_path, caplog, damage):
    expected = {name: part.clone() for name, part in parts(load_factors(targets, "digest", 8, tmp_path)).items()}
    path = tmp_path / "digest-exact-r8.safetensors"
    content = path.read_bytes()
    path.unlink()  # what is mapped must not be cut
    path.write_bytes({"cut": content[:-10], "empty": b"", "noise": b"\xff" * 200}[damage])
    found = parts(load_factors(targets, "digest", 8, tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert files(tmp_path) == ["digest-exact-r8.damaged", "digest-exact-r8.safetensors"]
    assert path.read_bytes() == content
    assert "it is set aside and computed again" in caplog.text


def test_the_number_of_threads_is_as_before(targets, tmp_path):
    before = torch.get_num_threads()
    load_factors(targets, "digest", 4, tmp_path)
    assert torch.get_num_threads() == before
