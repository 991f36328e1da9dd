"""Answers worth reading: rows that were right when their task was new and are wrong now, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from latent_sweep.data.loaders import load_examples
from latent_sweep.data.prompts import split_prompts
from latent_sweep.data.schema import BenchmarkSettings, load_benchmark
from latent_sweep.results.selection import UNREADABLE, FinishedTrial, finished_trial
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.journal import stages
from latent_sweep.storage.predictions import Answer, Answers, saved_answers

RIGHT = 0.5
"""The score, a fraction, from which an answer counts as right: exact matches have 0 or 1, Rouge-L all between."""


@dataclass(frozen=True)
class Flip:
    """One test row whose answer changed sides between the stage at which its task was new and the last one."""

    task: str
    row: int
    """Its place among the task's test rows, from 0."""
    row_id: str
    kind: Literal["lost", "gained"]
    """`lost`: right when new, wrong after the last task; `gained`: the other way round."""
    prompt: str | None
    """What the model was asked, before truncation; None where the benchmark's data is not at hand, or is another."""
    references: tuple[str, ...]
    answers: Mapping[int, Answer]
    """Answer and score by the number of tasks seen, of every stage that has kept its answers."""
    weights: Mapping[str, float]
    """Mixing weight of each task's snapshot after the last task, by task; those of zero are left out."""


def flips(sweep: SweepFolder, trial: TrialFolder, per_task: int = 3) -> list[Flip]:
    """Rows of a finished trial whose answers changed sides, in the order of its tasks.

    Args:
        per_task: most rows of each kind and task; the largest changes of score, and of equal ones the earliest rows.

    Returns:
        First the lost and then the gained rows of each task; none where the trial has not finished, or has not kept the
        answers of the two stages in question.
    """
    found = finished_trial(sweep, trial)
    if found is None:
        return []
    try:
        return list(_flips(found, per_task))
    except UNREADABLE:
        return []


def _flips(trial: FinishedTrial, per_task: int) -> Iterator[Flip]:
    predictions = trial.predictions()
    if predictions is None:
        return
    told = stages(trial.events)
    kept = {event.tasks_seen: dict(answers) for event, answers in saved_answers(trial.folder.path, told)}
    last, benchmark = len(told), trial.benchmark()
    for position, task in enumerate(trial.tasks[:-1]):
        new = position + 1
        if new not in kept or last not in kept:
            continue
        rows = predictions[task]
        chosen = choose_flips([a.score for a in kept[new][task]], [a.score for a in kept[last][task]], per_task)
        prompts = _prompts(benchmark, task, [row["id"] for row in rows]) if chosen else None
        for row in chosen:
            yield _flip(trial.tasks, task, row, rows[row], prompts, {s: a for s, a in kept.items() if s >= new})


def choose_flips(new: Sequence[float], last: Sequence[float], most: int) -> list[int]:
    """Rows whose score crosses `RIGHT` between two stages: at most so many downwards, then as many upwards.

    Args:
        new: score of each row when its task was new, a fraction.
        last: the same rows' scores after the last task.
    """
    crossing = [i for i, (a, b) in enumerate(zip(new, last, strict=True)) if (a >= RIGHT) != (b >= RIGHT)]
    order = sorted(crossing, key=lambda i: (-abs(last[i] - new[i]), i))
    lost, gained = ([i for i in order if (new[i] >= RIGHT) is was_right] for was_right in (True, False))
    return [*lost[:most], *gained[:most]]


def _flip(
    tasks: Sequence[str],
    task: str,
    row: int,
    line: Mapping[str, Any],
    prompts: Sequence[str] | None,
    kept: Mapping[int, Answers],
) -> Flip:
    answers = {stage: found[task][row] for stage, found in sorted(kept.items())}
    return Flip(
        task=task,
        row=row,
        row_id=line["id"],
        kind="lost" if answers[min(answers)].score >= RIGHT else "gained",
        prompt=None if prompts is None else prompts[row],
        references=tuple(line["references"]),
        answers=answers,
        weights={tasks[int(position)]: weight for position, weight in line["weights"].items()},
    )


def _prompts(settings: BenchmarkSettings, task: str, ids: Sequence[str]) -> list[str] | None:
    """The prompts of a task's test rows; None where the benchmark's data is not at hand, or has other rows."""
    try:
        spec = load_benchmark(settings.name)
        known = next(found for found in spec.tasks if found.name == task)
        rows = load_examples(spec, known, "test", settings)
        if [row.id for row in rows] != list(ids):
            return None
        parts = split_prompts(spec, known, "test", settings, (row.input for row in rows))
    except (*UNREADABLE, StopIteration):
        return None
    return ["".join(part) for part in parts]
