"""Gradient projection memory: which directions of an input the earlier tasks use, and what lies outside of them.

A memory is a matrix M (k, columns) with orthonormal columns in an input space of k dimensions; its columns only grow in
number, and each task leaves the ones it added. Formulas read the uncentred second moment C = sum_x x x^T of an input
up to a factor. Algebra is in float64 wherever C lies; an update computed from directions that are orthogonal to M by
construction needs no correction later.

DualGPM (InfLoRA's own rule) keeps the complement of M instead once M has more than k / 2 columns. Its rule for taking
directions out of that complement adds the very same ones to M, so there is one rule here; where M lies in pieces, one
per task, nothing is gained by the exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from latent_sweep.adapters.bank import by_rows
from latent_sweep.adapters.inputs import input_of, reads_encoder
from latent_sweep.errors import ConfigError

Energy = Literal["sigma4", "sigma2"]


# --- algebra ---------------------------------------------------------------------------------------------------------


def complement(M: Tensor) -> Tensor:
    """An orthonormal basis of all directions outside of M, (k, k - columns), float64."""
    return torch.linalg.qr(M.double(), mode="complete").Q[:, M.shape[1] :]


def outside(X: Tensor, M: Tensor) -> Tensor:
    """The part of each row of X (..., k) outside of M: `X (I - M M^T)`."""
    return X - (X @ M) @ M.T


def second_moment(X: Tensor) -> Tensor:
    """Return sum x x^T over the rows of X (rows, k): (k, k), float64."""
    X = X.double()
    return X.T @ X


def leading_directions(C: Tensor, M: Tensor, energy: Energy = "sigma4") -> tuple[Tensor, Tensor]:
    """Directions outside of M by falling energy, and their shares of all energy, inside M or not.

    `sigma4`: left singular vectors of (I - M M^T) C, weighed by its squared singular values: the released code's, which
    counts the inputs' singular values to the fourth power. `sigma2`: singular vectors of the inputs' own part outside
    of M, weighed by its squared singular values, as in the GPM paper.

    Returns:
        (k, k - columns) orthonormal and orthogonal to M, the entry of largest magnitude of each positive, so that no
        rounding turns one round; and (k - columns,) shares; float64.
    """
    C, Q = C.double(), complement(M.to(C.device))
    CQ = C @ Q
    free, total = (CQ.T @ CQ, C.square().sum()) if energy == "sigma4" else (Q.T @ CQ, C.trace())
    energies, directions = torch.linalg.eigh(free)
    found = Q @ directions.flip(1)
    if len(energies):
        found = found * torch.sign(found.gather(0, found.abs().argmax(dim=0, keepdim=True)))
    return found, energies.flip(0).clamp_min(0) / total.clamp_min(torch.finfo(C.dtype).tiny)


def new_columns(C: Tensor, M: Tensor, threshold: float, energy: Energy = "sigma4") -> Tensor:
    """The columns that bring the share of C's energy inside M up to the threshold, (k, added), float64.

    The first columns of a memory stay just below the threshold, but there is at least one (both as released).
    """
    directions, shares = leading_directions(C, M, energy)
    if M.shape[1] == 0:
        count = max(1, int((shares.cumsum(0) < threshold).sum()))
    else:
        inside_before = 1 - shares.sum() + shares.cumsum(0) - shares
        count = int((inside_before < threshold).sum())
    return directions[:, :count]


# --- inputs of projections -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputBlock:
    """A stretch of the dimensions of an input that some adapted projections read together."""

    name: str
    projections: tuple[int, ...]
    """Their positions among the adapted projections."""
    dimensions: slice
    of_decoder: bool
    """Whether its tokens are those of T5's decoder."""

    @property
    def length(self) -> int:
        """Return k, how many dimensions the block has."""
        return self.dimensions.stop - self.dimensions.start


def input_blocks(
    names: Sequence[str], width: int | Sequence[int], chunks: int = 1, cross_reads_encoder: bool = True
) -> list[InputBlock]:
    """The distinct inputs of the adapted projections, each in `chunks` stretches of equal length.

    Query and value of a self-attention read one input (`input_of`). In T5's cross-attention the query reads the
    decoder's state and the values of all blocks the encoder's output, unless `cross_reads_encoder` is False: then value
    counts as reading what query reads, which it does not.

    Args:
        names: of the projections, e.g. "decoder.block.0.layer.1.EncDecAttention.v".
        width: dimensions of every input, or of each projection's.

    Raises:
        ValueError: a width cannot be divided so.
    """
    widths = [width] * len(names) if isinstance(width, int) else list(width)
    for odd in [width for width in widths if width % chunks][:1]:
        raise ValueError(f"inputs of {odd} dimensions cannot be split into {chunks} equal stretches")
    readers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        of_encoder = cross_reads_encoder and reads_encoder(name)
        readers.setdefault("encoder.output" if of_encoder else input_of(name), []).append(i)
    blocks = []
    for name, projections in readers.items():
        length = widths[projections[0]] // chunks
        for chunk in range(chunks):
            dimensions = slice(chunk * length, (chunk + 1) * length)
            called = name if chunks == 1 else f"{name}.{chunk}"
            of_decoder = "decoder" in name.split(".")
            blocks.append(InputBlock(called, tuple(projections), dimensions, of_decoder))
    return blocks


@contextmanager
def adding_second_moments(
    sums: dict[str, Tensor],
    blocks: Sequence[InputBlock],
    projections: Mapping[str, nn.Linear],
    source: Tensor | None = None,
    decoder: Tensor | None = None,
) -> Iterator[None]:
    """Have a forward pass within the block add `sum_tokens h h^T` of every input block to `sums`, by the block's name.

    Sums are float64 on every device: a memory's number of columns is decided by small differences of their energies.

    Args:
        projections: all adapted ones by name.
        source, decoder: (sequences, tokens) how many tokens each token stands for, of the prompt's side and of T5's
            decoder; None is one for all, padding too.

    Raises:
        ConfigError: nothing says which of the tokens that a projection reads are padding, or projections of one block
            read different tensors.
    """
    named = list(projections.items())

    def reader(block: InputBlock, name: str, counts: Tensor | None) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if counts is not None:
                _check_tokens(by_rows(name, inputs[0], *counts.shape), name, counts)
            h = inputs[0][..., block.dimensions].detach().flatten(0, -2).double()
            counted = h if counts is None else h * counts.flatten().to(h.dtype).unsqueeze(1)
            sums[block.name] = sums[block.name].addmm_(counted.T, h) if block.name in sums else counted.T @ h

        return add

    handles = []
    for block in blocks:
        name, module = named[block.projections[0]]
        counts = decoder if block.of_decoder else source
        handles.append(module.register_forward_pre_hook(reader(block, name, counts)))
    handles += _comparing(blocks, named)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_tokens(h: Tensor, name: str, counts: Tensor) -> None:
    """Raise ConfigError where a projection reads other tokens, (rows, tokens, n), than those that are counted."""
    if h.shape[:2] != counts.shape:
        raise ConfigError(
            f"method.gpm.mask_padding: {name} reads {h.shape[1]} tokens a row, expected the {counts.shape[1]} of the "
            "batch: the model pads or adds some by itself, and nothing says which these are. Set mask_padding: false, "
            f"which counts all that is read, or leave {name} out of backbone.targets"
        )


def _comparing(blocks: Sequence[InputBlock], named: Sequence[tuple[str, nn.Module]]) -> list[RemovableHandle]:
    """Have projections of one block compare what they read, one after another: blocks are made from names alone.

    Values of cross-attention may stand in a block whose input they do not read (`cross_reads_encoder`).
    """
    began: tuple[str, Sequence[int], Tensor | None] = "", (), None  # in the block that is read now

    def compare(name: str, together: Sequence[int]) -> Any:
        def same(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            nonlocal began
            first, block, h = began
            if h is None or first == name or block != together:
                began = name, together, inputs[0]
            elif h is not inputs[0] and not torch.equal(h, inputs[0]):
                raise ConfigError(
                    f"backbone.targets: {first} and {name} read different tensors, expected one, by their names, and "
                    "one gradient projection memory for both. Adapt only one of them, or take a method without memory"
                )

        return same

    handles = []
    for together in dict.fromkeys(block.projections for block in blocks):
        for name, module in [named[i] for i in together if not reads_encoder(named[i][0])]:
            handles.append(module.register_forward_pre_hook(compare(name, together)))
    return handles


def designed(
    A: Tensor, blocks: Sequence[InputBlock], memory: Mapping[str, Tensor], moments: Mapping[str, Tensor], energy: Energy
) -> Tensor:
    """A_Mrn made of the leading input directions outside of the memory, rows of norm 1/sqrt(3); InfLoRA's own design.

    Projections that read one input get one A. Where fewer than r directions are left, the other rows are zero.
    """
    A, rank = torch.zeros_like(A), A.shape[1]
    for block in blocks:
        directions, _ = leading_directions(moments[block.name], memory[block.name], energy)
        rows = directions[:, :rank].T.to(A)
        A[list(block.projections), : len(rows), block.dimensions] = rows
    return rows_of_norm(A)


def projected(A: Tensor, blocks: Sequence[InputBlock], memory: Mapping[str, Tensor]) -> Tensor:
    """The part of A_Mrn outside of the memory, rows of norm 1/sqrt(3): the design of GainLoRA's InfLoRA baseline."""
    A = A.clone()
    for block in blocks:
        Q = complement(memory[block.name].to(A.device))
        places = list(block.projections), slice(None), block.dimensions
        A[places] = (A[places].to(Q) @ Q @ Q.T).to(A)
    return rows_of_norm(A)


def rows_of_norm(A: Tensor, norm: float = 3**-0.5) -> Tensor:
    """A with its non-zero rows rescaled; 1/sqrt(3) is what a random row of A has."""
    return A * (norm / A.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny))
