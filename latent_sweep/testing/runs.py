"""Runs small sweeps in this process and reads the files they leave."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.packs import Pack, pack
from latent_sweep.sweep.plan import expand
from latent_sweep.training.events import Activity, StageDone, Step, ignore_event
from latent_sweep.training.pack import run_pack

Event = Step | StageDone


@dataclass
class Runs:
    """Runs packs of small sweeps of one name in a folder."""

    folder: Path
    """The storage."""
    name: str = "tiny"
    stages: list[StageDone] = field(default_factory=list)

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(Storage(self.folder), self.name)

    def take_tokens(self, other: Runs) -> Runs:
        shutil.copytree(other.folder / "tokens", self.folder / "tokens")
        return self

    def packs_of(self, content: Mapping[str, Any]) -> list[Pack]:
        sweep = parse_sweep(content, "test")
        return pack(expand(sweep), sweep.run.pack)

    def run(self, packs: Sequence[Pack], on: Callable[[Event], None] = ignore_event) -> None:
        """Run packs; `on` receives every step and stage, and may raise to interrupt the run."""

        def emit(event: Activity | Event) -> None:
            if isinstance(event, Activity):
                return
            if isinstance(event, StageDone):
                self.stages.append(event)
            on(event)

        for each in packs:
            run_pack(each, self.sweep, emit)

    def files(self) -> dict[str, bytes]:
        """Return the content of score matrices, predictions, answers and snapshots by path."""
        trials = f"{self.name}/trials/*"
        patterns = [f"{trials}/scores.json", f"{trials}/predictions/*.jsonl", f"{trials}/answers/*.jsonl"]
        patterns += ["snapshots/*.safetensors", "snapshots/*.json"]
        paths = [path for pattern in patterns for path in self.folder.glob(pattern)]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}
