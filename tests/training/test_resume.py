"""A sweep killed inside a task and started again ends with the same bytes and learns nothing twice."""

import os
import shutil
import signal

import pytest
from helpers.moments import at_step
from helpers.patience import PATIENCE
from helpers.sweeps import end, events, results, start, sweep_folder, tiny, write

from latent_sweep.cli.main import main
from latent_sweep.monitor.progress import ProgressWriter
from latent_sweep.storage.snapshots import TaskCheckpoint

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, STRUCK_AT = 24, 13
CHECKPOINTED = tiny(
    trial__training__epochs=STEPS // 8, trial__training__checkpoint_every=5, search={"router.epsilon": [0.01, 0.1]}
)
"""One pack of two trials, with a checkpoint every few steps."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert main(["run", write(folder, CHECKPOINTED), "--local"]) == 0
    return results(sweep_folder(folder))


@pytest.fixture
def steps_taken(monkeypatch):
    """Optimizer steps taken in this process: (position of the task, step)."""
    taken = []
    learned = lambda self, at: at.doing == "learning" and taken.append((at.position, at.step))  # noqa: E731
    monkeypatch.setattr(ProgressWriter, "write", learned)
    return taken


def assert_resumed(folder, uninterrupted, between=()):
    """`between`: events that the end of the first attempt leaves."""
    sweep = sweep_folder(folder)
    assert results(sweep) == uninterrupted
    for trial in sweep:
        journal = trial.events()
        assert [event.name for event in journal] == ["started", "stage", *between, "started", "stage", "finished"]
        assert [event.attempt for event in journal if event.name == "started"] == [1, 2]
        assert [event.reused for event in journal if event.name == "stage"] == [False, False]
    assert list((folder / "runs" / "checkpoints").glob("*")) == []


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that was killed inside its second task."""
    folder = tmp_path_factory.mktemp("killed")
    inside_it = at_step(folder / "moment", position=1, step=STRUCK_AT)
    process = start(write(folder, CHECKPOINTED), "--local", **inside_it.environment)
    try:
        inside_it.wait(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert len(list((folder / "runs" / "snapshots").glob("*.safetensors"))) == 1
    return folder / "runs"


@pytest.mark.slow
def test_a_run_killed_inside_a_task_resumes_from_its_checkpoint(tmp_path, killed, uninterrupted, steps_taken):
    shutil.copytree(killed, tmp_path / "runs")
    assert main(["run", write(tmp_path, CHECKPOINTED), "--local"]) == 0
    assert_resumed(tmp_path, uninterrupted)
    assert steps_taken == [(1, step) for step in range(11, STEPS + 1)], "the step after the last checkpoint"


@pytest.mark.slow
def test_a_truncated_journal_line_and_checkpoint_are_no_obstacle(tmp_path, killed, uninterrupted, steps_taken, caplog):
    shutil.copytree(killed, tmp_path / "runs")
    for trial in sweep_folder(tmp_path):
        with (trial.path / "journal.jsonl").open("ab") as journal:
            journal.write(b'{"seq": 2, "event": "sta')
    (checkpoint,) = (tmp_path / "runs" / "checkpoints").glob("*.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    assert main(["run", write(tmp_path, CHECKPOINTED), "--local"]) == 0
    assert_resumed(tmp_path, uninterrupted)
    assert steps_taken[0] == (1, 1)
    assert checkpoint.name.partition(".")[0] in caplog.text


class Killed(BaseException):
    """The process was killed."""


def test_a_kill_between_a_snapshot_and_the_removal_of_its_checkpoint_leaves_no_checkpoint(runs, monkeypatch):
    packs = runs.packs(search={}, trial__training__epochs=1, trial__training__checkpoint_every=5)

    def kill(checkpoint):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(TaskCheckpoint, "remove", kill)
        with pytest.raises(Killed):
            runs.run(packs)
    assert len(list((runs.folder / "snapshots").glob("*.json"))) == 1, "it is committed"
    assert len(list((runs.folder / "checkpoints").iterdir())) == 1
    runs.run(packs)
    assert len(runs.stages) == 2
    assert list((runs.folder / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_ray_run_does_not_count_as_stopped_early_and_resumes(tmp_path, uninterrupted):
    path = write(tmp_path, CHECKPOINTED)
    inside_the_second_task = at_step(tmp_path / "moment", position=1, step=STRUCK_AT)
    process = start(path, **inside_the_second_task.environment)
    try:
        inside_the_second_task.wait(process)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=PATIENCE)
    finally:
        end(process)
    assert process.returncode == 130, printed
    assert "run the same command again" in printed
    assert events(sweep_folder(tmp_path), "stopped") == []
    assert [event.kind for event in events(sweep_folder(tmp_path), "lost")] == ["interrupted"] * 2
    again = start(path)
    try:
        printed, _ = again.communicate(timeout=PATIENCE)
    finally:
        end(again)
    assert again.returncode == 0, printed
    assert_resumed(tmp_path, uninterrupted, between=["lost"])
