"""Chat templates: what a tokenizer's own template puts around a prompt, and how an answer ends in it.

The whole prompt (instruction, input and cue) is the user's one message, and the answer is the assistant's. What the
template writes around them is found out once, by having it write messages that are known, so that the parts of a prompt
can be cut and pooled as without a template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from latent_sweep.errors import ConfigError
from latent_sweep.security import quoted
from latent_sweep.settings import content_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIXED_DATE = "26 Jul 2024"
"""What templates of the Llama family get as today's date, which they write into every prompt: their own default."""

_MESSAGE, _ANSWER = "THE-MESSAGE", "THE-ANSWER"


@dataclass(frozen=True)
class Chat:
    """The texts that a template puts around a user's message, and the token that ends an answer."""

    before: str
    """What stands before the message, a system prompt of the template's own included."""
    after: str
    """What stands between the message and the answer."""
    end: int
    """The token that ends the assistant's turn."""
    strips: bool
    """Whether the template takes white space off both ends of a message."""

    @property
    def digest(self) -> str:
        """Content hash of all that it changes in prompts and targets."""
        return content_hash([self.before, self.after, self.end, self.strips])


def chat_of(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Find out what the chat template of a tokenizer writes.

    Templates that can think before they answer are asked not to.

    Raises:
        ConfigError: it has none, one that writes today's date, or one that does not write a user's message once.
    """
    template, name = tokenizer.chat_template, quoted(tokenizer.name_or_path)
    if not template:
        raise ConfigError(
            f"benchmark.chat: the tokenizer {name} has no chat template; leave `chat` out, or name a backbone, or a "
            "backbone.tokenizer, that was trained on chats"
        )
    if "strftime_now" in str(template) and "date_string" not in str(template):
        raise ConfigError(
            f"benchmark.chat: the chat template of {name} writes today's date into every prompt, so no two days would "
            "read the same ones; save the tokenizer with a template that does not, and name its folder as "
            "backbone.tokenizer"
        )
    before, after = _around(_written(tokenizer, _MESSAGE), _MESSAGE, tokenizer)
    padded = f"\t\n{_MESSAGE}\n\t"
    strips = padded not in _written(tokenizer, padded)
    return Chat(before, after, _end(tokenizer), strips)


def _written(tokenizer: PreTrainedTokenizerBase, message: str, answer: str | None = None) -> str:
    """Return what the template makes of a user's message, up to the answer or with it."""
    messages = [{"role": "user", "content": message}]
    messages += [{"role": "assistant", "content": answer}] if answer is not None else []
    try:
        written = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=answer is None,
            date_string=FIXED_DATE,
            enable_thinking=False,
        )
    except Exception as error:  # whatever a template raises, its own words among it
        raise ConfigError(
            f"benchmark.chat: the chat template of {quoted(tokenizer.name_or_path)} does not take one message of a "
            f"user: {error}"
        ) from error
    assert isinstance(written, str), "not tokenized"
    return written


def _around(text: str, message: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Cut a text at the message in it."""
    if text.count(message) != 1:
        raise ConfigError(
            f"benchmark.chat: the chat template of {quoted(tokenizer.name_or_path)} writes a message "
            f"{text.count(message)} times; expected once"
        )
    before, _, after = text.partition(message)
    return before, after


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the first special token that the template writes behind an answer; EOS where it writes none."""
    _, behind = _around(_written(tokenizer, _MESSAGE, _ANSWER), _ANSWER, tokenizer)
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ids = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"]
    return next((token for token in ids if token in special), tokenizer.eos_token_id)
