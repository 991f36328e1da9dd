"""Every method through the suite that methods from outside run on themselves; one class of tests for each of them."""

from helpers.methods import OPTIONS

from latent_sweep.methods import METHODS
from latent_sweep.testing import MethodConformance

for _method in METHODS:
    _name = f"Test_{_method}"
    globals()[_name] = type(_name, (MethodConformance,), {"method": _method, "settings": OPTIONS.get(_method, {})})


def test_every_method_has_its_class_of_tests():
    assert {each.method for each in MethodConformance.__subclasses__()} >= set(METHODS)
