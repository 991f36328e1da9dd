"""Test rows of a benchmark on this machine, to be put next to the answers that a trial has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from latent_sweep.data.loaders import load_examples
from latent_sweep.data.schema import BenchmarkSettings, load_benchmark, scoring_metric
from latent_sweep.errors import ConfigError, DataError
from latent_sweep.metrics import Metric
from latent_sweep.storage.folders import TrialFolder


class BenchmarkRows(NamedTuple):
    """The test rows of one task, in their order."""

    ids: list[str]
    inputs: list[str]
    references: list[list[str]]
    metric: Metric


@lru_cache
def benchmark_rows(settings: BenchmarkSettings, task: str) -> BenchmarkRows:
    """Read a task's test rows and its metric as the benchmark has them on this machine.

    Raises:
        ConfigError: the benchmark, or a task of this name, is not there.
        DataError: the data is missing or malformed.
    """
    spec = load_benchmark(settings.name)
    found = next((known for known in spec.tasks if known.name == task), None)
    if found is None:
        raise ConfigError(f"benchmark {spec.name} has no task {task}")
    rows = load_examples(spec, found, "test", settings)
    return BenchmarkRows(
        [row.id for row in rows],
        [row.input for row in rows],
        [list(row.references) for row in rows],
        scoring_metric(settings, found),
    )


class InputTexts:
    """Reads the input texts of the rows that a trial has answered.

    Args:
        trial: its settings name the benchmark; a `data_dir` that is not on this machine gives way to LATENT_SWEEP_DATA.
    """

    def __init__(self, trial: TrialFolder):
        settings = BenchmarkSettings.model_validate(trial.settings()["benchmark"])
        is_here = settings.data_dir is not None and Path(settings.data_dir).is_dir()
        self._settings = settings if is_here else settings.model_copy(update={"data_dir": None})

    def of(self, task: str, lines: Sequence[Mapping[str, Any]] | None) -> list[str]:
        """Return the input of each row of a task.

        Args:
            lines: what the trial's newest stage has written of each row; None where that is not known.

        Raises:
            ConfigError: the benchmark is not there.
            DataError: the data is missing or malformed, or has other rows than those that were answered.
        """
        rows = benchmark_rows(self._settings, task)
        answered = None if lines is None else [(line["id"], line["references"]) for line in lines]
        if answered != list(zip(rows.ids, rows.references, strict=True)):
            raise DataError(
                f"answers of {task}: found other ids or references in the benchmark's data than the "
                "trial has kept; expected the data that was answered. Check LATENT_SWEEP_DATA and benchmark.data_dir."
            )
        return rows.inputs
