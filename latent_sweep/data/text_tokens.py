"""Tokenize text as text: no row, instruction or label can write a special token by spelling its name.

Tokenizers turn `</s>` or `<|im_end|>` inside a text into that token. An answer that holds it could never be right,
because decoding leaves special tokens out, and a prompt could end in its middle. `split_special_tokens` of transformers
does not prevent it: the vocabulary of a Unigram model (T5) has the names of its special tokens as pieces, and
normalization makes `</s>` of full-width characters. Text without such a name takes the tokenizer's own path, so its ids
are exactly the tokenizer's. Other text is tokenized by a copy whose special tokens have names that no text holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from latent_sweep.errors import ConfigError

MARK = "\U0010fffe"
"""A noncharacter of Unicode. The copy's special tokens have it before their names."""


class TextIds(NamedTuple):
    """The token ids of a text, and the place of each one in it: start and end, in characters."""

    ids: list[int]
    offsets: Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class SpecialTokens:
    """The special tokens of a tokenizer of the package tokenizers.

    Args:
        tokenizer: whose special tokens they are.
        names: each token's name by its id.
        unknown: the token of what the tokenizer does not know; None where it knows everything.
    """

    tokenizer: Any
    names: dict[int, str]
    unknown: int | None

    @cached_property
    def written(self) -> frozenset[int]:
        """Return the ids that only a spelled name can put into a text: all but the unknown token."""
        return frozenset(self.names) - {self.unknown}

    @cached_property
    def _unknown_name(self) -> str | None:
        return None if self.unknown is None else self.tokenizer.id_to_token(self.unknown)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(name[:1] for name in self.names.values())

    def spelled(self, text: str) -> str | None:
        """Return the first special token whose name a text holds; None where it holds none."""
        if not any(beginning in text for beginning in self._beginnings):
            return None
        return next((name for name in self.names.values() if name in text), None)

    def in_ids(self, ids: Iterable[int]) -> list[int]:
        """Return the special tokens in these ids, in their order, without unknown ones."""
        return [token for token in ids if token in self.written]

    def holds_unknown_name(self, text: str) -> bool:
        """Return whether a text spells the unknown token, which ids do not tell from unknown characters."""
        return self._unknown_name is not None and self._unknown_name in text

    def marked(self, text: str) -> str:
        """Put the mark before each special token of a chat template's text, so that `literal` reads it as one."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        starts = [
            start for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if token in self.names
        ]
        for start in reversed(starts):
            text = f"{text[:start]}{MARK}{text[start:]}"
        return text

    @cached_property
    def literal(self) -> Any:
        """The copy of the tokenizer that reads the special tokens' names as text, and marked ones as the tokens.

        Raises:
            ConfigError: the copy gives a special token another id.
        """
        from tokenizers import Tokenizer

        content = json.loads(self.tokenizer.to_str())
        renamed = {name: MARK + name for name in self.names.values()}
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {renamed.get(name, name): token for name, token in model["vocab"].items()}
        else:
            model["vocab"] = [[renamed.get(name, name), score] for name, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
        for token in content["added_tokens"]:
            if token["special"]:
                token |= {"content": renamed[token["content"]], "normalized": False}
        copy = Tokenizer.from_str(json.dumps(content))
        if wrong := [name for token, name in self.names.items() if copy.token_to_id(MARK + name) != token]:
            raise ConfigError(
                f"backbone.tokenizer: its special token {wrong[0]!r} stands in the data as text and cannot be kept "
                "apart from the token, because ids of the tokenizer's added tokens are not consecutive; save the "
                "tokenizer again with transformers' save_pretrained, or take that text out of the data"
            )
        copy.no_truncation()
        copy.no_padding()
        return copy


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens of a tokenizer of transformers, or of what has a `backend_tokenizer` like it."""
    return _special_tokens(tokenizer.backend_tokenizer)


@lru_cache(maxsize=8)
def _special_tokens(backend: Any) -> SpecialTokens:
    added = backend.get_added_tokens_decoder()
    names = {token: entry.content for token, entry in added.items() if entry.special}
    return SpecialTokens(backend, names, unknown_id(backend))


def unknown_id(backend: Any) -> int | None:
    """Return the token that a tokenizer gives for what it does not know; None where it knows every byte."""
    model = json.loads(backend.to_str())["model"]
    if model.get("byte_fallback") and backend.token_to_id("<0x00>") is not None:
        return None
    if (place := model.get("unk_id")) is not None:
        return int(place)
    name = model.get("unk_token")
    return None if name is None else backend.token_to_id(name)


def tokenize(tokenizer: Any, text: str, template: tuple[str, str] = ("", "")) -> TextIds:
    """Tokenize a text as text, inside what a chat template writes before and behind it.

    Offsets are those of the whole text, the template's included.

    Args:
        tokenizer: of transformers, or `sweep.checks.Reader`.
        template: the texts around it, whose special tokens are special.
    """
    before, after = template
    specials = special_tokens(tokenizer)
    encoding = tokenizer(before + text + after, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found = TextIds(encoding["input_ids"], encoding["offset_mapping"])
    expected = specials.in_ids(_ids(tokenizer, before) + _ids(tokenizer, after)) if before or after else []
    if specials.in_ids(found.ids) == expected and not specials.holds_unknown_name(text):
        return found
    marked = specials.marked(before), specials.marked(after)
    literal = specials.literal.encode(marked[0] + text + marked[1], add_special_tokens=False)
    begins, ends = len(marked[0]), len(marked[0]) + len(text)

    def place(position: int) -> int:
        """Return a position of the marked text in the text without marks."""
        if position <= begins:
            return min(position, len(before))
        return len(before) + min(position, ends) - begins + max(0, position - ends)

    return TextIds(literal.ids, [(place(start), place(end)) for start, end in literal.offsets])


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
