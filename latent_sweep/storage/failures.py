"""What stopped a trial: of what kind it is, what was being done, and what need not be kept of it.

out_of_memory  half the rows in a pass may fit
device_lost    the GPU has ended this process's work for good: all that it is asked next fails; another process works
non_finite     a loss or gradient became NaN or infinite
error          anything else
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from latent_sweep.errors import LatentSweepError, NonFiniteLoss
from latent_sweep.security import redact, traceback_text

Kind = Literal["error", "non_finite", "out_of_memory", "device_lost"]
Phase = Literal["learning", "answering", "statistics"]
"""What memory may not suffice for: optimizer steps, answers, or what a method measures before and after its steps."""

OUT_OF_MEMORY = (
    "cuda out of memory",
    "hip out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "cuda failure 'out of memory'",  # as NCCL says it, and in earlier versions:
    "cuda failure 2 'out of memory'",
    "failed to cuda calloc",
    "failed to cuda host alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_insufficient_resources",
    "cublas_status_not_initialized",  # which is what making a handle says where memory is short
    "cudnn_status_not_initialized",
    "cusolver_status_not_initialized",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cannot allocate memory",
)
"""What an error says that is out of memory and has another type."""

DEVICE_LOST = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "invalid program counter",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "gpu has fallen off the bus",
    "nvrm: xid",
)
"""What an error says after which CUDA refuses this process everything."""


def failure_kind(error: BaseException) -> Kind:
    """Tell of what kind an error is, by its type and, where a library has raised it, by what it says."""
    cause = getattr(error, "cause", None) or error  # of a remote error
    if isinstance(cause, NonFiniteLoss):
        return "non_finite"
    if isinstance(cause, LatentSweepError):
        return "error"
    said = str(cause).lower()
    if any(mark in said for mark in DEVICE_LOST) and isinstance(cause, RuntimeError):
        return "device_lost"
    if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":  # torch's, not loaded here
        return "out_of_memory"
    if isinstance(cause, (RuntimeError, OSError)) and any(mark in said for mark in OUT_OF_MEMORY):
        return "out_of_memory"
    return "error"


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Have an error that leaves the block say what was being done; it says so in another process, too."""
    try:
        yield
    except Exception as error:
        error.__dict__.setdefault("during", phase)
        raise


def failure_facts(error: BaseException) -> dict[str, str]:
    """Return what a journal records of what stopped a trial; they decide whether another try is worth it."""
    cause = getattr(error, "cause", None) or error
    message = f"{cause}" if isinstance(cause, LatentSweepError) else f"{type(cause).__name__}: {cause}"
    facts = {"kind": failure_kind(error), "message": redact(message)[:2000], "traceback": traceback_text(error)}
    phase = getattr(cause, "during", None)
    return facts if phase is None else {**facts, "during": phase}


def free_frames(error: BaseException) -> None:
    """Free what the frames of an error and of what led to it hold: a backbone, activations, a GPU's memory.

    Its type, its message and the lines of its traceback stay.
    """
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        seen.add(id(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            _clear(frame)
        left += [other for other in (one.__cause__, one.__context__) if other is not None and id(other) not in seen]
    free_memory()


def free_memory() -> None:
    """Free what nobody holds any more, and let other processes have what of a GPU was kept for later."""
    gc.collect()  # models and engines are circles
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _clear(frame: FrameType) -> None:
    """Forget the local variables of a frame, and of those that had called it, as far as they have ended."""
    caller: FrameType | None = frame
    while caller is not None:
        # a generator that has called would be closed if it waits; one that the error went through has ended
        if caller is frame or not caller.f_code.co_flags & inspect.CO_GENERATOR:
            try:
                caller.clear()
            except RuntimeError:  # it runs, and so do all above it
                return
        caller = caller.f_back
