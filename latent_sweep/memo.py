"""A memo for the duration of one command: thousands of trials share files and groups of settings, read each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_memo: ContextVar[dict[Any, tuple[Any, Any]] | None] = ContextVar("memo", default=None)


@contextmanager
def memo_scope() -> Iterator[None]:
    """Keep the results of `memoized` until the outermost scope ends; files are assumed not to change meanwhile."""
    if _memo.get() is not None:
        yield
        return
    token = _memo.set({})
    try:
        yield
    finally:
        _memo.reset(token)


def memo_active() -> bool:
    return _memo.get() is not None


def memoized(key: Any, parts: tuple[Any, ...], compute: Callable[[], T]) -> T:
    """Return `compute()`, computed once per hashable key and parts, compared by identity, within a `memo_scope`."""
    memo = _memo.get()
    if memo is None:
        return compute()
    full_key = (key, *map(id, parts))
    if full_key not in memo:
        memo[full_key] = parts, compute()  # holds the parts, so that their ids are not reused
    result: T = memo[full_key][1]
    return result
