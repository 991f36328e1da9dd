"""Decide when a GPU should read a common prefix once, which saves tokens but costs launches.

A pass takes as long as the slower of host and GPU. For short batches that is the host: fewer tokens then save nothing.
The constants come from an H100's data sheet and torch's typical cost of a launch. They affect speed only.
"""

from __future__ import annotations

from latent_sweep.backbones.loading import Backbone

SECONDS_PER_LAUNCH = 7e-6
"""Of torch and Python on the host, including backward passes."""
MULTIPLICATIONS_PER_SECOND = 2.2e14
"""Multiply-adds in bfloat16, about half of the data sheet's."""
FEWEST_TOKENS = 150
"""Fewer tokens take as long: the GPU reads every weight from memory once."""

PASS_LAUNCHES = 30
"""Per block and pass of generation."""
STEP_LAUNCHES, SHARING_LAUNCHES = 71, 19
"""Per block: of an optimizer step with padded rows, forward and backward, and additionally with a shared prefix.

`tests/tools/test_launches.py` counts all three.
"""


def pays_in_a_step(backbone: Backbone, tokens: int, shared_tokens: int) -> bool:
    """Return whether a GPU's optimizer step is faster with `shared_tokens` in its input than with `tokens`."""
    separate = _seconds(backbone, tokens, STEP_LAUNCHES, ways=2)
    return _seconds(backbone, shared_tokens, STEP_LAUNCHES + SHARING_LAUNCHES, ways=2) < separate


def pays_for_prompts(backbone: Backbone, tokens: int, begin: int, rows: int) -> bool:
    """Return whether a GPU reads a batch's prompts faster in two passes, `begin` common tokens first, than in one."""
    separate = _seconds(backbone, tokens, PASS_LAUNCHES)
    rest = tokens - begin * rows
    return _seconds(backbone, begin, PASS_LAUNCHES) + _seconds(backbone, rest, PASS_LAUNCHES) < separate


def _seconds(backbone: Backbone, tokens: int, launches: int, ways: int = 1) -> float:
    computing = ways * max(tokens, FEWEST_TOKENS) * backbone.multiplied / MULTIPLICATIONS_PER_SECOND
    return max(computing, launches * backbone.blocks * SECONDS_PER_LAUNCH)
