"""What a worker holds of the host's memory beyond what it uses."""

import subprocess
import sys

import pytest
from helpers.patience import PATIENCE

from latent_sweep.learn import heap

PIECES = """
import resource, torch
from latent_sweep.learn.heap import give_back_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

give_back_memory()
before = resident()
pieces = [torch.ones(24_000) for _ in range(3000)]  # 96 kB each: what is larger than 128 kB is not from the heap
whole = resident() - before
kept = pieces[::100]  # the last ones lie on top of all others
del pieces
held = resident() - before
give_back_memory()
print(whole, held, resident() - before)
"""


@pytest.mark.skipif(heap._trim() is None or sys.platform != "linux", reason="this C library cannot give memory back")
def test_memory_that_is_free_goes_back_to_the_system():
    command = [sys.executable, "-c", PIECES]
    printed = subprocess.run(command, timeout=PATIENCE, check=True, capture_output=True, text=True).stdout
    whole, held, after = map(float, printed.split())
    assert whole > 250
    assert held > 200, "without it the heap keeps nearly all"
    assert after < 60


def test_a_library_that_cannot_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap, "_trim", lambda: None)
    heap.give_back_memory()
