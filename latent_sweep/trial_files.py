"""What one trial leaves in its folder, and whether anything is missing there."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latent_sweep.metrics import ScoreMatrix
from latent_sweep.plan import Trial
from latent_sweep.storage import write_atomically, write_json
from latent_sweep.tracking import stages, status, trial_journal

log = logging.getLogger(__name__)


class TrialFiles:
    """What one trial leaves in its folder: settings, score rows, predictions, journal, result."""

    def __init__(self, trial: Trial, sweep_folder: Path):
        self.trial = trial
        self.folder = sweep_folder / "trials" / trial.trial_id
        self.journal = trial_journal(sweep_folder, trial.trial_id)
        self.keys = trial.row_keys()
        self.rows = self._valid_rows()

    @property
    def matrix(self) -> ScoreMatrix:
        """The rows so far."""
        return ScoreMatrix(tuple(task.name for task in self.trial.tasks), tuple(self.rows))

    @property
    def complete(self) -> bool:
        """Whether every row is there and the trial has ended well, or a scheduler has stopped it for good."""
        events = self.journal.read()
        wanted = {"finished": len(self.trial.tasks), "stopped": len(stages(events))}.get(status(events))
        return wanted is not None and len(self.rows) >= wanted

    def _valid_rows(self) -> list[tuple[float, ...]]:
        """Rows that were computed from the same snapshots, data and settings as they would be now."""
        path = self.folder / "scores.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows, keys = content["scores"], content["keys"]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s); its rows are scored again", path, error)
            return []
        valid = 0
        while valid < min(len(rows), len(keys)) and keys[valid] == self.keys[valid]:
            valid += 1
        return [tuple(row) for row in rows[:valid]]

    def record(self, row: Sequence[float]) -> None:
        """Add one row of the score matrix, durably."""
        self.rows.append(tuple(row))
        content = {
            "tasks": [task.name for task in self.trial.tasks],
            "scores": [list(row) for row in self.rows],
            "keys": list(self.keys[: len(self.rows)]),
        }
        write_json(self.folder / "scores.json", content)

    def write_predictions(self, task: str, predictions: Sequence[Mapping[str, Any]]) -> None:
        """Answers of the newest stage, one JSON object a line."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in predictions)
        write_atomically(self.folder / "predictions" / f"{task}.jsonl", lines.encode())
