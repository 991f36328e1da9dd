"""The LoRA adapter: `dW = s B A` per adapted projection, and branches of it that answer together.

Legend: M adapted projections, all with n inputs; m outputs of one of them and O of all together; r rank, B rows of a
batch, T branches, P members of a pack. One branch is a pair of float32 tensors: A_Mrn, and B_Or, whose rows are those
of the projections' own B (m, r) one after another. Two tensors instead of 2 M make optimizer steps and packs cheap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad

from latent_sweep.adapters.bank import Adaptation, Delta, side_by_side

Branch = tuple[Tensor, Tensor]
"""A_Mrn and B_Or of one adapter."""


def outputs_of(targets: Mapping[str, nn.Linear]) -> list[int]:
    """Output widths m of the adapted projections, in order.

    Raises:
        ValueError: they differ in their number of inputs.
    """
    inputs = {module.in_features for module in targets.values()}
    if len(inputs) > 1:
        raise ValueError(f"LoRA branches need adapted projections of one input width; found {sorted(inputs)}")
    return [module.out_features for module in targets.values()]


def new_branch(targets: Mapping[str, nn.Linear], rank: int, generator: torch.Generator) -> Branch:
    """Draw A from U(-1/sqrt(n), 1/sqrt(n)), PyTorch's default for linear layers, with B = 0; on the targets' device."""
    outputs, first = outputs_of(targets), next(iter(targets.values()))
    n, device = first.in_features, first.weight.device
    A = (torch.rand(len(outputs), rank, n, generator=generator) * 2 - 1) / n**0.5
    return A.to(device), torch.zeros(sum(outputs), rank, device=device)


class LoraDelta:
    """The delta of one projection: `s B (w * (A h))`; w, (B, 1, r), weighs the ranks row by row where it is given.

    In a pack A is (P, r, n) and B (P, m, r), and rows belong to members in blocks of `counts`.
    """

    def __init__(
        self, A: Tensor, B: Tensor, scale: float, w: Tensor | None = None, counts: Sequence[int] | None = None
    ):
        self.A, self.B, self.scale, self.w, self.counts = A, B, scale, w, counts

    def __call__(self, h: Tensor) -> Tensor:
        """Map inputs (B, tokens, n) to changes (B, tokens, m), in the type of h."""
        A, B = self.A.to(h.dtype).transpose(-1, -2), self.B.to(h.dtype).transpose(-1, -2)
        if self.counts is None:
            z = h @ A
            return (self.scale * z if self.w is None else self.scale * (z * self.w.to(h.dtype))) @ B
        if len(set(self.counts)) == 1:  # one batched product for all members
            blocks = h.reshape(len(self.counts), -1, h.shape[-1])
            return (self.scale * (blocks @ A) @ B).view(*h.shape[:-1], -1)
        parts = zip(h.split(list(self.counts)), A, B, strict=True)
        return torch.cat([self.scale * (part @ A_p) @ B_p for part, A_p, B_p in parts])

    def select(self, rows: Tensor) -> LoraDelta:
        """The delta of these rows only."""
        return self if self.w is None else LoraDelta(self.A, self.B, self.scale, self.w[rows])


class LoraDeltas(Sequence[LoraDelta]):
    """The deltas of all projections for one branch (or several, concatenated along the rank).

    Args:
        A, B: the branch, (M, r, n) and (O, r); in a pack (M, P, r, n) and (O, P, r).
        outputs: m of every projection.
        scale: s = alpha / r.
        w: weights of the ranks in each row, (B, r).
    """

    def __init__(
        self,
        A: Tensor,
        B: Tensor,
        outputs: Sequence[int],
        scale: float,
        w: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ):
        self.A, self.B, self.outputs, self.scale, self.w, self.counts = A, B, list(outputs), scale, w, counts
        per_row = None if w is None else w.unsqueeze(1)
        Bs = [b if counts is None else b.transpose(0, 1) for b in B.split(self.outputs)]
        self._deltas = [LoraDelta(a, b, scale, per_row, counts) for a, b in zip(A.unbind(0), Bs, strict=True)]

    def __len__(self) -> int:
        """Return M, the number of adapted projections."""
        return len(self._deltas)

    @overload
    def __getitem__(self, index: int) -> LoraDelta: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LoraDelta]: ...
    def __getitem__(self, index: int | slice) -> LoraDelta | Sequence[LoraDelta]:
        """The delta of one projection."""
        return self._deltas[index]

    @staticmethod
    def beside(members: Sequence[LoraDeltas], counts: Sequence[int]) -> LoraDeltas | None:
        """Join all in one batched product, smaller ranks padded with zeros; None where rows have own weights."""
        if any(member.w is not None or member.counts is not None for member in members):
            return None
        rank = max(member.A.shape[1] for member in members)
        A = [pad(member.A, (0, 0, 0, rank - member.A.shape[1])) for member in members]
        B = [pad(member.scale * member.B, (0, rank - member.B.shape[1])) for member in members]
        return LoraDeltas(torch.stack(A, 1), torch.stack(B, 1), members[0].outputs, 1.0, counts=counts)


@dataclass(frozen=True)
class DenseDelta:
    """A delta folded into one matrix dW of shape (m, n): its cost does not grow with the branches in it."""

    dW: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """Map inputs (B, tokens, n) to changes (B, tokens, m)."""
        return h @ self.dW.T

    def select(self, rows: Tensor) -> DenseDelta:
        """Return the delta itself: it is the same for all rows."""
        return self


def summed(branches: Sequence[Branch], outputs: Sequence[int], scale: float, dtype: torch.dtype) -> Sequence[Delta]:
    """Add up frozen branches in the cheaper of two ways: concatenated along the rank, or folded into one matrix each.

    So a stage pays at most one product with a matrix of the projection's own shape, however many branches there are.
    """
    A = torch.cat([a for a, _ in branches], 1)
    B = torch.cat([b for _, b in branches], 1)
    modules, rank, n = A.shape
    if rank * (modules * n + len(B)) < n * len(B):
        return LoraDeltas(A.to(dtype), B.to(dtype), outputs, scale)
    return [DenseDelta((scale * b @ a).to(dtype)) for a, b in zip(A.unbind(0), B.split(list(outputs)), strict=True)]


def blended(
    branches: Sequence[Branch], weights: Tensor, outputs: Sequence[int], scale: float, dtype: torch.dtype
) -> Sequence[Delta]:
    """Weigh branches row by row, weights (B, T): `sum_t w_t(x) s B_t A_t`. One row of weights holds for all rows.

    Branches that no row weighs play no part.
    """
    used = [t for t in range(len(branches)) if bool(weights[:, t].any())]
    if not used:
        return ()
    branches = [branches[t] for t in used]
    weights = weights[:, used].to(branches[0][0].device)
    if len(weights) == 1:
        return summed([(A, w * B) for (A, B), w in zip(branches, weights[0], strict=True)], outputs, scale, dtype)
    A = torch.cat([a for a, _ in branches], 1).to(dtype)
    B = torch.cat([b for _, b in branches], 1).to(dtype)
    ranks = torch.tensor([a.shape[1] for a, _ in branches], device=weights.device)
    return LoraDeltas(A, B, outputs, scale, w=torch.repeat_interleave(weights, ranks, dim=1))


class DeltaSum(Sequence["_Sum"]):
    """Several deltas per projection, added up.

    Args:
        terms: each has a delta for every projection; empty ones are left out, but one must stay.
        rate: of dropout on the input, one mask for all terms.
        detach: for each term, whether no gradient reaches the input through it; None is for none.
    """

    def __init__(self, terms: Sequence[Sequence[Delta]], rate: float = 0.0, detach: Sequence[bool] | None = None):
        kept = [(term, cut) for term, cut in zip(terms, detach or [False] * len(terms), strict=True) if term]
        self.terms, self.rate, self.detach = [term for term, _ in kept], rate, [cut for _, cut in kept]
        self._deltas = [_Sum(parts, rate, self.detach) for parts in zip(*self.terms, strict=True)]

    def __len__(self) -> int:
        """Return M, the number of adapted projections."""
        return len(self._deltas)

    @overload
    def __getitem__(self, index: int) -> _Sum: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Sum]: ...
    def __getitem__(self, index: int | slice) -> _Sum | Sequence[_Sum]:
        """The delta of one projection."""
        return self._deltas[index]

    @staticmethod
    def beside(members: Sequence[DeltaSum], counts: Sequence[int]) -> DeltaSum | None:
        """Join term by term; None where inputs are dropped out, or members differ in terms that detach."""
        detach = members[0].detach
        if any(member.rate or member.detach != detach for member in members):
            return None
        alike = zip(*(member.terms for member in members), strict=True)
        terms = [side_by_side([Adaptation(term) for term in of_members], counts).deltas for of_members in alike]
        return DeltaSum(terms, detach=detach)


class _Sum:
    """The sum of several deltas of one projection."""

    def __init__(self, parts: Sequence[Delta], rate: float, detach: Sequence[bool]):
        self.parts, self.rate, self.detach = parts, rate, detach

    def __call__(self, h: Tensor) -> Tensor:
        h = dropout(h, self.rate) if self.rate else h
        first, *others = [part(h.detach() if cut else h) for part, cut in zip(self.parts, self.detach, strict=True)]
        return sum(others, start=first)

    def select(self, rows: Tensor) -> _Sum:
        return _Sum([part.select(rows) for part in self.parts], self.rate, self.detach)
