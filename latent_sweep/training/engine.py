"""Engines own the backbone. Plain torch here; DeepSpeed, which shards it, is in `backends`.

The loop over steps is the same for all of them, and so are its results, to rounding: an engine is no part of any
training's identity, and what one has checkpointed another goes on from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from latent_sweep.backbones.identity import backbone_identity
from latent_sweep.backbones.loading import Backbone, load_backbone
from latent_sweep.errors import ConfigError
from latent_sweep.settings import canonical_json
from latent_sweep.training.worker_group import ALONE, WorkerGroup

if TYPE_CHECKING:
    from latent_sweep.backbones.registry import BackboneSettings


_OURS = __name__.partition(".")[0] + "."


def _condition(model: Any) -> dict[str, tuple[int, ...]]:
    """What a method could have changed of a frozen model, by name: its parameters, and what runs beside its modules.

    Parameters count the times that they were written to. Hooks of this package are taken off by who put them there.
    """
    found: dict[str, tuple[int, ...]] = {
        name: (id(parameter), parameter._version) for name, parameter in model.named_parameters()
    }
    for name, module in model.named_modules():
        hooks = (
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
            *module._backward_hooks.values(),
            *module._backward_pre_hooks.values(),
        )
        theirs = [id(hook) for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_OURS)]
        if theirs or "forward" in vars(module):
            found[f"{name or 'the model'} ({type(module).__name__})"] = (*theirs, id(vars(module).get("forward")))
    return found


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
        self._condition = _condition(backbone.model) if backbone is not None else None

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
        self._condition = _condition(self._backbone.model)
        return self._backbone

    def check_frozen(self) -> None:
        """Hold the backbone against what it was when it was loaded: what a method leaves on it changes others' results.

        Raises:
            ConfigError: parameters were written to or replaced, or modules have hooks or another `forward`.
        """
        if self._condition is None or (now := _condition(self.backbone.model)) == self._condition:
            return
        before = self._condition
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        raise ConfigError(
            f"the frozen backbone is not what it was when it was loaded: {', '.join(changed[:3])}"
            f"{', ...' * (len(changed) > 3)}. A method has written to parameters, or left hooks or another forward on "
            "modules; nothing of it was stored. Train tensors of the method's own, which `adaptation` returns, and "
            "take off again what is put on the backbone before begin_task, finish, gates or combine return"
        )

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
