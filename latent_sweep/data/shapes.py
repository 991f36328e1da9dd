"""Record shapes that need no template: which columns are the input, and which one is the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MESSAGES = "messages"
"""Column with a chat: objects with `role` and `content`, the last one the assistant's."""

ROLES = {"user": "User", "assistant": "Assistant", "system": "System"}


@dataclass(frozen=True)
class Shape:
    """The columns of an example.

    Args:
        inputs: joined by line breaks; if there are several, empty and null ones are left out.
        answer: holds a string, or a list of strings for several references.
    """

    inputs: tuple[str, ...]
    answer: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.inputs, self.answer)

    def input_of(self, record: Mapping[str, Any]) -> Any:
        """Return the input of a record; a value that is not text is returned as it is, for the error message."""
        texts = [record[column] for column in self.inputs]
        if len(texts) == 1:
            return texts[0]
        wrong = [text for text in texts if text is not None and not isinstance(text, str)]
        return wrong[0] if wrong else "\n".join(text for text in texts if text and text.strip())


SHAPES = (
    Shape(("sentence",), "label"),  # Long Sequence
    Shape(("prompt",), "answer"),  # TRACE
    Shape(("instruction", "input"), "output"),  # Alpaca
    Shape(("input",), "output"),
    Shape(("instruction",), "output"),
    Shape(("prompt",), "completion"),
    Shape(("context", "question"), "answer"),
    Shape(("question",), "answer"),
)
"""In order of precedence."""


def shape_of(record: Mapping[str, Any]) -> Shape | None:
    return next((shape for shape in SHAPES if all(column in record for column in shape.columns)), None)


def nearest_shape(record: Mapping[str, Any]) -> Shape:
    """Return the shape with the fewest columns missing from a record; input and output if it shares none."""
    plain = Shape(("input",), "output")
    near = [shape for shape in (plain, *SHAPES) if any(column in record for column in shape.columns)]
    return min(near, key=lambda shape: sum(column not in record for column in shape.columns), default=plain)


def read_chat(messages: Any) -> tuple[str, str] | None:
    """Return input and answer of a chat; None unless it is well formed and the assistant's message is last.

    A single user message is the input, after the system's message and a blank line if there is one. Several messages
    become lines that start with their role.
    """
    if not isinstance(messages, list) or len(messages) < 2 or not all(map(_is_message, messages)):
        return None
    *before, last = messages
    if last["role"] != "assistant":
        return None
    roles = [message["role"] for message in before]
    if roles in (["user"], ["system", "user"]):
        return "\n\n".join(message["content"] for message in before), last["content"]
    return "\n".join(f"{ROLES[message['role']]}: {message['content']}" for message in before), last["content"]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
