"""What tests assert of a message: its values, not its words. Whole texts are in tests/snapshots."""

from __future__ import annotations

import re


def mentions(text, *values):
    """Return whether a message contains these values, in this order."""
    return re.search(".*".join(re.escape(str(value)) for value in values), text, re.DOTALL) is not None
