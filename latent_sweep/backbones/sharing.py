"""When a GPU should read what rows have in common once: it saves tokens, and costs launches.

The host launches kernels while the GPU computes earlier ones, so a pass takes as long as the slower of the two. On
short batches that is the host: then fewer tokens save nothing, and every launch more is lost.

The constants are of one H100 by its data sheet, and of torch's usual cost of a launch. They decide nothing but speed.
"""

from __future__ import annotations

from latent_sweep.backbones.loading import Backbone

SECONDS_PER_LAUNCH = 7e-6
"""Of torch and Python on the host, backward passes included."""
MULTIPLICATIONS_PER_SECOND = 2.2e14
"""In bfloat16 with additions, about half of the data sheet's."""
FEWEST_TOKENS = 150
"""A pass over fewer takes as long: the GPU reads every weight from memory once."""

PASS_LAUNCHES = 30
"""Of a block when answers are generated."""
STEP_LAUNCHES, SHARING_LAUNCHES = 71, 19
"""Of a block in an optimizer step with padded rows, forward and back, and how many more where rows share a beginning.

`tests/tools/test_launches.py` counts all three.
"""


def pays_in_a_step(backbone: Backbone, tokens: int, shared_tokens: int) -> bool:
    """Whether an optimizer step is faster with `shared_tokens` in its input than with `tokens`, on a GPU."""
    apart = _seconds(backbone, tokens, STEP_LAUNCHES, ways=2)
    return _seconds(backbone, shared_tokens, STEP_LAUNCHES + SHARING_LAUNCHES, ways=2) < apart


def pays_for_prompts(backbone: Backbone, tokens: int, begin: int, rows: int) -> bool:
    """Whether a GPU reads prompts faster in two passes than in one.

    Args:
        tokens: of all prompts of a batch.
        begin: tokens that every prompt begins with, which the first pass reads once.
        rows: prompts of the batch.
    """
    apart = _seconds(backbone, tokens, PASS_LAUNCHES)
    rest = tokens - begin * rows
    return _seconds(backbone, begin, PASS_LAUNCHES) + _seconds(backbone, rest, PASS_LAUNCHES) < apart


def _seconds(backbone: Backbone, tokens: int, launches: int, ways: int = 1) -> float:
    """Seconds of a pass: of the host, or of the GPU, which multiplies each token by every weight of its blocks.

    Args:
        launches: of a block.
        ways: 2 for a pass forward and back, in which frozen weights get no gradients.
    """
    computing = ways * max(tokens, FEWEST_TOKENS) * backbone.multiplied / MULTIPLICATIONS_PER_SECOND
    return max(computing, launches * backbone.blocks * SECONDS_PER_LAUNCH)
