"""Tiny backbones and tiny packs that the tests of the numerical core share. Random weights, nothing downloaded."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from sweeps_for_tests import tiny

FAMILIES = ("tiny-llama", "tiny-t5")

NOT_NUMERIC = {
    "test_bench.py": "measures seconds",
    "test_checks.py": "counts rows and tokens",
    "test_explain.py": "explains plans",
    "test_forecast.py": "counts tokens",
    "test_hostile_inputs.py": "spoils files",
    "test_identities.py": "compares names",
    "test_memory.py": "counts bytes",
    "test_planned.py": "edits what was planned",
    "test_ray.py": "torch is told its number of threads",
    "test_resume.py": "torch is told its number of threads",
    "test_storage.py": "torch is told its number of threads",
    "test_submission.py": "torch is told its number of threads",
}
"""Test files that import what computes and compare no numbers, and why they do."""
COMPUTING = re.compile(r"^\s*(?:from|import) (?:torch|numpy|scipy|sklearn|conftest|lessons_in_turn)\b", re.MULTILINE)


@cache
def computes_numbers(path: Path) -> bool:
    """Whether a test file imports what computes: then other processors may round otherwise in it."""
    return bool(COMPUTING.search(path.read_text(encoding="utf-8")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The tests of one file stay in one process, where its fixtures are made once, unless they say otherwise.

    Those of a file that computes are `numeric`: they run on imitated machines, too.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        if computes_numbers(item.path) and item.path.name not in NOT_NUMERIC:
            item.add_marker(pytest.mark.numeric)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Backbones that this session has made: what another version of the code has left decides no test.

    The large embedded one, which only a new version of its package changes, is the user's where it is there.
    """
    from latent_sweep.backbones import EMBEDDED, cache_folder

    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    cache.mkdir(exist_ok=True)
    for folder in cache_folder().glob(f"{EMBEDDED}-*"):
        if folder.is_dir() and not folder.name.endswith(".partial"):
            with contextlib.suppress(FileExistsError):  # several processes begin at once
                (cache / folder.name).symlink_to(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATENT_SWEEP_CACHE", str(cache))
        yield


def load_tiny(name: str, dtype: str = "float32"):
    """A tiny backbone of its own, for a test that edits its weights."""
    from latent_sweep.backbones import BackboneSettings, load_backbone

    return load_backbone(BackboneSettings(name=name, dtype=dtype, device="cpu"))


@pytest.fixture(scope="session")
def llama():
    return load_tiny("tiny-llama")


@pytest.fixture(scope="session")
def t5():
    return load_tiny("tiny-t5")


@pytest.fixture(params=FAMILIES)
def backbone(request, llama, t5):
    """Both families, one after the other; shared by all tests, so none may change its weights."""
    return {"tiny-llama": llama, "tiny-t5": t5}[request.param]


@pytest.fixture
def bank(backbone):
    """A bank of the backbone; its hooks are gone after the test."""
    bank = bank_of(backbone)
    yield bank
    bank.remove()


def bank_of(backbone):
    """A bank of a backbone; `remove()` takes its hooks off again."""
    from latent_sweep.adapters.bank import AdapterBank

    return AdapterBank(backbone.targets, backbone.prompt_embedding)


def task_data(rows: Sequence = (), position: int = 0, seed: int = 0, n_tasks: int = 3, name: str = "task"):
    """A task as a method sees it; what is drawn depends on seed, name and purpose."""
    import torch

    from latent_sweep.methods.protocol import TaskData
    from latent_sweep.training import derived_seed

    def generator(purpose: str):
        return torch.Generator().manual_seed(derived_seed(seed, name, purpose))

    return TaskData(name, position, n_tasks, rows, generator)


def learn(learner, rows, backbone, bank, settings, checkpoint, seed_parts=(0, "task"), validation=(), on_step=None):
    """Train one learner alone; returns its summary or raises what stopped it."""
    from latent_sweep.snapshots import TaskCheckpoint
    from latent_sweep.training import Lesson, train_pack

    on_step = on_step or (lambda step, steps, losses: None)
    lesson = Lesson(learner, rows, settings, seed_parts, TaskCheckpoint(checkpoint), validation, on_step)
    (outcome,) = train_pack([lesson], backbone, bank)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def random_rows(count: int, seed: int = 0, shortest: int = 3, longest: int = 12, targets: int = 4) -> list[dict]:
    """Tokenised rows of random bytes with prompts and targets of different lengths; targets end with EOS."""
    import torch

    source = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=source))

    return [
        {
            "prompt_ids": [number(4, 259) for _ in range(number(shortest, longest))],
            "target_ids": [*(number(4, 259) for _ in range(number(1, targets))), 2],
        }
        for _ in range(count)
    ]


def learns(event) -> bool:
    """Whether an event of a run is an optimizer step."""
    return getattr(event, "doing", None) == "learning"


@dataclass
class Runs:
    """Runs packs of tiny sweeps below one folder."""

    folder: Path
    stages: list = field(default_factory=list)
    """Every finished stage, in order."""

    def take_tokens(self, other: Runs) -> Runs:
        """Begin with the tokenised rows of other runs, so that nobody tokenises them again; returns itself."""
        shutil.copytree(other.folder / "tokens", self.folder / "tokens")
        return self

    def packs(self, **changes):
        """The packs of `tiny(**changes)`."""
        from latent_sweep.config import parse_sweep
        from latent_sweep.plan import expand, pack

        sweep = parse_sweep(tiny(**changes), "test")
        return pack(expand(sweep), sweep.run.pack)

    def run(self, packs: Sequence, on: Callable = lambda event: None) -> None:
        """Run the packs here; `on` sees every step and stage, and may raise to cut the run."""
        from latent_sweep.trial import StageDone, run_pack

        def emit(event):
            if isinstance(event, StageDone):
                self.stages.append(event)
            on(event)

        for pack in packs:
            run_pack(pack, self.folder, self.folder / "tiny", emit)

    def files(self) -> dict[str, bytes]:
        """Score matrices, predictions of trials and snapshots, byte for byte."""
        patterns = ("tiny/trials/*/scores.json", "tiny/trials/*/predictions/*.jsonl", "snapshots/*.safetensors")
        paths = [p for pattern in (*patterns, "snapshots/*.json") for p in self.folder.glob(pattern)]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@pytest.fixture
def runs(tmp_path):
    """Tiny packs, run below the test's folder."""
    return Runs(tmp_path / "runs")


HALTING_STEPS = 24
"""Of sweeps on `two_cpus` whose tasks have so many steps, the first one halts in its second task."""


@pytest.fixture(scope="module")
def inside_the_second_task(tmp_path_factory):
    """When the first training on `two_cpus` whose tasks have `HALTING_STEPS` has taken eight of the second task."""
    from moments import at_step

    return at_step(tmp_path_factory.mktemp("moment") / "moment", position=1, step=8, of=HALTING_STEPS)


@pytest.fixture(scope="module")
def two_cpus(inside_the_second_task):
    """What a driver needs to belong to a cluster with two CPUs that is there already."""
    from ray_heads import nodes

    with nodes(2, **inside_the_second_task.environment) as (_, environment):
        yield environment
