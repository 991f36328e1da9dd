"""Flipped answers: examples that were right when their task was new and are wrong now, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from latent_sweep.data.prompts import split_prompts
from latent_sweep.data.schema import BenchmarkSettings, load_benchmark
from latent_sweep.metrics.more import RIGHT
from latent_sweep.results.inputs import read_test_examples
from latent_sweep.results.selection import UNREADABLE, finished_trial
from latent_sweep.results.trial import TrialResults
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.predictions import Answer, saved_answers


@dataclass(frozen=True)
class Flip:
    """A test example whose answer flipped between the stage that learned its task and the last one."""

    task: str
    row: int
    """Index among the task's test examples, from 0."""
    row_id: str
    kind: Literal["lost", "gained"]
    prompt: str | None
    """The prompt before truncation; None if the benchmark's data is not available, or differs."""
    references: tuple[str, ...]
    answers: Mapping[int, Answer]
    """By tasks seen, of every stage that has kept its answers."""
    weights: Mapping[str, float]
    """Combination weight of each task's snapshot after the last task, without zeros."""


def flips(sweep: SweepFolder, folder: TrialFolder, per_task: int = 3) -> list[Flip]:
    """Return flipped answers of a finished trial, in the order of its tasks, lost ones first.

    Empty if it has not finished or kept the answers of both stages. At most `per_task` of each kind per task: those
    with the largest change of score, then the first.
    """
    trial = finished_trial(sweep, folder)
    try:
        return [] if trial is None else list(_flips(trial, per_task))
    except UNREADABLE:
        return []


def _flips(trial: TrialResults, per_task: int) -> Iterator[Flip]:
    predictions = trial.predictions()
    if predictions is None:
        return
    kept = {stage.tasks_seen: dict(answers) for stage, answers in saved_answers(trial.folder.path, trial.stages)}
    last, benchmark = len(trial.stages), trial.benchmark()
    for new, task in enumerate(trial.tasks[:-1], start=1):
        if new not in kept or last not in kept:
            continue
        lines = predictions[task]
        chosen = choose_flips([a.score for a in kept[new][task]], [a.score for a in kept[last][task]], per_task)
        prompts = _prompts(benchmark, task, [line["id"] for line in lines]) if chosen else None
        for row in chosen:
            line = lines[row]
            yield Flip(
                task=task,
                row=row,
                row_id=line["id"],
                kind="lost" if kept[new][task][row].score >= RIGHT else "gained",
                prompt=None if prompts is None else prompts[row],
                references=tuple(line["references"]),
                answers={seen: kept[seen][task][row] for seen in sorted(kept) if seen >= new},
                weights={trial.tasks[int(position)]: weight for position, weight in line["weights"].items()},
            )


def choose_flips(new: Sequence[float], last: Sequence[float], most: int) -> list[int]:
    """Return indices of examples whose score crosses `RIGHT`: at most `most` downwards, then as many upwards."""
    crossing = [i for i, (a, b) in enumerate(zip(new, last, strict=True)) if (a >= RIGHT) != (b >= RIGHT)]
    order = sorted(crossing, key=lambda i: (-abs(last[i] - new[i]), i))
    lost, gained = ([i for i in order if (new[i] >= RIGHT) is was_right] for was_right in (True, False))
    return [*lost[:most], *gained[:most]]


def _prompts(settings: BenchmarkSettings, task: str, ids: Sequence[str]) -> list[str] | None:
    try:
        examples, spec = read_test_examples(settings, task), load_benchmark(settings.name)
        if examples.ids != list(ids):
            return None
        (task_spec,) = (one for one in spec.tasks if one.name == task)
        parts = split_prompts(spec, task_spec, "test", settings, examples.inputs)
    except UNREADABLE:
        return None
    return ["".join(part) for part in parts]
