"""Router accuracy by router and by definition of the test prompts, without training an adapter.

    LATENT_SWEEP_DATA=... PYTHONPATH=tests python -m tools.routing BENCHMARK ORDER

Fits routers on 200 training rows of each task and routes 100 test rows, with the embedding table of SmolLM2-135M.
Prints Markdown: the share of rows routed to their own task, as a mean over tasks, and for the default router the share
of rows whose pruned posterior has one task only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np

from latent_sweep.data.schema import PromptSettings
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.plan import expand
from latent_sweep.sweep.trial import Trial
from latent_sweep.training.context import Context

ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "router, as by default": {"combine": "soft"},
    "router, `epsilon_mode: absolute`": {"combine": "soft", "epsilon_mode": "absolute"},
    "router, `pool.scope: input_only`": {"combine": "soft", "pool": {"scope": "input_only"}},
    "`ngram`": {"combine": "ngram"},
}
DEFINITIONS = get_args(PromptSettings.model_fields["definition"].annotation)


def trial_of(benchmark: Mapping[str, Any], router: Mapping[str, Any], definition: str) -> Trial:
    settings = {
        "method": {"name": "latent_lora"},
        "router": dict(router),
        "backbone": {"name": "smollm2-135m", "dtype": "float32"},
        "benchmark": {**benchmark, "prompts": {"definition": definition}},
    }
    (trial,) = expand(parse_sweep({"name": "routing", "trial": settings}, "tools.routing"))
    return trial


def table(benchmark: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the lines of the table, with caches in `folder`."""
    yield f"| | {' | '.join(DEFINITIONS)} |"
    yield f"|---|{'---|' * len(DEFINITIONS)}"
    context = Context(trial_of(benchmark, {"combine": "soft"}, "verbatim"), Storage(folder))
    for name, router in ROUTERS.items():
        cells = []
        for definition in DEFINITIONS:
            trial = trial_of(benchmark, router, definition)
            weights = context.combiner(trial, lambda seen, prompts: np.zeros(0)).weights(len(trial.tasks))
            alone = np.mean([np.mean(rows.max(axis=1) == 1) for rows in weights])
            note = f" ({alone:.1%} one-hot)" if router["combine"] == "soft" else ""
            right = np.mean([np.mean(rows.argmax(axis=1) == task) for task, rows in enumerate(weights)])
            cells.append(f"{right:.1%}{note}")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    benchmark = {"name": sys.argv[1], "order": sys.argv[2], "train_per_task": 200, "test_per_task": 100}
    with TemporaryDirectory() as folder:
        for line in table(benchmark, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
