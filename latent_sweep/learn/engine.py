"""Engines own the backbone. Plain torch here; DeepSpeed, which shards it, is in `backends`.

The loop over steps is the same for all of them, and so are its results, to rounding: an engine is no part of any
training's identity, and what one has checkpointed another goes on from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from latent_sweep.backbones.identity import backbone_identity
from latent_sweep.backbones.loading import Backbone, load_backbone
from latent_sweep.learn.worker_group import ALONE, WorkerGroup
from latent_sweep.settings import canonical_json

if TYPE_CHECKING:
    from latent_sweep.backbones.known import BackboneSettings


_kept: dict[str, Backbone] = {}
"""The backbone that this process has loaded last, by what it was loaded from."""


def forget_backbone() -> None:
    """Have the next pack load its backbone anew: something went wrong, and may have left this one changed."""
    _kept.clear()


class Engine:
    """Plain torch: every worker of the group holds the whole backbone.

    Args:
        group: the workers that compute the trial together.
        backbone: one that is loaded already.
    """

    answers_apart = True
    """Whether workers can answer different rows at the same time."""

    def __init__(self, group: WorkerGroup = ALONE, backbone: Backbone | None = None):
        self.group = group
        self._backbone = backbone

    @property
    def backbone(self) -> Backbone:
        """Return the backbone that was loaded last."""
        assert self._backbone is not None, "load it first"
        return self._backbone

    def load(self, settings: BackboneSettings) -> Backbone:
        """Load a backbone on this engine; every worker of the group calls it at the same time.

        One that this process has loaded before, for another pack, is taken as it is where its settings and its files
        are the same.
        """
        key = canonical_json([settings.model_dump(mode="json"), backbone_identity(settings)])
        if key not in _kept:
            forget_backbone()  # first: there may be no room for two
            _kept[key] = load_backbone(settings)
        self._backbone = _kept[key]
        return self._backbone

    def end_answers_with(self, token: int) -> Backbone:
        """Have answers of the backbone end with another token than EOS, until it is loaded again."""
        self._backbone = replace(self.backbone, answer_end=token)
        return self._backbone

    def facts(self) -> dict[str, Any]:
        """Return the facts that a result records of its engine."""
        return {"engine": "torch", "workers": self.group.size}

    def begin_learning(self) -> None:
        """Prepare for training; every worker is about to train."""

    def begin_answering(self) -> None:
        """Prepare for answering; every worker is about to generate answers, possibly to different rows."""
