"""The conformance suite for methods, which also tests the built-in ones.

from latent_sweep.testing import MethodConformance

class TestMine(MethodConformance):
    method = "my_package.my_module:Mine"
    settings = {"rank": 4}
"""

from latent_sweep.testing.conformance import FAMILIES, MethodConformance
from latent_sweep.testing.runs import Runs

__all__ = ["FAMILIES", "MethodConformance", "Runs"]
