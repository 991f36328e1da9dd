"""What a call spends on a GPU: launches, busy time by kind of kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("attention", ("flash", "fmha", "attention", "mem_eff")),
    ("products", ("gemm", "cutlass", "nvjet", "gemv", "splitk", "cublas")),
    ("copies", ("memcpy", "memset", "copy")),
    ("norms", ("layer_norm", "rms_norm", "rmsnorm", "layernorm")),
    ("reductions", ("reduce",)),
)
"""Parts of kernels' names; all others are elementwise."""


def profiled(call: Callable[[], Any], calls: int) -> tuple[float, float, dict[str, tuple[float, float]]]:
    """Return launches, milliseconds in which a kernel runs, and (milliseconds, kernels) by kind, of one call.

    `call` makes `calls` calls, or steps, at once.
    """
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    launches, spans = 0, []
    milliseconds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in found.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kind = kind_of(event.name())
            milliseconds[kind] += event.duration_ns() / 1e6 / calls
            kernels[kind] += 1
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif event.name().startswith(("cudaLaunchKernel", "cuLaunchKernel")):
            launches += 1
    busy, end = 0, 0
    for first, last in sorted(spans):
        busy += max(0, last - max(first, end))
        end = max(end, last)
    by_kind = {kind: (ms, kernels[kind] / calls) for kind, ms in milliseconds.most_common()}
    return launches / calls, busy / 1e6 / calls, by_kind


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, parts in KINDS if any(part in low for part in parts)), "elementwise")
