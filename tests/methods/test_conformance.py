"""Every method through the suite that methods from outside run on themselves; one class of tests for each of them."""

import pytest
from helpers.methods import OPTIONS

from latent_sweep.backbones.registry import REGISTRY
from latent_sweep.methods import METHODS
from latent_sweep.testing import FAMILIES, MethodConformance

OTHERS = [name for name in REGISTRY if name.startswith("tiny-") and name not in FAMILIES]
"""Families with which the suite runs among the slow tests: with methods that ask different things of a backbone, and
with all of them in `make conformance`."""


class _OnEveryFamily(MethodConformance):
    __test__ = False

    @pytest.fixture(scope="class", params=[*FAMILIES, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
    @classmethod
    def family(cls, request):
        return request.param


for _method in METHODS:
    _name = f"Test_{_method}"
    _content = {"method": _method, "settings": OPTIONS.get(_method, {}), "__test__": True}
    globals()[_name] = type(_name, (_OnEveryFamily,), _content)


class _AllLinear(MethodConformance):
    """Of projections with different numbers of inputs."""

    __test__ = False

    @pytest.fixture(scope="class", params=[pytest.param("tiny-qwen3", marks=pytest.mark.slow)])
    @classmethod
    def family(cls, request):
        return request.param

    @classmethod
    def backbone(cls, family):
        return {**super().backbone(family), "targets": "all-linear"}

    def test_the_parameter_count_is_what_is_trained(self, new_runs, family, monkeypatch):
        """But for the zeros that make every A as wide as the widest, which nothing reads and no gradient reaches."""
        kind = type(self.planned(family))
        count = kind.parameter_count

        def with_zeros(method, shapes, width):
            widest = max(n for _, n in shapes.values())
            return count(method, {name: (m, widest) for name, (m, _) in shapes.items()}, width)

        monkeypatch.setattr(kind, "parameter_count", with_zeros)
        super().test_the_parameter_count_is_what_is_trained(new_runs, family, monkeypatch)


for _method in METHODS:
    _name = f"Test_{_method}_all_linear"
    _content = {"method": _method, "settings": OPTIONS.get(_method, {}), "__test__": True}
    globals()[_name] = type(_name, (_AllLinear,), _content)


def test_every_method_has_its_class_of_tests():
    assert {each.method for each in _OnEveryFamily.__subclasses__()} >= set(METHODS)
