"""The pretrained T5 as a parameter of tests that also run on tiny ones."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from latent_sweep.backbones.registry import FLAN_T5

MISSING = [name for name in ("traceforge_title_model", "onnx") if importlib.util.find_spec(name) is None]
NEEDS_FLAN_T5 = pytest.mark.skipif(
    bool(MISSING), reason=f"{FLAN_T5} needs `pip install 'latent-sweep[flan-t5]'`: no {' and '.join(MISSING)}"
)


def on_flan_t5(*values: Any, id: str | None = None) -> Any:
    """Return the parameters of a slow test: the pretrained T5, then `values`. It is skipped without its package."""
    return pytest.param(FLAN_T5, *values, marks=[pytest.mark.slow, NEEDS_FLAN_T5], id=id)
