"""The base of every group of settings, and the helpers that turn settings into identities.

Settings live beside the class they build (`RouterSettings` in `router.py`, ...). They are frozen, refuse unknown
keys, and never coerce: a string where a number is expected is a fault, not a guess.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

INFERENCE_ONLY: Any = {"inference_only": True}
"""Mark of a field that training never reads: `Field(json_schema_extra=INFERENCE_ONLY)`. It may vary for free."""

NOT_IDENTITY: Any = {"not_identity": True}
"""Mark of a field that says where or how fast, never what: it is no part of any identity."""


class Settings(BaseModel):
    """A frozen, strict group of settings; subclasses give each field a range and one sentence with its unit."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def identity(self) -> dict[str, Any]:
        """Every setting that can change a result, as plain JSON values."""
        return self._content({"not_identity"})

    def training_identity(self) -> dict[str, Any]:
        """Every setting that training reads, as plain JSON values."""
        return self._content({"not_identity", "inference_only"})

    def _content(self, dropped: set[str]) -> dict[str, Any]:
        kept = {}
        for name, field in type(self).model_fields.items():
            marks = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            if dropped & set(marks):
                continue
            value = getattr(self, name)
            kept[name] = value._content(dropped) if isinstance(value, Settings) else self._plain(name, value)
        return kept

    def _plain(self, name: str, value: Any) -> Any:
        return self.model_dump(mode="json", include={name})[name]


def canonical_json(content: Any) -> str:
    """`content` as JSON with sorted keys and no spaces: equal content gives equal text on every machine."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def content_hash(content: Any, length: int = 16) -> str:
    """The first `length` hexadecimal digits of the SHA-256 of `content`'s canonical JSON."""
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:length]
