"""Truncated SVD factors of the frozen projections: exact, computed once per backbone, cached and memory-mapped.

Exact on purpose: pretrained weights have almost no gap in their spectrum, so a randomised SVD returns another subspace,
and an adapter trained on one basis means nothing on another. Of SmolLM2's projections at rank 32, the smallest cosine
between the exact subspace and that of LoRA-XS, which randomises, is 0.86 to 0.9999. Two conventions make the basis
unique: descending singular values, and in each right singular vector the entry of largest magnitude is positive. The
first r columns of a larger truncation are the smaller truncation; of a randomised one they are not, and each rank has a
file of its own.

Weights are read one at a time, from a loaded model or from the files of its checkpoint, as they are in the computation:
in the type of `backbone.dtype`, however they were published.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock
from safetensors import safe_open
from torch import Tensor

from latent_sweep.errors import ConfigError
from latent_sweep.storage import versions
from latent_sweep.storage.checksummed import intact, is_sealed, write_sealed
from latent_sweep.storage.files import committing

log = logging.getLogger(__name__)

GRAM_COLUMNS = 2048
"""Up to this smaller side, the eigenvectors of the Gram matrix are the fastest exact way (2 to 6 times an SVD)."""

RESOLVED = 1e-6
"""Singular values below this share of the largest drown in the Gram matrix, whose own are their squares."""

SPARE_COLUMNS = 96
MOST_ITERATIONS = 200
TOLERANCE = 1e-6
"""Largest residual of a singular triplet, relative to its singular value, in float64."""

_IDENTITY = "identity"
"""The name under which a file of factors was written, inside it: copied or renamed, it is told apart."""

Algorithm = Literal["exact", "randomized"]


class Projection(Protocol):
    """A weight of known shape that is read when it is asked for: an `nn.Linear`, or one that lies in a checkpoint."""

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        ...

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        ...

    @property
    def weight(self) -> Tensor:
        """Return the weight, (out, in)."""
        ...


@dataclass(frozen=True)
class Factors:
    """The truncated SVD of one weight W (out x in): `W ~ U diag(S) V^T`."""

    U: Tensor
    """Left singular vectors, (out, rank), float32."""
    S: Tensor
    """Singular values, (rank,), descending."""
    V: Tensor
    """Right singular vectors, (in, rank)."""

    def truncate(self, rank: int) -> Factors:
        """The factors of a smaller rank: a prefix."""
        return Factors(self.U[:, :rank], self.S[:rank], self.V[:, :rank])


def truncated_svd(weight: Tensor, rank: int, algorithm: Algorithm = "exact") -> Factors:
    """The first `rank` singular triplets of `weight` (out, in), with the sign convention above (A35).

    `randomized` is what the code of LoRA-XS computes, for comparison; see `_svd_of_lora_xs`.

    Raises:
        ValueError: rank exceeds the smaller side.
    """
    out_features, in_features = weight.shape
    if rank > min(out_features, in_features):
        raise ValueError(f"rank {rank} exceeds the smaller side of a {out_features} x {in_features} weight")
    W = weight.detach()
    if algorithm == "randomized":
        U, S, V = _svd_of_lora_xs(W, rank)
    elif min(out_features, in_features) <= GRAM_COLUMNS:
        U, S, V = _svd_by_gram(W.double(), rank)
    else:
        U, S, V = _svd_by_block_power(W.double(), rank)
    peak = V.abs().argmax(dim=0)
    signs = torch.sign(V.gather(0, peak.unsqueeze(0)).squeeze(0))
    return Factors((U * signs).float().contiguous(), S.float().contiguous(), (V * signs).float().contiguous())


def _svd_of_lora_xs(W: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factor W as LoRA-XS does: scikit-learn's TruncatedSVD, 10 iterations, 10 oversamples, seed 42, on the CPU.

    Its left factor is `W V`, so U is that divided by S; U is orthonormal only as far as the iteration has converged.
    Source: `utils/svd_utils.py` and `config/reconstruct_config.yaml` of github.com/MohammadrezaBanaei/LoRA-XS.
    """
    from sklearn.decomposition import TruncatedSVD  # a second to import, for this algorithm alone
    from threadpoolctl import threadpool_limits

    svd = TruncatedSVD(n_components=rank, n_iter=10, random_state=42)
    with threadpool_limits(1):  # else the last bits depend on the number of cores
        left = svd.fit_transform(W.float().cpu().numpy())
    S = torch.from_numpy(svd.singular_values_)
    U = torch.from_numpy(left) / S.clamp_min(torch.finfo(S.dtype).tiny)
    U, S, V = (part.to(W.device) for part in (U, S, torch.from_numpy(svd.components_).T))
    return U, S, V


def _svd_by_gram(W: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = W.shape[0] < W.shape[1]
    A = W.T if wide else W
    eigenvalues, eigenvectors = torch.linalg.eigh(A.T @ A)
    V = eigenvectors.flip(1)
    S = eigenvalues[-rank:].flip(0).clamp_min(0).sqrt()
    if S[-1] <= RESOLVED * S[0]:
        return _svd_in_full(W, rank)
    # all columns at once, so that a smaller rank is bit for bit a prefix of a larger one
    U, V = (A @ V)[:, :rank] / S, V[:, :rank]
    return (V, S, U) if wide else (U, S, V)


def _svd_in_full(W: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    U, S, Vh = torch.linalg.svd(W, full_matrices=False)
    return U[:, :rank], S[:rank], Vh[:rank].T


def _svd_by_block_power(W: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Factor W by block power iteration with spare columns, until every triplet has `W v = s u` and `W^T u = s v`.

    Twelve times faster than a full SVD at 4096 columns. The spare columns carry the convergence: neighbouring singular
    values differ by a per mille, the wanted and the first one beyond the block by much more.

    Raises:
        RuntimeError: no convergence, which means a flat spectrum; the message names what to do.
    """
    columns = min(rank + SPARE_COLUMNS, *W.shape)
    start = torch.Generator().manual_seed(0)
    V, _ = torch.linalg.qr(torch.randn(W.shape[1], columns, generator=start, dtype=W.dtype).to(W.device))
    for _ in range(MOST_ITERATIONS):
        Q, _ = torch.linalg.qr(W @ V)
        V, S, rotation = _svd_of_block(W.T @ Q)  # the best triplets within the block
        U = Q @ rotation.T
        residual = torch.linalg.vector_norm(W @ V[:, :rank] - U[:, :rank] * S[:rank], dim=0)
        if bool((residual <= TOLERANCE * S[:rank]).all()):
            return U[:, :rank], S[:rank], V[:, :rank]
    raise RuntimeError(
        f"the SVD of a {W.shape[0]} x {W.shape[1]} weight did not converge at rank {rank}: its singular values are "
        "nearly equal there, so a truncation is arbitrary. Choose another method.rank"
    )


def _svd_of_block(B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor a tall matrix (n, c) of float64 as `B = V diag(S) rotation`, with V (n, c) and rotation (c, c).

    On a GPU, whose own SVD sweeps over all pairs of columns again and again, from the eigenvectors of the (c, c) Gram
    matrix. The factors of both ways agree to 1e-6 in float32. A CPU keeps its bits, which name published results.
    """
    if B.is_cuda:
        eigenvalues, eigenvectors = torch.linalg.eigh(B.T @ B)
        S, X = eigenvalues.flip(0).clamp_min(0).sqrt(), eigenvectors.flip(1)
        if bool(S[-1] > RESOLVED * S[0]):
            return (B @ X) / S, S, X.T
    V, S, rotation = torch.linalg.svd(B, full_matrices=False)
    return V, S, rotation


def load_factors(
    projections: Mapping[str, Projection],
    weights_digest: str,
    rank: int,
    folder: Path,
    algorithm: Algorithm = "exact",
    compute_rank: int | None = None,
) -> dict[str, Factors]:
    """The factors of every projection at `rank`, from the cache in `folder` or computed into it.

    Args:
        projections: by name; each weight is read once, and let go before the next one is.
        weights_digest: identity of the weights; part of the file's name.
        compute_rank: rank to compute when the cache has none large enough: the largest of the sweep, so that one
            file of exact factors serves every rank of it.

    Raises:
        ConfigError: rank exceeds the smallest side of a projection.
        StoreError: the factors cannot be written.
    """
    largest = min(min(p.out_features, p.in_features) for p in projections.values())
    if rank > largest:
        raise ConfigError(
            f"method.rank: found {rank}; the smallest side of this backbone's adapted projections is {largest}, "
            "so at most that is possible"
        )
    compute_rank = rank if algorithm == "randomized" else min(max(rank, compute_rank or 0), largest)
    stem = factors_name(weights_digest, algorithm)
    with ExitStack() as stack:
        with committing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(str(folder / f"{stem}.lock")))
        path = _cached(folder, stem, rank)
        if path is None:
            path = folder / f"{stem}-r{compute_rank}.safetensors"
            _compute(projections, compute_rank, path, algorithm)
    with safe_open(path, framework="pt") as file:
        return {
            name: Factors(*(file.get_tensor(f"{name}.{part}") for part in "USV")).truncate(rank) for name in projections
        }


def stored_singular_values(
    names: Sequence[str], weights_digest: str, rank: int, folder: Path, algorithm: Algorithm = "exact"
) -> npt.NDArray[np.float32] | None:
    """The singular values of projections, (M, rank), from the cache in `folder`; None where it holds none of them.

    Nothing is computed and nothing is changed.

    Args:
        names: of the projections, in the order wanted.
    """
    for path in _of_rank(folder, factors_name(weights_digest, algorithm), rank):
        if is_sealed(path) and _holds_its_own(path):
            with safe_open(path, framework="np") as file:
                if {f"{name}.S" for name in names} <= set(file.keys()):
                    return np.stack([file.get_tensor(f"{name}.S")[:rank] for name in names])
    return None


def kept_factors(weights_digest: str, rank: int, folder: Path) -> list[Path]:
    """The files of a cache that serve this rank, the smallest of each algorithm: what another machine would need."""
    found = (_cached(folder, factors_name(weights_digest, algorithm), rank) for algorithm in get_args(Algorithm))
    return [path for path in found if path is not None]


def factors_name(weights_digest: str, algorithm: Algorithm) -> str:
    """Return the name of a file of factors, but for its rank."""
    version = f"{versions.FACTORS}.{versions.RANDOMIZED}" if algorithm == "randomized" else f"{versions.FACTORS}"
    return f"{weights_digest}-{algorithm}-v{version}"


def _cached(folder: Path, stem: str, rank: int) -> Path | None:
    """The cached file of the smallest rank that serves."""
    return next((path for path in _of_rank(folder, stem, rank) if intact(path) and _holds_its_own(path)), None)


def _of_rank(folder: Path, stem: str, rank: int) -> list[Path]:
    """The cached files that serve a rank, the smallest first: randomised factors serve no other rank than their own."""
    paths = {path.stem.rpartition("-r")[2]: path for path in folder.glob(f"{stem}-r*.safetensors")}
    ranks = {int(text): path for text, path in paths.items() if text.isdecimal()}
    own = "-randomized-" in stem
    return [ranks[found] for found in sorted(ranks) if found == rank or (found > rank and not own)]


def _holds_its_own(path: Path) -> bool:
    """Whether a whole file holds what its name says: these weights, algorithm and rank, and not another file's."""
    with safe_open(path, framework="np") as file:
        found = bytes(file.get_tensor(_IDENTITY)).decode() if _IDENTITY in file.keys() else "no name"  # noqa: SIM118
    if found != path.stem:
        log.warning("%s holds the factors of another file (%s); they are computed again", path, found)
    return found == path.stem


def _compute(projections: Mapping[str, Projection], rank: int, path: Path, algorithm: Algorithm) -> None:
    parts: dict[str, npt.NDArray[Any]] = {_IDENTITY: np.frombuffer(path.stem.encode(), np.uint8)}
    with single_thread():
        for name, projection in projections.items():
            factors = truncated_svd(projection.weight, rank, algorithm)
            parts |= {f"{name}.{part}": getattr(factors, part).cpu().numpy() for part in "USV"}
    write_sealed(path, parts)


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute with one thread within the block, so that factors do not depend on a machine's spare cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
