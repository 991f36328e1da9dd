"""The numeric tests on imitated machines, as `make portability`: rounding that another processor would give.

    PYTHONPATH=tests python -m tools.portability [TEST FILES or other arguments of pytest]

Libraries that add and multiply choose their instructions by what the processor can do, and by the number of threads;
both can be told. What compares a computation with itself, or adds and multiplies as another test does
(`one_machine`), needs no second machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MACHINES: Mapping[str, Mapping[str, str]] = {
    "4 threads": {"OMP_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"},  # also on two processors
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default", "OPENBLAS_CORETYPE": "Nehalem"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL for any processor": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN for AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
}
"""What tells the libraries that they run on another machine, by its name."""
USUAL = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""What all others have in common; threads that wait give the processor away."""
AT_ONCE = 2
SELECTED = "numeric and not one_machine and not slow"


@dataclass(frozen=True)
class Outcome:
    """What the tests gave on one machine."""

    machine: str
    passed: bool
    counts: str
    """E.g. `812 passed, 3 skipped`."""
    seconds: float
    printed: str

    def line(self) -> str:
        """A row of the table."""
        return f"{self.machine:24}{self.counts or 'no tests ran':40}{self.seconds:4.0f} s"


def environment(machine: str) -> dict[str, str]:
    """What a process on this machine is told, and nothing that the caller was."""
    imitations = {name for variables in MACHINES.values() for name in variables}
    inherited = {name: value for name, value in os.environ.items() if name not in imitations}
    return inherited | USUAL | MACHINES[machine]


def try_on(machine: str, arguments: Sequence[str] = ()) -> Outcome:
    """Run the numeric tests on an imitated machine."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-m", SELECTED, *arguments]
    began = time.monotonic()
    run = subprocess.run(
        command,
        env=environment(machine),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    return Outcome(machine, run.returncode == 0, counts(run.stdout), seconds, run.stdout)


def counts(printed: str) -> str:
    """How many tests passed, failed and so on, from pytest's last line, without those that were not selected."""
    found = re.findall(r"\d+ (?:passed|failed|skipped|xfailed|errors?)\b", (printed.strip().splitlines() or [""])[-1])
    return ", ".join(found)


def main(arguments: Sequence[str]) -> int:
    """Try every machine and print a line for each; returns the exit code."""
    if {"-h", "--help"}.intersection(arguments):  # pytest would answer, six times
        print(__doc__)
        return 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = []
        for outcome in pool.map(lambda machine: try_on(machine, arguments), MACHINES):
            print(outcome.line(), flush=True)
            outcomes.append(outcome)
    broken = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in broken:
        print(f"\n--- {outcome.machine}: {dict(MACHINES[outcome.machine])}\n{outcome.printed}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
