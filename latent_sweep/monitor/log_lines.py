"""A sweep's state in words: the lines of a log, and what `latent-sweep status` prints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from latent_sweep.monitor.state import Running, SweepState
from latent_sweep.results.trial_states import ENDED, Stage, TimeLeft, TrialState, counts_text


def news(before: SweepState, now: SweepState) -> Iterator[str]:
    """Tell what has happened between two looks: a line for every stage that is done and every trial that has ended."""
    for known, trial in zip(before.trials, now.trials, strict=True):
        if trial is known:
            continue
        for stage in trial.stages[len(known.stages) :]:
            yield f"{trial.name}: {_stage(stage, trial)}"
        if trial.status in ENDED and trial.changed != known.changed:
            yield f"{trial.name}: {trial.status}" + (f": {trial.message}" if trial.status == "failed" else "")


def summary(state: SweepState) -> str:
    """Say in one line where a sweep stands."""
    done = f"{state.trials_done} of {len(state.trials)} trials done"
    done += f", {len(state.failed)} failed" if state.failed else ""
    parts = [f"{done}, {state.tasks_done / max(1, state.tasks):.0%} of all tasks".replace("%", " %")]
    parts[0] += f", {time_left_text(state.left)}" if state.left else ""
    parts += [f"best {best_text(state, state.best)}"] if state.best else []
    return "; ".join([*parts, *([state.driving] if state.driving else []), *map(doing_text, state.running)])


def status_lines(state: SweepState) -> list[str]:
    """Say in several lines where a sweep stands, or how it has ended."""
    course: str = state.course
    if state.driver is not None:
        course = f"running, driven by {state.driver}"
    elif course == "interrupted":
        course += ": nobody runs it; the same run command goes on from here"
    left = f", {time_left_text(state.left)}" if state.left else ""
    lines = [
        f"sweep     {state.name} in {state.place}" + (f", which tunes {state.tuning_of}" if state.tuning_of else ""),
        f"          {course}",
        f"trials    {len(state.trials)} ({counts_text(state.counts, state.driver is not None)})",
        f"tasks     {state.tasks_done} of {state.tasks} done; {stages_text(state)}",
        f"time      at work for {duration(state.seconds_at_work)}{left}",
    ]
    lines += [f"best      {best_text(state, state.best)}"] if state.best else []
    lines += [f"now       {state.driving}, for {duration(state.time - state.driving_since)}"] if state.driving else []
    lines += [f"now       {pack_text(worker)}: {worker_text(worker, state.time)}" for worker in state.running]
    lines += [f"failed    {failure_text(trial)}" for trial in state.failed]
    if state.course == "interrupted":
        lines += _interrupted_lines([trial for trial in state.trials if trial.status == "running"])
    if state.failed and state.driver is None:
        lines += [
            f"          tracebacks: {state.place}/trials/*/journal.jsonl; `latent-sweep run SWEEP.yaml --failed` tries "
            "the failed ones again"
        ]
    return lines


def _interrupted_lines(trials: Sequence[TrialState]) -> list[str]:
    """Say why the workers of these trials ended, as far as something is recorded."""
    lines = [f"lost      {trial.name}: {one_line(trial.message)}" for trial in trials if trial.message is not None]
    if silent := [trial.name for trial in trials if trial.message is None]:
        more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
        lines += [
            f"lost      {silent[0]}{more}: no reason is recorded, as where a run is interrupted, a process is killed "
            "(for want of memory, too: see `dmesg`) or a machine goes down"
        ]
    return lines


def one_line(message: str | None, longest: int = 400) -> str:
    """Write a message in one line, and cut it where it is long."""
    text = " ".join((message or "no reason is recorded").split())
    return text if len(text) <= longest else f"{text[:longest]} ..."


def stages_text(state: SweepState) -> str:
    """Say what was learned, and what was there already."""
    return f"{state.learned} stages learned, {state.reused} reused from the store"


def best_text(state: SweepState, best: TrialState) -> str:
    """Say which trial is ahead, and by what AP."""
    seen = f"after {len(best.stages)} of {best.n_tasks} tasks"
    so_far = "" if state.course == "ended" else " so far"
    return f"AP{so_far} {100 * best.stages[-1].AP:.1f}: {best.name} ({seen})"


def failure_text(trial: TrialState) -> str:
    """Say why a trial has failed."""
    at = f" at task {trial.task}" if trial.task else ""
    return f"{trial.name}{at}: {one_line(trial.message)}"


def doing_text(worker: Running) -> str:
    """Say what a worker does: `learning mood, task 3 of 15, step 12 of 40, loss 0.523`."""
    parts = [" ".join(filter(None, [worker.doing, worker.task]))]
    parts += [] if worker.position is None else [f"task {worker.position + 1} of {worker.n_tasks}"]
    if worker.steps:
        parts += [f"{'step' if worker.doing == 'learning' else 'test set'} {worker.step} of {worker.steps}"]
    parts += [] if worker.loss is None else [f"loss {worker.loss:.3f}"]
    return ", ".join(parts)


def pack_text(worker: Running) -> str:
    """Name the trials that a worker has in hand: the first, and how many others."""
    first, *others = worker.trials
    return f"{first} and {len(others)} more" if others else first


def worker_text(worker: Running, now: float) -> str:
    """Say what a worker does, for how long, and where."""
    return f"{doing_text(worker)} ({duration(now - worker.since)}; {place_text(worker)})"


def place_text(worker: Running) -> str:
    """Say where a worker computes."""
    gpus = f" GPU {worker.gpus}" if worker.gpus else ""
    return f"{worker.host}{gpus}" + (f", {worker.workers} workers" if worker.workers > 1 else "")


def time_left_text(left: TimeLeft) -> str:
    """Say how long it still takes, with its range if that is narrow enough to say something."""
    if not left.seconds:
        return f"at most {duration(left.longest)} left"
    about = f"about {duration(left.seconds)} left"
    if left.longest - left.shortest > left.seconds:
        return f"{about}, a rough estimate"
    return f"{about} ({duration(left.shortest)} to {duration(left.longest)})"


def duration(seconds: float) -> str:
    """Write seconds as `1:02:03`, or `2:03` below an hour."""
    minutes, seconds = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def time_spent(seconds: float) -> str:
    """Write seconds for a report, as `2 h 5 min`, `5 min 38 s` or `38 s`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _stage(stage: Stage, trial: TrialState) -> str:
    how = "task reused" if stage.reused else f"{stage.seconds_train:.0f} s"
    in_turn = all(a.lineage != b.lineage for a, b in itertools.pairwise(trial.stages))
    scores = f"AP {100 * stage.AP:.1f}" + f" FM {100 * stage.FM:.1f}" * in_turn
    return f"{stage.tasks_seen}/{trial.n_tasks} {stage.task} ({how}) {scores}"
