"""What one trial leaves in its folder, and whether it is as its journal says.

The journal is the truth: a row of the score matrix is what a stage told, and every file beside it that holds results
has its digest there. A file that is missing, or that is another, is set aside and made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from latent_sweep.errors import StorageError
from latent_sweep.metrics import ScoreMatrix
from latent_sweep.settings import content_hash
from latent_sweep.storage.checksummed import quarantine
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.journal import Event, Finished, Lost, Stage, Started, Stopped, repair_advice, stages, status
from latent_sweep.storage.predictions import (
    Answer,
    Answers,
    KeepAnswers,
    answers_file,
    changed,
    changes,
    newest_answers,
    saved_answers,
    saves_answers,
    stage_of,
)
from latent_sweep.storage.storage import JOURNAL, json_bytes

log = logging.getLogger(__name__)

SCORES, RESULT, PREDICTIONS = "scores.json", "result.json", "predictions"
EPSILON = sys.float_info.epsilon
Row = tuple[float, ...]

_ROW_FIELDS = ("tasks_seen", "task", "lineage", "scores", "key", "files")
"""Fields of a stage that are the same if its row is computed again."""


@dataclass(frozen=True)
class CorruptFile:
    """A file that is not what its trial's journal says."""

    path: Path
    found: str


def corrupt_files(folder: Path, events: Sequence[Event]) -> list[CorruptFile]:
    """The files in a trial's folder that are missing, or others than those that its journal tells."""
    found = {folder / name: _fault(folder / name, digest) for name, digest in recorded_files(events).items()}
    return [CorruptFile(path, fault) for path, fault in found.items() if fault is not None]


def recorded_files(events: Sequence[Event]) -> dict[str, str]:
    """The digests of the files that a trial's journal tells of, by name."""
    told: dict[str, str] = {}
    for event in events:
        if isinstance(event, Started):
            told.pop(RESULT, None)  # it is written again at the end
        elif isinstance(event, Stage):
            told.pop(answers_file(event.tasks_seen), None)  # kept before, and not any more
        if isinstance(event, (Stage, Finished)):
            told |= event.files
    return told


def _fault(path: Path, digest: str) -> str | None:
    if not path.exists():
        return "is missing"
    same = path.is_file() and _digest(path.read_bytes()) == digest
    return None if same else "does not match its digest in the journal"


def contradicting_files(folder: Path, events: Sequence[Event]) -> list[CorruptFile]:
    """The files whose content does not follow from the rows that the journal tells, whatever their digests say.

    The score matrix holds these rows; AP, FM and BWT, there and in the result, are theirs; the scores of the kept
    answers of each stage average to its row, and the newest answers are the predictions.
    """
    told = stages(events)
    if not told:
        return []
    tasks = tuple(told[-1].scores)
    try:
        matrix = recorded_matrix(told)
    except ValueError as error:
        return [CorruptFile(folder / JOURNAL, f"tells no {error}")]
    row = dict(zip(tasks, matrix.rows[-1], strict=True))
    end = final_event(events)
    metrics = [event.metrics for event in (told[-1], end) if isinstance(event, (Stage, Finished))]
    answers: dict[int, Answers] = {}
    """Of each stage that keeps its own, as far as they agree."""

    def scores_agree(content: bytes) -> bool:
        found = json.loads(content)
        same = tuple(map(tuple, found["scores"])) == matrix.rows
        return same and tuple(found["tasks"][: len(tasks)]) == tasks

    def result_agrees(content: bytes) -> bool:
        found = json.loads(content)
        return found["scores"] == row and _are_measures(found["metrics"], matrix)

    def answers_agree(content: bytes, event: Stage) -> bool:
        seen = event.tasks_seen
        if seen > 1 and saves_answers(told[seen - 2]) and seen - 1 not in answers:
            return True  # the stage before is at fault; without it nothing can be said of this one
        found = changed(answers.get(seen - 1, {}), content)
        scores = {task: [answer.score for answer in rows] for task, rows in found.items()}
        if scores.keys() != event.scores.keys() or not all(
            _average_to(scores[task], score) for task, score in event.scores.items()
        ):
            return False
        answers[seen] = found
        return True

    def predictions_agree(content: bytes, task: str) -> bool:
        lines = [json.loads(line) for line in content.splitlines()]
        found = [Answer(line["prediction"], line["score"]) for line in lines]
        kept = answers.get(len(told))
        return _average_to([line["score"] for line in lines], row[task]) and (kept is None or kept[task] == found)

    checks: dict[str, Callable[[bytes], bool]] = {SCORES: scores_agree}
    checks |= {
        answers_file(event.tasks_seen): partial(answers_agree, event=event) for event in told if saves_answers(event)
    }
    checks |= {f"{PREDICTIONS}/{task}.jsonl": partial(predictions_agree, task=task) for task in tasks}
    if isinstance(end, Finished):
        checks[RESULT] = result_agrees
    agree = all(_are_measures(found, matrix) for found in metrics)
    found = [] if agree else [CorruptFile(folder / JOURNAL, "tells measures that do not follow from its rows")]
    for name, agrees in checks.items():
        try:
            if agrees((folder / name).read_bytes()):
                continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass  # it holds something else altogether
        found.append(CorruptFile(folder / name, "does not follow from the rows that the journal tells"))
    return found


def _average_to(scores: Sequence[float], mean: float) -> bool:
    """Whether scores have this mean, but for the order in which a machine has summed them."""
    return abs(statistics.fmean(scores) - mean) <= len(scores) * EPSILON


def _are_measures(found: Mapping[str, float], matrix: ScoreMatrix) -> bool:
    """Whether these are the measures of the matrix, but for the order in which a machine has summed its rows."""
    rounding = 4 * len(matrix.rows) * EPSILON
    return all(abs(found.get(name, math.inf) - value) <= rounding for name, value in matrix.measures().items())


@dataclass(frozen=True)
class RowScores:
    """The scores of one task's test rows."""

    ids: tuple[str, ...]
    scores: npt.NDArray[np.float64]
    """(rows,), fractions."""


def row_scores(folder: Path, events: Sequence[Event]) -> dict[str, RowScores] | None:
    """Each task's scores by row, as the newest stage has left them; None where they are not as the journal says."""
    told = stages(events)[-1]
    found = {}
    for task in told.scores:
        rows = prediction_lines(folder, told, task)
        if rows is None:
            return None
        found[task] = RowScores(tuple(row["id"] for row in rows), np.array([row["score"] for row in rows], dtype=float))
    return found


def prediction_lines(folder: Path, told: Stage, task: str) -> list[dict[str, Any]] | None:
    """A task's predictions as the newest stage, of which `told` tells, has left them; None where they are others."""
    name = f"{PREDICTIONS}/{task}.jsonl"
    digest = told.files.get(name)
    if digest is None or _fault(folder / name, digest) is not None:
        return None
    return [json.loads(line) for line in (folder / name).read_bytes().splitlines()]


def checked_answers(folder: Path, told: Sequence[Stage]) -> Iterator[tuple[Stage, Answers]]:
    """Yield the stages whose answers are kept as `saved_answers` does, from files that are as the journal says.

    Raises:
        StorageError: one of them is missing or damaged.
    """
    for event in filter(saves_answers, told):
        name = answers_file(event.tasks_seen)
        if (fault := _fault(folder / name, event.files[name])) is not None:
            raise StorageError(f"{folder / name}: {fault}. {repair_advice(folder.parent.parent)}.")
    yield from saved_answers(folder, told)


def recorded_matrix(told: Sequence[Stage]) -> ScoreMatrix:
    """The score matrix that a journal's stages tell, of the tasks learned so far.

    Raises:
        ValueError: their rows are none of a score matrix.
    """
    tasks = tuple(told[-1].scores) if told else ()
    return ScoreMatrix(tasks, tuple(tuple(event.scores.values()) for event in told))


def recorded_rows(events: Sequence[Event], keys: Sequence[str]) -> list[Row]:
    """The rows that a journal tells and that were computed from the same snapshots, data and settings as now.

    Args:
        keys: what identifies each row now.
    """
    rows: list[Row] = []
    for key, event in zip(keys, stages(events), strict=False):
        if (event.tasks_seen, event.key) != (len(rows) + 1, key):
            break
        rows.append(tuple(event.scores.values()))
    return rows


def final_event(events: Sequence[Event]) -> Finished | Stopped | None:
    """The event that says for good how far the trial goes: a scheduler has stopped it, or it has finished.

    What was decided on rows that are outdated is so no more.
    """
    for event in reversed(events):
        if isinstance(event, (Finished, Stopped)):
            return event
        if isinstance(event, Lost) and event.kind == "outdated":
            return None
    return None


class NewRow:
    """A row of the score matrix while its tasks are scored; of what was answered it holds what has to be written.

    Args:
        written: digests of the files that are there, by name.
    """

    def __init__(self, written: Mapping[str, str]):
        self._written = written
        self.scores: list[float] = []
        """Of each task, in order."""
        self.answers: dict[str, list[Answer]] = {}
        """By task."""
        self.digests: dict[str, str] = {}
        """Of its files of predictions, by name."""
        self.contents: dict[str, bytes] = {}
        """Of those that are others than what is there."""

    def add(self, task: str, score: float, predictions: Sequence[Mapping[str, Any]]) -> None:
        """Add the next task: its score, and its predictions, each of which becomes a line with one JSON object."""
        self.scores.append(score)
        self.answers[task] = [Answer(line["prediction"], line["score"]) for line in predictions]
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in predictions)
        name, content = f"{PREDICTIONS}/{task}.jsonl", lines.encode()
        self.digests[name] = _digest(content)
        if self._written.get(name) != self.digests[name]:
            self.contents[name] = content


class TrialFiles:
    """One trial's journal, and what it leaves beside it: settings, score rows, predictions, answers, result.

    Args:
        sweep: the trial's sweep.
        trial_id: names its folder.
        tasks: names of its tasks, in the order they are learned.
        keys: what identifies each row of its score matrix now.
    """

    def __init__(self, sweep: SweepFolder, trial_id: str, tasks: Sequence[str], keys: Sequence[str]):
        self.trial_id, self.keys = trial_id, keys
        self.journal = sweep.journal(trial_id)
        self.folder = self.journal.path.parent
        self._storage, self._tasks = sweep.storage, tuple(tasks)
        events = self.journal.read()
        end = final_event(events)
        self.stop = end if isinstance(end, Stopped) else None
        """The event with which a scheduler has stopped the trial for good; None where it goes to its last task."""
        self.wanted = self.stop.tasks_seen if self.stop else len(self._tasks)
        """How many rows it is to have."""
        self.rows = recorded_rows(events, self.keys)
        """The rows of the score matrix so far."""
        self.corrupt = corrupt_files(self.folder, events)
        self._recorded = {
            stage.tasks_seen: content_hash({name: getattr(stage, name) for name in _ROW_FIELDS})
            for stage in stages(events)
        }
        """Hash of what the journal holds of each row, by tasks seen."""
        damaged = {damage.path for damage in self.corrupt}
        self._written = {n: digest for n, digest in recorded_files(events).items() if self.folder / n not in damaged}
        """Digests of the files that are there, by name, as far as they are known."""
        self._answers: Answers | None = None
        """Those of the newest row, once they have been read or given."""
        if len(self.rows) < self.wanted:
            # files may be ahead of the journal, and are written again with the next row; the answers of told rows stay
            self.corrupt = [damage for damage in self.corrupt if 0 < self._stage_of(damage) <= len(self.rows)]
        self.complete = status(events) in ("finished", "stopped") and len(self.rows) >= self.wanted and not self.corrupt
        """Whether every row is there, and every file, and the trial has come to its end."""
        self._files: dict[str, str] = {}
        """Digests of the newest row's files, by name."""

    @property
    def matrix(self) -> ScoreMatrix:
        """The rows so far."""
        return self.matrix_after(len(self.rows))

    def matrix_after(self, tasks_seen: int) -> ScoreMatrix:
        """Return the rows as they were after so many tasks."""
        return ScoreMatrix(self._tasks, tuple(self.rows[:tasks_seen]))

    def repair(self) -> None:
        """Set aside what is damaged; write again what the journal tells, and forget the rows whose answers are lost."""
        for damage in self.corrupt:
            if damage.path.exists():
                quarantine(damage.path, damage.found)
            else:
                log.warning("%s is missing and is made again", damage.path)
        names = {damage.path.relative_to(self.folder).parts[0] for damage in self.corrupt}
        lost = [stage for damage in self.corrupt if (stage := self._stage_of(damage))]
        if PREDICTIONS in names:
            lost.append(len(self.rows))
        if lost:
            del self.rows[min(lost) - 1 :]
        elif SCORES in names:
            self._write({SCORES: self._scores()})

    def _stage_of(self, damage: CorruptFile) -> int:
        """Return the tasks seen at the stage whose answers are damaged; 0 for any other file."""
        return stage_of(damage.path.relative_to(self.folder).as_posix()) or 0

    def new_row(self) -> NewRow:
        """Begin the next row of the score matrix."""
        return NewRow(self._written)

    def record(self, row: NewRow, keep_answers: KeepAnswers = "all") -> None:
        """Add one row of the score matrix, durably, with the answers that were scored; they replace those before.

        Args:
            keep_answers: `all` also writes a file of this row's own, with the answers that the row before did not give.
        """
        files = {}
        if keep_answers == "all":
            if self._answers is None:
                self._answers = newest_answers(self.folder, stages(self.journal.read())[: len(self.rows)])
            files[answers_file(len(self.rows) + 1)] = changes(row.answers, self._answers)
        self._answers = row.answers if keep_answers == "all" else None
        self.rows.append(tuple(row.scores))
        self._files = self._write(files | row.contents | {SCORES: self._scores()}) | row.digests

    def record_stage(
        self, lineage: str, reused: bool, metrics: Mapping[str, float], provenance: Mapping[str, Any]
    ) -> None:
        """Append the newest row's stage to the journal, unless an equal one is there.

        Args:
            reused: whether the stage was learned elsewhere or earlier.
            provenance: the other fields of the event, such as `steps` and `scored_by`.
        """
        seen = len(self.rows)
        row = {
            "tasks_seen": seen,
            "task": self._tasks[seen - 1],
            "lineage": lineage,
            "scores": dict(zip(self._tasks, self.rows[-1], strict=False)),
            "key": self.keys[seen - 1],
            "files": self._files,
        }
        if self._recorded.get(seen) != (digest := content_hash(row)):
            self.journal.append("stage", **row, **provenance, reused=reused, metrics=dict(metrics))
            self._recorded[seen] = digest

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, and close the journal."""
        self.journal.append("finished", metrics=result["metrics"], files=self._write({RESULT: json_bytes(result)}))

    def stop_again(self) -> None:
        """Close the journal of a trial that was stopped for good, and of which something was made again."""
        assert self.stop is not None
        self.journal.append("stopped", tasks_seen=self.stop.tasks_seen, reason=self.stop.reason)

    def _scores(self) -> bytes:
        keys = list(self.keys[: len(self.rows)])
        return json_bytes({"tasks": list(self._tasks), "scores": [list(row) for row in self.rows], "keys": keys})

    def _write(self, files: Mapping[str, bytes]) -> dict[str, str]:
        """Write files, and return their digests."""
        for name in files:
            self._written.pop(name, None)  # should writing fail, nobody knows what is there
        self._storage.write_together({self.folder / name: content for name, content in files.items()})
        digests = {name: _digest(content) for name, content in files.items()}
        self._written |= digests
        return digests


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
