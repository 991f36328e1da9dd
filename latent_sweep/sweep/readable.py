"""How much of a text a tokenizer reads: characters that it does not know, and prompts that become the same tokens."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from latent_sweep.data.prompts import PromptParts
from latent_sweep.data.text_tokens import tokenize, unknown_id

CHARACTERS_PER_PIECE = 4
"""Tokens that one character may take at most: byte tokenizers take one for each byte."""

UNKNOWN = "\ufffd"
"""Stands for a run of unknown characters, as one token does."""


EXAMPLES = 8
"""Unknown characters that a message shows."""


class UnknownCount(NamedTuple):
    """What a tokenizer does not know of some texts."""

    texts: int
    """Texts with an unknown character."""
    share: float
    """Share of unknown ones among all characters but white space."""
    example: str
    """Some of the unknown characters."""


@dataclass(frozen=True, eq=False)
class Alphabet:
    """The characters that a tokenizer knows.

    Args:
        reader: anything that `tokenize` takes.
    """

    reader: Any
    _known: dict[str, bool] = field(default_factory=dict)

    @cached_property
    def unknown_id(self) -> int | None:
        """Return the token of what the tokenizer does not know; None where it knows every byte."""
        return unknown_id(self.reader.backend_tokenizer)

    @cached_property
    def _by_word(self) -> bool:
        """Whether words, and not characters, are what the tokenizer knows."""
        return json.loads(self.reader.backend_tokenizer.to_str())["model"]["type"] in ("WordLevel", "WordPiece")

    def knows(self, character: str) -> bool:
        """Return whether the tokenizer knows a character."""
        if character not in self._known:
            self._known[character] = self.unknown_id not in tokenize(self.reader, character).ids
        return self._known[character]

    def unknown(self, text: str) -> Counter[str]:
        """Count each unknown character of a text, after the tokenizer's own normalization."""
        if self.unknown_id is None:
            return Counter()
        if self._by_word:
            ids, offsets = tokenize(self.reader, text)
            words = (text[i:j] for token, (i, j) in zip(ids, offsets, strict=True) if token == self.unknown_id)
            return Counter(character for word in words for character in word if not character.isspace())
        text = self._normalized(text)
        return Counter({c: text.count(c) for c in sorted(set(text)) if not c.isspace() and not self.knows(c)})

    def squashed(self, text: str) -> str:
        """Return a text that is equal for all texts with the same tokens: each run of unknown characters is one."""
        text = " ".join(self._normalized(text).split())
        if self._by_word or not (unknown := self.unknown(text)):
            return text
        return re.sub(f"[{re.escape(''.join(unknown))}]+", UNKNOWN, text)

    def count(self, texts: Iterable[str]) -> UnknownCount:
        """Count the unknown characters of texts."""
        held = characters = unknown = 0
        seen: dict[str, None] = {}
        for text in texts:
            found = self.unknown(text)
            held += bool(found)
            unknown += found.total()
            characters += len(text) - sum(map(text.count, " \n\t"))
            seen |= dict.fromkeys(list(found)[:EXAMPLES])
        return UnknownCount(held, unknown / max(1, characters, unknown), "".join(list(seen)[:EXAMPLES]))

    def _normalized(self, text: str) -> str:
        normalizer = self.reader.backend_tokenizer.normalizer
        return text if text.isascii() or normalizer is None else str(normalizer.normalize_str(text))


def alike(
    prompts: Sequence[PromptParts], key: Callable[[PromptParts], Hashable], encode: Callable[[PromptParts], Hashable]
) -> list[list[int]]:
    """Return the positions of prompts that differ as texts and are the same tokens, by group.

    Args:
        prompts: all of a split.
        key: cheap, and equal for all prompts with the same tokens; what it tells apart is not encoded.
        encode: a prompt's tokens.
    """
    near: dict[Hashable, list[int]] = defaultdict(list)
    for position, parts in enumerate(prompts):
        near[key(parts)].append(position)
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for positions in near.values():
        if len({prompts[position] for position in positions}) > 1:
            for position in positions:
                groups[encode(prompts[position])].append(position)
    return [positions for positions in groups.values() if len({prompts[position] for position in positions}) > 1]


def ends(text: str, kept: int, both: bool) -> str:
    """Return the part of a text that surely is among the first `kept` tokens, or the first and last half of them."""
    characters = max(0, kept) // CHARACTERS_PER_PIECE
    if not both:
        return text[:characters]
    half = characters // 2
    return text if len(text) <= 2 * half else text[:half] + text[len(text) - half :]
