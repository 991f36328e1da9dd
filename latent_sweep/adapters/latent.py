"""The latent adapter: `dW = s U diag(S) R V^T` on frozen SVD factors, where only R (rank x rank) is trained.

Equation (5) of the paper, on the ideas of LoRA-XS. Legend: M adapted projections, r rank, B rows of a batch,
T tasks seen. One adapter is a stack of matrices R_Mrr in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import dropout

from latent_sweep.adapters.bank import Delta
from latent_sweep.adapters.factors import Factors
from latent_sweep.adapters.low_rank import LowRank, scaled_alike, widened

SigmaSide = Literal["out", "in", "none"]
OrthoNorm = Literal["frobenius", "spectral"]


class LatentDelta:
    """The delta of one projection for an R of its own in each row, (B, r, r); the scale is in R."""

    def __init__(self, right: Tensor, left: Tensor, R: Tensor):
        self.right, self.left, self.R = right, left, R

    def __call__(self, h: Tensor, output: Tensor) -> Tensor:
        """Add the change of inputs (B, tokens, n); the small product is in float32 whatever the backbone's type."""
        z = (h @ self.right).float() @ self.R.transpose(-1, -2)
        return output + z.to(h.dtype) @ self.left.T

    def select(self, rows: Tensor) -> LatentDelta:
        """The delta of these rows only."""
        return LatentDelta(self.right, self.left, self.R[rows])


class _DroppedOut:
    """A delta whose inputs are dropped out."""

    def __init__(self, delta: Delta, rate: float):
        self.delta, self.rate = delta, rate

    def __call__(self, h: Tensor, output: Tensor) -> Tensor:
        return self.delta(dropout(h, self.rate), output)

    def select(self, rows: Tensor) -> _DroppedOut:
        return _DroppedOut(self.delta.select(rows), self.rate)


class LatentSpace:
    """The frozen side of every latent adapter of a backbone: factors with Sigma folded in.

    Args:
        factors: truncated SVD per projection, all of one rank.
        scale: s, the factor in front of every delta (A1).
        sigma_side: where Sigma stands (A2): `out` as in the paper's equation, `in` as in LoRA-XS's code, or nowhere.
        device, dtype: of the backbone.
        kind: tells spaces of one backbone apart that are not prefixes of each other: the algorithm's name, and where it
            gives every rank a space of its own, the rank.
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
        lefts, self.rights = [], []
        for f in factors.values():
            left, right = f.U, f.V
            if sigma_side == "out":
                left = left * f.S
            elif sigma_side == "in":
                right = right * f.S
            lefts.append(left.to(device, dtype))
            self.rights.append(right.to(device, dtype).contiguous())
        self._stacks = [_Stack(lefts, width) for width in dict.fromkeys(map(len, lefts))]
        self.lefts = _in_order(self._stacks, [stack.lefts for stack in self._stacks])
        """(m, r) of every projection, in the backbone's type."""

    def lefts_times(self, R: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Compute `left R` of every projection in float32, at once for all of one width, and round it to the type.

        Args:
            R: (M, r, r) gives (m, r) each; with an R for each of P members, (M, P, r, r), it is (P, m, r).
        """
        return _in_order(self._stacks, [stack.times(R).to(dtype) for stack in self._stacks])

    def deltas(self, R: Tensor, dropout: float = 0.0) -> LatentDeltas:
        """One delta per projection from R of shape (M, r, r), or (M, B, r, r) with a matrix for each row."""
        return LatentDeltas(self, R, self.scale, dropout)

    def new_adapter(self, std: float, generator: torch.Generator) -> Tensor:
        """R_Mrr drawn from N(0, std^2), float32 (A7)."""
        shape = (len(self.lefts), self.rank, self.rank)
        return (torch.randn(shape, generator=generator) * std).to(self.singular_values.device)


class _Stack:
    """The left factors of all projections of one width."""

    def __init__(self, lefts: Sequence[Tensor], width: int):
        self.members = [index for index, left in enumerate(lefts) if len(left) == width]
        self.lefts = torch.stack([lefts[index] for index in self.members])
        self._of_all = len(self.members) == len(lefts)
        self._indices = torch.tensor(self.members, device=self.lefts.device)

    def times(self, R: Tensor) -> Tensor:
        """Multiply them by their own part of R (M, r, r) or (M, P, r, r), in float32."""
        own, lefts = R if self._of_all else R.index_select(0, self._indices), self.lefts.float()
        return (lefts if R.dim() == 3 else lefts.unsqueeze(1)) @ own


def _in_order(stacks: Sequence[_Stack], of_stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return what belongs to each projection, in their order."""
    parts = zip(stacks, of_stacks, strict=True)
    found = {index: own for stack, of_stack in parts for index, own in zip(stack.members, of_stack, strict=True)}
    return [found[index] for index in sorted(found)]


class LatentDeltas(Sequence[Delta]):
    """The deltas of all projections.

    Args:
        R: (M, r, r) for all rows, (M, B, r, r) for each row, or (M, P, r, r) for members.
        scale: s.
        dropout: rate on the inputs.
        counts: how many rows of the batch belong to each member.
    """

    def __init__(
        self, space: LatentSpace, R: Tensor, scale: float, dropout: float = 0.0, counts: Sequence[int] | None = None
    ):
        self.space, self.R, self.scale, self.dropout, self.counts = space, R, scale, dropout, counts
        self._dtype = space.lefts[0].dtype

    @property
    def scaled_R(self) -> Tensor:
        """Compute s R."""
        return self.R if self.scale == 1 else self.scale * self.R

    @property
    def uniform(self) -> bool:
        """Whether they are the same for every row: not with masks of dropout, which are drawn for each."""
        return self.R.dim() == 3 and not self.dropout

    def __len__(self) -> int:
        """Return M, the number of adapted projections."""
        return len(self.R)

    @overload
    def __getitem__(self, index: int) -> Delta: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Delta]: ...
    def __getitem__(self, index: int | slice) -> Delta | Sequence[Delta]:
        """The delta of one projection."""
        return self._deltas[index]

    @cached_property
    def _deltas(self) -> Sequence[Delta]:
        space, R = self.space, self.scaled_R
        found: list[Delta]
        if R.dim() == 4 and self.counts is None:
            sides = zip(space.rights, space.lefts, R.unbind(0), strict=True)
            found = [LatentDelta(right, left, own) for right, left, own in sides]
        else:
            lefts = space.lefts_times(R, self._dtype)
            found = [LowRank(right, left, self.counts) for right, left in zip(space.rights, lefts, strict=True)]
        return [_DroppedOut(delta, self.dropout) for delta in found] if self.dropout else found

    @staticmethod
    def beside(members: Sequence[LatentDeltas], counts: Sequence[int]) -> LatentDeltas | None:
        """Give every member its R, smaller ranks padded with zeros; None where the spaces have nothing in common.

        Factors of a smaller rank are a prefix of the larger one's, so the padded R gives the same delta.
        """
        space = max((member.space for member in members), key=lambda space: space.rank)
        alike = {(member.space.sigma_side, member.space.kind) for member in members}
        if len(alike) > 1 or not all(member.uniform for member in members):
            return None
        together, scale = scaled_alike([(m.R, m.scale) for m in members])
        wide = [widened(R, (0, space.rank - R.shape[-1]) * 2) for R in together]
        return LatentDeltas(space, torch.stack(wide, dim=1), scale, counts=counts)


def merge(adapters: Sequence[Tensor], weights: Tensor) -> Tensor:
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
        return per_projection.sum(-1) if self.reduce == "sum" else per_projection.mean(-1)

    @staticmethod
    def together(members: Sequence[tuple[OrthoPenalty, Tensor]]) -> Tensor | None:
        """Compute the penalties of P new adapters, (P,), in one product; None where they have no form in common."""
        forms = {(penalty.S.shape, penalty.side, penalty.reduce) for penalty, _ in members}
        if len(forms) != 1 or any(penalty.earlier is not None for penalty, _ in members):
            return None
        joined = copy(members[0][0])
        joined.S = torch.stack([penalty.S for penalty, _ in members])
        joined.G = torch.stack([penalty.G for penalty, _ in members])
        return joined(torch.stack([R for _, R in members]))
