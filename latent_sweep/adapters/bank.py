"""AdapterBank: the frozen projections of a backbone, each with a delta that may differ from row to row of the batch.

One operation serves training and inference: `y = W h + delta(h)`. In training every row meets the same small matrix;
in routed inference each row meets its own blend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn


class Delta(Protocol):
    """What is added to one projection's output."""

    def __call__(self, h: Tensor) -> Tensor:
        """The change of the output, (rows, tokens, out), for inputs h of shape (rows, tokens, in)."""
        ...

    def select(self, rows: Tensor) -> Delta:
        """The same delta for these rows of the batch only (indices, (kept,))."""
        ...


class AdapterBank:
    """Adds the active deltas to the outputs of the target projections; inactive, it changes nothing.

    The backbone's modules stay as they are (their names, weights and checkpoints too): the deltas come in through
    forward hooks.
    """

    def __init__(self, targets: Mapping[str, nn.Linear]):
        self.targets = dict(targets)
        self._active: list[Delta] | None = None
        for index, module in enumerate(self.targets.values()):
            module.register_forward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def add_delta(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return None if self._active is None else output + self._active[index](inputs[0])

        return add_delta

    @contextmanager
    def active(self, deltas: Sequence[Delta]) -> Iterator[None]:
        """Within the block, projection i answers `W h + deltas[i](h)`."""
        if len(deltas) != len(self.targets):
            raise ValueError(f"expected one delta for each of {len(self.targets)} projections, found {len(deltas)}")
        before, self._active = self._active, list(deltas)
        try:
            yield
        finally:
            self._active = before

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch in the active deltas: the others have finished their answer."""
        assert self._active is not None
        self._active = [delta.select(rows) for delta in self._active]
