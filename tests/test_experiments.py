"""The tables of docs/experiments must be those of the archives in sweeps/results."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from latent_sweep import open_sweep
from latent_sweep.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = {
    "all_methods": ["fair_superni"],
    "one_rate": ["fair_superni", "common_rate_superni"],
    "penalty": ["penalty_superni"],
    "router_reach": ["routing_superni"],
    "budget": ["budget_superni"],
    "long_sequence": ["elsewhere_long_sequence"],
}
"""Pages with the archives of their tables."""


NUMBERS = r"AP|LA|FM|AP, own rate|AP, 1e-3|(?:AP|LA|FM) at \d+|AP at 24 steps|96|288"
"""Titles of the columns that are compared."""


@pytest.fixture(scope="module")
def numbers_of(tmp_path_factory):
    """Return AP, LA and FM in percent of a sweep's configurations, (mean, standard deviation), from its archive."""
    storage = tmp_path_factory.mktemp("runs")

    @cache
    def numbers_of(name):
        assert main(["cp", str(ROOT / "sweeps" / "results" / f"{name}.tar.xz"), str(storage)]) == 0
        assert main(["report", str(storage / name)]) == 0
        sweep = open_sweep(storage / name)
        groups = 100 * sweep.trials().groupby(sweep.configuration, dropna=False)[["AP", "LA", "FM"]].agg(
            ["mean", "std"]
        )
        return groups.fillna(0.0).to_numpy().reshape(-1, 2)

    return numbers_of


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_tables_of_experiments_are_those_of_their_archives(page, numbers_of):
    text = (ROOT / "docs" / "experiments" / f"{page}.md").read_text(encoding="utf-8")
    cells = set()
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        cells |= {row[i] for row in rows for i, title in enumerate(head) if re.fullmatch(NUMBERS, title)}
    stored = np.concatenate([numbers_of(name) for name in PAGES[page]])
    assert len(cells) > 10
    for cell in cells:
        numbers = [float(number) for number in cell.split(" ± ")]
        assert np.any(np.all(abs(stored[:, : len(numbers)] - numbers) < 0.0501, axis=1)), cell
