"""The latent adapter: `dW = s U diag(S) R V^T` on frozen SVD factors, where only R (rank x rank) is trained.

Equation (5) of the paper, on the ideas of LoRA-XS. Legend: M adapted projections, r rank, B rows of a batch,
T tasks seen. One adapter is a stack of matrices R_Mrr in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from latent_sweep.adapters.factors import Factors

SigmaSide = Literal["out", "in", "none"]
OrthoNorm = Literal["frobenius", "spectral"]


class LatentDelta:
    """The delta of one projection for one R of shape (r, r), or one for each row, (B, r, r); the scale is in R."""

    def __init__(self, right: Tensor, left: Tensor, R: Tensor, dropout: float = 0.0):
        self.right, self.left, self.R, self.dropout = right, left, R, dropout

    def __call__(self, h: Tensor) -> Tensor:
        """Map (B, tokens, in) to (B, tokens, out); the small product is in float32 whatever the backbone's type."""
        if self.dropout:
            h = torch.nn.functional.dropout(h, self.dropout)
        z = (h @ self.right).float() @ self.R.transpose(-1, -2)
        return z.to(h.dtype) @ self.left.T

    def select(self, rows: Tensor) -> LatentDelta:
        """The delta of these rows only."""
        return self if self.R.dim() == 2 else LatentDelta(self.right, self.left, self.R[rows], self.dropout)


class LatentSpace:
    """The frozen side of every latent adapter of a backbone: factors with Sigma folded in.

    Args:
        factors: truncated SVD per projection, all of one rank.
        scale: s, the factor in front of every delta (A1).
        sigma_side: where Sigma stands (A2): `out` as in the paper's equation, `in` as in LoRA-XS's code, or nowhere.
        device, dtype: of the backbone.
        kind: tells spaces of one backbone apart that are not prefixes of each other, e.g. the algorithm's name.
    """

    def __init__(
        self,
        factors: Mapping[str, Factors],
        scale: float,
        sigma_side: SigmaSide,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kind: str = "exact",
    ):
        self.rank = next(iter(factors.values())).S.numel()
        self.scale, self.sigma_side, self.kind = scale, sigma_side, kind
        self.singular_values = torch.stack([f.S for f in factors.values()]).to(device)
        """(M, r), float32."""
        self._rights, self._lefts = [], []
        for f in factors.values():
            left, right = f.U, f.V
            if sigma_side == "out":
                left = left * f.S
            elif sigma_side == "in":
                right = right * f.S
            self._lefts.append(left.to(device, dtype).contiguous())
            self._rights.append(right.to(device, dtype).contiguous())

    def deltas(self, R: Tensor, dropout: float = 0.0) -> LatentDeltas:
        """One delta per projection from R of shape (M, r, r), or (M, B, r, r) with a matrix for each row."""
        return LatentDeltas(self, self.scale * R, dropout)

    def new_adapter(self, std: float, generator: torch.Generator) -> Tensor:
        """R_Mrr drawn from N(0, std^2), float32 (A7)."""
        shape = (len(self._lefts), self.rank, self.rank)
        return (torch.randn(shape, generator=generator) * std).to(self.singular_values.device)


class LatentDeltas(Sequence[LatentDelta]):
    """The deltas of all projections, from `s R` of shape (M, r, r) or (M, B, r, r)."""

    def __init__(self, space: LatentSpace, scaled_R: Tensor, dropout: float = 0.0):
        self.space, self.scaled_R, self.dropout = space, scaled_R, dropout
        sides = zip(space._rights, space._lefts, scaled_R.unbind(0), strict=True)
        self._deltas = [LatentDelta(right, left, R, dropout) for right, left, R in sides]

    def __len__(self) -> int:
        """Return M, the number of adapted projections."""
        return len(self._deltas)

    @overload
    def __getitem__(self, index: int) -> LatentDelta: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LatentDelta]: ...
    def __getitem__(self, index: int | slice) -> LatentDelta | Sequence[LatentDelta]:
        """The delta of one projection."""
        return self._deltas[index]

    @staticmethod
    def beside(members: Sequence[LatentDeltas], counts: Sequence[int]) -> LatentDeltas | None:
        """Give every row its R, smaller ranks padded with zeros; None where the spaces have nothing in common.

        Factors of a smaller rank are a prefix of the larger one's, so the padded R gives the same delta.
        """
        space = max((member.space for member in members), key=lambda space: space.rank)
        alike = {(member.space.sigma_side, member.space.kind) for member in members}
        if len(alike) > 1 or any(member.dropout or member.scaled_R.dim() != 3 for member in members):
            return None
        padded = [pad(m.scaled_R, (0, space.rank - m.space.rank) * 2) for m in members]
        owner = torch.repeat_interleave(torch.tensor(counts)).to(padded[0].device)
        return LatentDeltas(space, torch.stack(padded, dim=1).index_select(1, owner))


def blend(adapters: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Compute R(x) = sum_t w_t(x) R_t, equation (15): adapters T x (M, r, r) and weights (B, T) give (M, B, r, r)."""
    stacked = torch.stack(list(adapters))
    return torch.einsum("bt,tmij->mbij", weights.to(stacked), stacked)


class OrthoPenalty:
    """Interference of a new adapter with the earlier ones: `sum_{i<t} ||R~_i^T R~_t||_F^2`, equations (8) and (10).

    With `R~ = S R` (Sigma on the output side) and `G = sum_{i<t} R~_i R~_i^T` per projection, the sum equals
    `trace(R~_t^T G R~_t)`: O(r^3) whatever the number of earlier tasks. With Sigma on the input side the interference
    kernel is `S R_i^T R_t S`, and `G = sum_i R_i S^2 R_i^T`. The spectral norm has no trace form: it keeps the history.

    Args:
        space: gives singular values and the side of Sigma.
        earlier: adapters of earlier tasks, at least one, each (M, r, r).
        reduce: over projections (A4).
        norm: squared Frobenius as in both equations, or squared spectral as in the bound (A6).
        normalise: `spectral` divides each projection's singular values by its largest (A4b).
        scale: factor on every R~; s where the scale counts as part of R~ (A3), else 1.
    """

    def __init__(
        self,
        space: LatentSpace,
        earlier: Sequence[Tensor],
        reduce: Literal["sum", "mean"] = "sum",
        norm: OrthoNorm = "frobenius",
        normalise: Literal["none", "spectral"] = "none",
        scale: float = 1.0,
    ):
        S = space.singular_values
        if space.sigma_side == "none":
            S = torch.ones_like(S)
        elif normalise == "spectral":
            S = S / S[:, :1]
        S = scale * S
        self.S, self.side, self.reduce = S, space.sigma_side, reduce
        self.earlier = [self._weighted(R) for R in earlier] if norm == "spectral" else None
        self.G = torch.stack([self._outer(self._weighted(R)) for R in earlier]).sum(0)

    def _weighted(self, R: Tensor) -> Tensor:
        """Return R~: R with Sigma on its own side."""
        return R * self.S.unsqueeze(-2) if self.side == "in" else self.S.unsqueeze(-1) * R

    @staticmethod
    def _outer(R: Tensor) -> Tensor:
        return R @ R.transpose(-1, -2)

    def __call__(self, R: Tensor) -> Tensor:
        """The penalty of the new adapter R (M, r, r), a scalar; differentiable."""
        new = self._weighted(R)
        if self.earlier is not None:
            norms = [torch.linalg.matrix_norm(old.transpose(-1, -2) @ new, ord=2).square() for old in self.earlier]
            per_projection = torch.stack(norms).sum(0)
        else:
            per_projection = (new * (self.G @ new)).sum((-1, -2))
        return per_projection.sum() if self.reduce == "sum" else per_projection.mean()
