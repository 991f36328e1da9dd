"""The table of where prompts are sent, on the package's own tasks."""

import pytest
from tools.routing import DEFINITIONS, ROUTERS, table


@pytest.mark.slow
def test_a_row_for_every_router_and_a_column_for_every_definition(tmp_path):
    benchmark = {"name": "builtin", "tasks": ["mood", "ticket"], "train_per_task": 20, "test_per_task": 6}
    head, _, *rows = table(benchmark, tmp_path)
    assert [cell.strip() for cell in head.split("|")[2:-1]] == list(DEFINITIONS)
    assert [row.split("|")[1].strip() for row in rows] == list(ROUTERS)
    assert rows[-1].split("|")[2].strip() == "100.0%", "a definition that is there verbatim is the nearest"
