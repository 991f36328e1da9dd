"""What each stage of a trial answered, on disk: a file a stage, with the answers that the stage before did not give.

`answers/<tasks seen>.jsonl` holds one JSON object a line, by task and row:

    task, row (from 0, as in `predictions/<task>.jsonl`), prediction, score (a fraction)

A stage's answers are the newest lines of all rows in the files up to its own. The first file that is kept, and one that
follows a stage whose answers were not kept, hold every row.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from latent_sweep.storage.files import write_file
from latent_sweep.storage.journal import Stage

ANSWERS = "answers"
GENERATED = "predictions"
"""Folder of a storage with the generated answers, by what identifies them, for whoever asks the same again."""
STAGES = "stages"
"""Folder in it with an empty file for each stage all of whose answers are there, by the stage's `answer_keys`."""
KeepAnswers = Literal["all", "last"]
_NAME = re.compile(rf"{ANSWERS}/(\d+)\.jsonl")


class Answer(NamedTuple):
    """What was generated for one row, and its score."""

    prediction: str
    score: float


Answers = Mapping[str, Sequence[Answer]]
"""Answers by task, in the order of its rows."""


def answers_file(tasks_seen: int) -> str:
    """Return the name of a stage's file in its trial's folder."""
    return f"{ANSWERS}/{tasks_seen}.jsonl"


def stage_of(name: str) -> int | None:
    """Return the tasks seen at the stage whose answers a file of this name holds; None for any other file."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def changes(answers: Answers, before: Answers) -> bytes:
    """Write the lines of a stage's file: those of `answers` that differ from `before`, the stage before."""
    lines = []
    for task, found in answers.items():
        known = before.get(task, ())
        for row, answer in enumerate(found):
            if row >= len(known) or answer != known[row]:
                line = {"task": task, "row": row, **answer._asdict()}
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def changed(before: Answers, content: bytes) -> Answers:
    """Apply a stage's file to the answers of the stage before; the opposite of `changes`.

    Raises:
        ValueError: the file is not such lines, or names a row whose predecessor is unknown.
    """
    answers = {task: list(found) for task, found in before.items()}
    for line in content.splitlines():
        match json.loads(line):
            case {"task": str(task), "row": int(row), "prediction": str(prediction), "score": int() | float() as score}:
                found = answers.setdefault(task, [])
                if not 0 <= row <= len(found):
                    raise ValueError(f"row {row} of task {task} comes after {len(found)} rows")
                found[row : row + 1] = [Answer(prediction, score)]
            case other:
                raise ValueError(f"{other!r:.80} is no answer; expected task, row, prediction and score")
    return answers


def mark_stage_cached(storage: Path, key: str) -> None:
    """Note that all answers of a stage are in the cache of a storage's folder."""
    write_file(storage / GENERATED / STAGES / key, b"", durable=False)


def cached_stages(storage: Path) -> frozenset[str]:
    """Return the keys of the stages all of whose answers are in the cache of a storage's folder."""
    try:
        return frozenset(os.listdir(storage / GENERATED / STAGES))
    except OSError:
        return frozenset()


def saves_answers(event: Stage) -> bool:
    """Whether the answers of a stage, of which this event tells, are kept."""
    return answers_file(event.tasks_seen) in event.files


def saved_answers(folder: Path, told: Sequence[Stage]) -> Iterator[tuple[Stage, Answers]]:
    """Yield the stages whose answers are kept, in order, with all answers of each.

    Args:
        folder: the trial's.
        told: its stage events, from the first.

    Raises:
        OSError: a file is missing, or cannot be read.
        ValueError: a file is damaged.
    """
    answers: Answers = {}
    for event in told:
        answers = (
            changed(answers, (folder / answers_file(event.tasks_seen)).read_bytes()) if saves_answers(event) else {}
        )
        if saves_answers(event):
            yield event, answers


def newest_answers(folder: Path, told: Sequence[Stage]) -> Answers:
    """Read the answers of the last of these stages; none where they are not kept, or there is no stage."""
    if not told or not saves_answers(told[-1]):
        return {}
    *_, (_, answers) = saved_answers(folder, told)
    return answers
