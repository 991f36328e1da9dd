"""Which tests go together, and the fixtures that all folders share."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import threading

import psutil
import pytest
from helpers.numeric import NOT_NUMERIC, computes_numbers
from helpers.sweeps import HALTING_STEPS, SMALL, sweep_folder, write

LONGEST = (
    *("test_conformance.py", "test_imitated_gpu.py", "test_ray.py", "test_doctor.py", "test_bench.py", "test_run.py"),
    *("test_mlflow.py", "test_verify.py", "test_packs.py"),
    # with the slow tests
    *("test_ray_workers.py", "test_worker_group.py", "test_storage.py", "test_memory.py", "test_outage.py"),
    *("test_submission.py", "test_faults.py", "test_real_data.py", "test_scale.py", "test_real_rows.py"),
    *("test_plugins.py", "test_resume.py", "test_autoscaling.py", "test_chaos.py", "test_templates.py"),
)
"""Files that take long in one process."""

MEMORY = "/dev/shm"
ROOM = 8 << 30
"""What a folder in memory must have free, and the machine too, for the tests to write there: some ten times what they
do, in bytes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The tests of one file stay in one process, where its fixtures are made once, unless they say otherwise.

    Those of a file that computes are `numeric`: they run on imitated machines, too. The longest files come first, so
    that no process is left with one of them while the others have nothing to do.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        if computes_numbers(item.path) and item.path.name not in NOT_NUMERIC:
            item.add_marker(pytest.mark.numeric)


def pytest_configure():
    """Have what the tests start hear of an interrupt: a shell in the background hands on that it is ignored.

    What they write lies in memory where there is room: they sync some 25,000 files, at 2 to 4 ms on a disk.
    """
    for name in ("LATENT_SWEEP_STORAGE", "MLFLOW_TRACKING_URI"):  # which would replace what the tests' files say
        os.environ.pop(name, None)
    gc.disable()  # while modules are imported and tests collected, none of which is garbage
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.access(MEMORY, os.W_OK) and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def pytest_collection_finish():
    """What all modules hold is no garbage: otherwise every full collection goes through it. And it is rarely needed."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory, request):
    """Backbones that this session has made: what another version of the code has left decides no test.

    The large embedded one, which only a new version of its package changes, is the user's where it is there. What the
    tests of this process have written goes when all of them have passed: it may lie in memory.
    """
    from latent_sweep.backbones.registry import EMBEDDED
    from latent_sweep.storage.files import cache_folder

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
    if not request.session.testsfailed:
        shutil.rmtree(base, ignore_errors=True)


@pytest.fixture(scope="session")
def llama():
    from helpers.tiny import load_tiny  # with torch and transformers, which the process that only hands out needs not

    return load_tiny("tiny-llama")


@pytest.fixture(scope="session")
def t5():
    from helpers.tiny import load_tiny

    return load_tiny("tiny-t5")


@pytest.fixture(params=["tiny-llama", "tiny-t5"])
def backbone(request, llama, t5):
    """Both families, one after the other; shared by all tests, so none may change its weights."""
    return {"tiny-llama": llama, "tiny-t5": t5}[request.param]


@pytest.fixture
def bank(backbone):
    """A bank of the backbone; its hooks are gone after the test."""
    from helpers.tiny import bank_of

    bank = bank_of(backbone)
    yield bank
    bank.remove()


@pytest.fixture(scope="module")
def one_thread():
    """What is computed in this process has one thread, as a pack with one CPU has."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of the small sweep, run to its end."""
    from latent_sweep.cli.main import main

    folder = tmp_path_factory.mktemp("finished")
    assert main(["run", write(folder, SMALL), "--local"]) == 0
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of it for the test to change."""
    shutil.copytree(finished / "runs", tmp_path / "runs")
    return sweep_folder(tmp_path)


@pytest.fixture
def runs(tmp_path):
    """Tiny packs, run below the test's folder."""
    from helpers.tiny import Runs

    return Runs(tmp_path / "runs")


@pytest.fixture(scope="module")
def inside_the_second_task(tmp_path_factory):
    """When the first training on `two_cpus` whose tasks have `HALTING_STEPS` has taken eight of the second task."""
    from helpers.moments import at_step

    return at_step(tmp_path_factory.mktemp("moment") / "moment", position=1, step=8, of=HALTING_STEPS)


@pytest.fixture(scope="module")
def two_cpus(inside_the_second_task):
    """What a driver needs to belong to a cluster with two CPUs that is there already."""
    from helpers.ray_heads import nodes

    with nodes(2, **inside_the_second_task.environment) as (_, environment):
        yield environment
