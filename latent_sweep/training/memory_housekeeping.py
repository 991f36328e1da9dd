"""The heaps of a worker: that of C, which torch's tensors on a CPU come from, and Python's, which is collected."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


def give_back_memory() -> None:
    """Return what is free in the C heap to the system; does nothing where its library cannot.

    glibc keeps what lies below anything in use. Batches of many lengths leave such pieces behind: a worker that learned
    task after task held 11 GiB after an hour, where it used 1.6, until the host ran out of memory.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    """The function of glibc; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


@contextmanager
def loading_modules() -> Iterator[None]:
    """Collect no garbage while torch and transformers are loaded, and leave what was loaded out of collections after.

    They make hundreds of thousands of objects that stay, and collections that look at them take a fifth of the time.
    For processes of this project's own. Where they are loaded already, nothing is left out: it might be garbage.
    """
    first = "transformers" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()
