"""Which projections read one input, by their names: no torch, so that a plan can count inputs too."""

from __future__ import annotations

READS_ITS_BLOCK = frozenset(
    {"q", "k", "v", "q_proj", "k_proj", "v_proj", "query", "key", "value"}
    | {"wi", "wi_0", "wi_1", "gate_proj", "up_proj"}
)
"""Projections that read what comes into their attention or their MLP, not what another one there has made of it."""

CROSS_ATTENTION = frozenset({"EncDecAttention", "encoder_attn", "cross_attn", "cross_attention", "crossattention"})
"""What attention from a decoder to what the encoder has read is called."""

KEYS_AND_VALUES = frozenset({"k", "v", "k_proj", "v_proj", "key", "value", "key_proj", "value_proj"})


def input_of(name: str) -> str:
    """Name the input of a projection: its block where it reads what comes into that, else the projection itself.

    One too many of them costs memory, and changes no result: equal inputs have equal statistics.
    """
    block, _, projection = name.rpartition(".")
    return block if projection in READS_ITS_BLOCK else name


def reads_encoder(name: str) -> bool:
    """Whether a projection reads the encoder's output: keys and values of cross-attention do."""
    *blocks, projection = name.split(".")
    return projection in KEYS_AND_VALUES and not CROSS_ATTENTION.isdisjoint(blocks)
