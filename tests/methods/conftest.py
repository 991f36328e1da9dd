"""Marks for the conformance tests: slow, exhaustive, and those that need one machine only."""

import pytest
from helpers.methods import EACH_DEMAND
from helpers.tiny import FAMILIES

from latent_sweep.methods import METHODS
from latent_sweep.testing import MethodConformance
from latent_sweep.testing.conformance import CUTS

FIRST = next(iter(METHODS))
QUICK_CUTS = ("inside the second task", "while the second row is scored")
"""Interruptions in the default selection, on one family: all of the first method, these of methods that represent a use
of the backbone, the first of these of every other."""
SECOND_FAMILY_CUTS = (*QUICK_CUTS, "after the first task")
"""Interruptions of the other methods on the second family."""
EACH_ADAPTER = ("latent_lora", "inc_lora", "gain_lora", "lfpt5", "l2p")
"""Methods that represent all ways of computing packs."""
TOGETHER = "test_two_seeds_side_by_side_end_as_each_alone"
WHOLE_TRAININGS = ("test_another_seed_is_another_training", "test_micro_batches_add_up", TOGETHER)
"""Tests with whole trainings of their own, which are slow on the second family, and for methods like others."""
OF_ONE_FAMILY = (
    "test_every_setting_has_another_value",
    "test_a_stage_reads_what_it_declares",
    "test_a_stage_reads_nothing_of_what_comes_later_or_runs_beside_it",
)
"""Tests whose result does not depend on the family: which settings a stage reads."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    left_out = []
    for item in items:
        suite = getattr(item, "cls", None)
        if suite is None or not issubclass(suite, MethodConformance) or not hasattr(item, "callspec"):
            continue
        family, cut = item.callspec.params["family"], item.callspec.params.get("cut")
        item.add_marker(pytest.mark.xdist_group(f"conformance of {suite.method}"))  # tests of a method share its runs
        other_cut = cut and suite.method != FIRST and cut not in SECOND_FAMILY_CUTS
        if family != FAMILIES[0] and (other_cut or item.originalname in OF_ONE_FAMILY):
            left_out.append(item)
        elif family not in FAMILIES and suite.method not in EACH_DEMAND:
            item.add_marker(pytest.mark.exhaustive)
        elif is_slow(suite.method, family, item.originalname, cut, item.callspec.params.get("position")):
            item.add_marker(pytest.mark.slow)
        if not (item.originalname == TOGETHER and suite.method in EACH_ADAPTER):
            item.add_marker(pytest.mark.one_machine)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def is_slow(method, family, test, cut, position):
    if cut:
        quick = CUTS if method == FIRST else QUICK_CUTS if method in EACH_DEMAND else QUICK_CUTS[:1]
        return cut not in quick or family != FAMILIES[0]
    other_family = family != FAMILIES[0]
    if test in WHOLE_TRAININGS:
        return other_family or method not in (EACH_ADAPTER if test == TOGETHER else EACH_DEMAND)
    return (other_family or position == 0) and method not in EACH_DEMAND
