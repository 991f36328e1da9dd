"""AdapterBank: the frozen projections of a backbone, each with a delta that may differ from row to row of the batch.

One operation serves training and inference: `y = W h + delta(h)`. In plain training every row meets the same small
matrix, in a pack the rows of each member meet that member's, and in routed inference each row meets its own blend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from latent_sweep.errors import ConfigError


class Delta(Protocol):
    """The change that a method makes to one projection's output.

    A delta that is the same for every row of any batch may set `uniform = True`: a prefix that all rows of a batch
    share is then computed once.
    """

    def __call__(self, h: Tensor, output: Tensor) -> Tensor:
        """Return the output, (rows, tokens, out), with the change that belongs to inputs h, (rows, tokens, in).

        It may be added in place: nothing else reads the output.
        """
        ...

    def select(self, rows: Tensor) -> Delta:
        """The same delta for these rows of the batch only (indices, (kept,))."""
        ...


def cast(deltas: Sequence[Delta], dtype: torch.dtype) -> Sequence[Delta]:
    """Return deltas that multiply in this type: at once for all projections, where they know how (a method `cast`)."""
    together = getattr(deltas, "cast", None)
    return deltas if together is None else together(dtype)


@dataclass(frozen=True)
class Adaptation:
    """The changes that a method makes to the frozen backbone for one batch: none at all, unless said."""

    deltas: Sequence[Delta] = ()
    """One per projection, or none: then projections answer `W h`."""
    prompt: Tensor | None = None
    """Soft prompt, (vectors, d) for all rows or (rows, vectors, d): the embedding of token id `-1 - i` is vector i."""

    @property
    def uniform(self) -> bool:
        """Whether it is the same for every row of any batch."""
        said = getattr(self.deltas, "uniform", None)
        same = all(getattr(delta, "uniform", False) for delta in self.deltas) if said is None else bool(said)
        return same and (self.prompt is None or self.prompt.dim() == 2)

    def select(self, rows: Tensor) -> Adaptation:
        """Return the same adaptation for these rows of the batch only (indices, (kept,))."""
        prompt = self.prompt if self.prompt is None or self.prompt.dim() == 2 else self.prompt[rows]
        return Adaptation([delta.select(rows) for delta in self.deltas], prompt)


def virtual_tokens(vectors: int) -> list[int]:
    """Token ids that stand for the vectors of a soft prompt; no vocabulary has them."""
    return [-1 - i for i in range(vectors)]


def by_rows(name: str, h: Tensor, rows: int, tokens: int) -> Tensor:
    """View what a projection reads as (rows, tokens, n), where the model has made (rows * tokens, n) of it.

    Tokens of (rows, tokens, n) may be others than the embedding's: a decoder's, or more where a model pads by itself.

    Raises:
        ConfigError: nothing says which row each token is of.
    """
    # as many tokens as rows, and the tokens of one row far from each other: turned round
    turned = h.dim() == 3 and 1 < h.shape[0] == h.shape[1] and 0 < h.stride(0) < h.stride(1)
    if h.dim() == 3 and len(h) == rows and not turned:
        return h
    if h.dim() == 2 and len(h) == rows * tokens:
        return h.view(rows, tokens, -1)
    raise ConfigError(
        f"backbone.targets: {name} reads {tuple(h.shape)}{' with tokens first' if turned else ''} of {rows} rows of "
        f"{tokens} tokens, expected (rows, tokens, width) or (rows * tokens, width). Nothing says which row each token "
        "there is of, as where an expert reads some of them: name the projections to adapt, and leave it out"
    )


class AdapterBank:
    """Adds the active deltas to the outputs of the target projections; inactive, it changes nothing.

    The backbone's modules stay as they are (their names, weights and checkpoints too): the deltas, and the vectors of
    a soft prompt, come in through forward hooks.

    Args:
        targets: the adapted projections by name.
        embedding: the input embedding, where soft prompts are read.
    """

    def __init__(self, targets: Mapping[str, nn.Linear], embedding: nn.Module | None = None):
        self.targets = dict(targets)
        self._active = Adaptation()
        self._read: tuple[int, int] | None = None  # rows and tokens of the pass, once the embedding has read them
        self._handles = [
            module.register_forward_hook(self._delta_hook(index, name))
            for index, (name, module) in enumerate(targets.items())
        ]
        if embedding is not None:
            self._handles += [
                embedding.register_forward_pre_hook(self._read_tokens),
                embedding.register_forward_hook(self._embed_virtual_tokens),
            ]
        self._virtual: Tensor | None = None
        self._watching: list[Tensor] | None = None

    def _delta_hook(self, index: int, name: str) -> Any:
        def add_delta(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not self._active.deltas:
                return None
            (h, *_), flat = inputs, output.dim() == 2
            if self._read is not None:
                h = by_rows(name, h, *self._read)
                output = output.view(*h.shape[:2], -1) if flat else output
            changed = self._active.deltas[index](h, output)
            if index == 0:
                self._watch(changed)
            return changed.flatten(0, -2) if flat else changed

        return add_delta

    def _read_tokens(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Note how many rows and tokens the pass has, and hide virtual tokens from the embedding."""
        (ids,) = inputs
        self._read = len(ids), ids.shape[1]
        if self._active.prompt is None:
            return None
        self._virtual = ids
        return (self._virtual.clamp(min=0),)

    def _embed_virtual_tokens(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        prompt, ids = self._active.prompt, self._virtual
        if prompt is None or ids is None:
            return None
        vectors = (-1 - ids).clamp(min=0)
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        found = prompt[vectors] if prompt.dim() == 2 else prompt[rows, vectors]
        self._watch(found)
        return torch.where((ids < 0).unsqueeze(-1), found.to(output.dtype), output)

    @contextmanager
    def active(self, adaptation: Adaptation) -> Iterator[None]:
        """Have projection i answer `deltas[i](h, W h)` within the block, virtual tokens be the soft prompt's vectors.

        Raises:
            ValueError: there are deltas, but not one for each projection.
        """
        if adaptation.deltas and len(adaptation.deltas) != len(self.targets):
            expected, found = len(self.targets), len(adaptation.deltas)
            raise ValueError(f"expected one delta for each of {expected} projections, found {found}")
        dtype = next(iter(self.targets.values())).weight.dtype
        # made now and not at their first use, which gradient checkpointing would repeat
        before = self._active, self._read
        self._active, self._read = Adaptation(list(cast(adaptation.deltas, dtype)), adaptation.prompt), None
        try:
            yield
        finally:
            self._active, self._read = before

    @contextmanager
    def watching(self, closely: bool = True) -> Iterator[list[Tensor]]:
        """Watch where gradients arrive: for the forward pass within the block, its backward pass adds to the list.

        An entry tells for every row of the batch, (rows,), whether the gradient of the first projection's output, or of
        the soft prompt, is anything but zero. There is none where no gradient arrives at all.

        Args:
            closely: whether to watch at all: it makes the host wait for the device.
        """
        arrived: list[Tensor] = []
        self._watching = arrived if closely else None
        try:
            yield arrived
        finally:
            self._watching = None

    def _watch(self, added: Tensor) -> None:
        """Note which rows' gradients arrive at what was added to the backbone."""
        arrived = self._watching
        if arrived is not None and added.requires_grad:
            added.register_hook(lambda gradient: arrived.append(gradient.detach().flatten(1).any(1)))

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch in what is active: the others have finished their answer."""
        self._active = self._active.select(rows)
        self._read = self._read and (len(rows), self._read[1])

    def remove(self) -> None:
        """Take the hooks off the backbone."""
        for handle in self._handles:
            handle.remove()


# --- several at once -------------------------------------------------------------------------------------------------


def side_by_side(adaptations: Sequence[Adaptation], counts: Sequence[int]) -> Adaptation:
    """Return one adaptation for a batch whose first counts[0] rows are the first one's, the next the second's, ...

    Deltas that know how to stand beside their like (a static method `beside` of their sequence) share their matrix
    products; others answer for their own rows one after another.
    """
    if len(adaptations) == 1:
        return adaptations[0]
    return Adaptation(_deltas_side_by_side([a.deltas for a in adaptations], counts), _prompts(adaptations, counts))


def _deltas_side_by_side(deltas: Sequence[Sequence[Delta]], counts: Sequence[int]) -> Sequence[Delta]:
    kinds = {type(d) for d in deltas}
    beside = getattr(kinds.pop(), "beside", None) if len(kinds) == 1 else None
    together = beside(deltas, counts) if beside is not None else None
    if together is not None:
        return together
    return [_Split(of_projection, counts) for of_projection in zip(*deltas, strict=True)]


def _prompts(adaptations: Sequence[Adaptation], counts: Sequence[int]) -> Tensor | None:
    prompts = [a.prompt for a in adaptations if a.prompt is not None]
    if not prompts:
        return None
    longest = max(p.shape[-2] for p in prompts)
    wide = [pad(p, (0, 0, 0, longest - p.shape[-2])) for p in prompts]  # no row has ids of the vectors added here
    return torch.cat([p.expand(count, *p.shape[-2:]) for p, count in zip(wide, counts, strict=True)])


class _Split:
    """Several deltas of one projection, each for its own rows of the batch."""

    def __init__(self, deltas: Sequence[Delta], counts: Sequence[int]):
        self.deltas, self.counts = deltas, list(counts)
        self.uniform = all(getattr(delta, "uniform", False) for delta in deltas)

    def __call__(self, h: Tensor, output: Tensor) -> Tensor:
        parts = zip(self.deltas, h.split(self.counts), output.split(self.counts), strict=True)
        return torch.cat([delta(rows, own.clone()) for delta, rows, own in parts])

    def select(self, rows: Tensor) -> Delta:
        raise NotImplementedError("members train side by side, but answer one after another")
