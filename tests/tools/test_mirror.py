import re

import pytest
from tools import mirror


@pytest.mark.slow
def test_both_bring_a_sweep_and_say_how_fast(capsys):
    mirror.main(["--trials", "3", "--tasks", "2", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "(32 points and 12 files a trial)" in printed
    (row,) = re.findall(r"^ +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+ +\d+ +\d+ +\d+$", printed, re.MULTILINE)
    assert min(map(float, row)) > 0
