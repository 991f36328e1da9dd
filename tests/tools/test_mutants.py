"""The list of mutants stays alive: each fits the code and names tests that are there; `make mutants` runs them."""

import ast

import pytest
from tools import mutants


def test_every_mutant_still_fits_the_code():
    assert mutants.misfits(mutants.MUTANTS) == []


def test_a_mutant_that_does_not_fit_is_named():
    absent = mutants.Mutant("something", "metrics/answers.py", "no such text", "", ("metrics::test_csv",))
    several = mutants.Mutant("something", "metrics/answers.py", "return", "", ("metrics::test_csv",))
    faults = mutants.misfits([absent, several])
    assert "metrics/answers.py, 'something': found 'no such text' 0 times; expected it once" in faults
    assert len(faults) == 2


def test_every_mutant_changes_something_and_can_be_compiled():
    for mutant in mutants.MUTANTS:
        assert mutant.old != mutant.new
        text = mutant.source().read_text(encoding="utf-8").replace(mutant.old, mutant.new)
        try:
            ast.parse(text)
        except SyntaxError as error:
            pytest.fail(f"{mutant.file}, {mutant.wrong}: {error}")


def test_every_mutant_names_tests_that_are_there():
    names = {}
    for node in sorted({node for mutant in mutants.MUTANTS for node in mutant.nodes()}):
        path, _, name = node.partition("::")
        if path not in names:
            tree = ast.parse((mutants.ROOT / path).read_text(encoding="utf-8"))
            names[path] = {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}
        assert name in names[path], node


def test_a_survivor_is_told_from_what_could_not_be_run():
    mutant = mutants.MUTANTS[0]
    failed = "FAILED tests/test_metrics.py::test_csv - assert 1 == 2\n1 failed"
    assert mutants.outcome_of(mutant, 1, failed, 1.0).row(3).endswith("| killed | test_csv | 1 |")
    assert mutants.outcome_of(mutant, 0, "1 passed", 1.0).result == "SURVIVED"
    assert mutants.outcome_of(mutant, 4, "no such test", 1.0).result == "pytest ended with 4"
