"""Passwords and tokens stay out of whatever is written or printed: journals, params, tags, links, logs, tracebacks."""

from __future__ import annotations

import logging
import os
import re
import traceback

_USER_PART = re.compile(r'://[^/\s"]+@')
_SECRET_FIELD = re.compile(r"(?i)([?&;][^=&;\s]*(?:token|secret|password|signature|key)[^=&;\s]*=)[^&;\s\"']+")
"""`?password=...` and its like in the query of an address."""
_SECRET_VARIABLE = re.compile(r"(?i)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIAL)S?(_|$)(?!.*(PATH|FILE|DIR)$)")
"""Names of environment variables whose values are secrets; TOKENIZERS_PARALLELISM and AUTH_TOKEN_PATH are none."""
_SHORTEST_SECRET = 6
"""Characters; shorter values, such as `1` or `true`, would be found everywhere."""


def redact(text: str) -> str:
    """`text` without its secrets, each replaced by `***`.

    Secrets are the user part of every address (`http://user:word@host` becomes `http://***@host`), fields such as
    `?token=...` in an address, and the values of environment variables that are named like a secret.
    """
    for secret in _environment_secrets():
        text = text.replace(secret, "***")
    return _without_credentials(text)


def traceback_text(error: BaseException) -> str:
    """Where an error was raised, at its own worker where Ray has brought it, without secrets; the end if it is long."""
    text = getattr(error, "traceback_str", None) or "".join(traceback.format_exception(error))
    return redact(re.sub("\x1b\\[[0-9;]*m", "", text))[-20_000:]


def has_credentials(address: str) -> bool:
    """Whether an address carries a user, a password or a token."""
    return _without_credentials(address) != address


def _without_credentials(text: str) -> str:
    return _SECRET_FIELD.sub(r"\1***", _USER_PART.sub("://***@", text))


def _environment_secrets() -> list[str]:
    """The longest first: one may be part of another."""
    found = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    return sorted((value for value in found if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


class _RedactingFormatter(logging.Formatter):
    """Formats a record with its traceback, then takes the secrets out of all of it."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def log_without_secrets() -> None:
    """Warnings and worse of this process go to stderr, redacted; where logging is set up already, nothing changes."""
    handler = logging.StreamHandler()
    handler.setFormatter(_RedactingFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
