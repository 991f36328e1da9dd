"""What `latent-sweep plan` says about `match: parameters`: the trainable parameters of each method."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from latent_sweep.sweep.matching import size_setting, target_key
from latent_sweep.sweep.shapes import shape_of
from latent_sweep.sweep.trial import Trial

_INDENT = " " * 12
_WIDTH = 120


def match_lines(trials: Sequence[Trial]) -> list[str]:
    """Return lines with the parameters per task of every method, and how far they are from those of the first."""
    targets: dict[tuple[str, ...], int] = {}
    methods: dict[str, dict[str, dict[str, None]]] = {}
    """Backbone -> size -> methods."""
    for trial in trials:
        settings, backbone = trial.settings.method, trial.settings.backbone
        shape = shape_of(backbone)
        assert shape is not None, "`match` refuses other backbones"
        count, name = trial.method().parameter_count(shape.targets, shape["width"]), size_setting(settings)
        target = targets.setdefault(target_key(settings, backbone), count) if count else 0
        size = _size(count, target) + (f" at {name} {getattr(settings, name)}" if name and count else "")
        methods.setdefault(backbone.name, {}).setdefault(size, {})[settings.name] = None
    lines = ["  match     trainable parameters per task, and the difference from the first method's"]
    for backbone_name, sizes in methods.items():
        lines += [f"{_INDENT}on {backbone_name}"] * (len(methods) > 1)
        for size, names in sizes.items():
            text = f"{size}: {', '.join(names)}"
            lines += textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=f"{_INDENT}  ")
    if len({kind for *_, kind in targets}) > 1:
        lines.append(f"{_INDENT}prompts are matched with each other, not with adapters")
    return lines


def _size(count: int, target: int) -> str:
    if not count:
        return "nothing"
    return f"{count:,}" if count == target else f"{count:,} ({100 * (count - target) / target:+.1f} %)"
