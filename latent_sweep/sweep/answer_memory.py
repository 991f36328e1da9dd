"""Predict the memory of answering prompts, of probes, and of decoding graphs; legend as in `memory`.

cache        keys and values of all tokens of a batch, grown by `CACHE_GROWTH`
reading      the working set of a block as it reads the prompts, or a copy of one block's keys and values
graphs       with `run.graphs: auto`, keys and values of all padded rows and places, and latent adapters once more
"""

from __future__ import annotations

from latent_sweep.backbones.graph_sizes import CACHE_GROWTH, padded_places, padded_rows
from latent_sweep.data.probe_tokens import CHUNK, MOST_LOGITS, PROMPT
from latent_sweep.sweep.schema import RunSettings
from latent_sweep.sweep.shapes import Shape
from latent_sweep.sweep.step_memory import longest_texts
from latent_sweep.sweep.trial import Trial


def probe_bytes(trial: Trial, shape: Shape) -> int:
    """Return bytes of a pass over chunks of a text, with the logits of their targets."""
    targets = CHUNK - PROMPT
    rows = max(1, min(trial.settings.evaluation.batch_size, MOST_LOGITS // (shape["vocabulary"] * targets)))
    in_block = rows * CHUNK * shape.bytes * max(shape.mlp_inputs + 4 * shape["width"], 8 * shape["queries"])
    of_row = shape["vocabulary"] * targets
    return max(in_block, rows * of_row * shape.bytes + 3 * 4 * of_row)


def peak_of_answers(trial: Trial, shape: Shape) -> tuple[int, int]:
    """Return `Memory`'s cache and reading at the peak: reading prompts, or at the end of the longest answers."""
    rows, (prompt, target) = trial.settings.evaluation.batch_size, longest_texts(trial)
    b, a, h, heads, tokens = shape.bytes, shape["queries"], shape["width"], shape["heads"], rows * prompt
    in_mlp = tokens * b * (shape.mlp_inputs + 4 * h)
    later = target - 1  # nothing reads the last token
    if not shape.family.encoder_decoder:
        of_token = 2 * b * shape["keys"] * rows  # keys and values of one block
        first, whole = shape["blocks"] * of_token * (prompt + min(later, CACHE_GROWTH)), of_token * (prompt + later)
        at_first = first, max(in_mlp, tokens * b * (8 * a + 3 * h)) + b * rows * prompt**2
        at_last = shape["blocks"] * whole, whole  # with a copy of one block's
    else:
        of_token = 2 * b * a * rows
        in_attention = tokens * b * (3 * a + 3 * h) + 2 * b * rows * heads * prompt**2
        at_first = 0, max(in_mlp, in_attention) + b * heads * prompt**2
        cache = shape["decoder_blocks"] * of_token * (prompt + target)
        at_last = cache, tokens * b * h + of_token * max(prompt, target)  # the encoder's output, and the copy
    return max(at_first, at_last, key=sum)


def decodes_with_graphs(run: RunSettings) -> bool:
    resources = run.resources
    return run.graphs == "auto" and run.engine.name == "torch" and resources.workers == 1 and resources.gpus > 0


def graph_cache_bytes(trial: Trial, shape: Shape) -> int:
    """Return bytes of the keys and values of a graph for the largest batch; see `backbones.token_graphs`."""
    rows, (prompt, target) = padded_rows(trial.settings.evaluation.batch_size), longest_texts(trial)
    if not shape.family.laid_out:
        return 0
    if not shape.family.encoder_decoder:
        return shape["blocks"] * 2 * shape.bytes * shape["keys"] * rows * padded_places(prompt + target)
    places = padded_places(1 + target) + padded_places(prompt)
    return shape["decoder_blocks"] * 2 * shape.bytes * shape["queries"] * rows * places
