"""Runs small sweeps below one folder, in this process, and looks at what they leave behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.config import parse_sweep
from latent_sweep.sweep.plan import Pack, expand, pack
from latent_sweep.training.events import Begun, StageDone, Step
from latent_sweep.training.pack import run_pack

Event = Step | StageDone


def _nothing(event: Event) -> None:
    """Do nothing with an event: nobody looks."""


@dataclass
class Runs:
    """Runs the packs of small sweeps, all of one name, below a folder."""

    folder: Path
    """The storage."""
    name: str = "tiny"
    """Of the sweeps."""
    stages: list[StageDone] = field(default_factory=list)
    """Every finished stage, in order."""

    @property
    def sweep(self) -> SweepFolder:
        """The sweep that the packs are of."""
        return SweepFolder(Storage(self.folder), self.name)

    def take_tokens(self, other: Runs) -> Runs:
        """Begin with the tokenized rows of other runs, so that nobody tokenises them again; returns itself."""
        shutil.copytree(other.folder / "tokens", self.folder / "tokens")
        return self

    def packs_of(self, content: Mapping[str, Any]) -> list[Pack]:
        """The packs of a sweep file's content."""
        sweep = parse_sweep(content, "test")
        return pack(expand(sweep), sweep.run.pack)

    def run(self, packs: Sequence[Pack], on: Callable[[Event], None] = _nothing) -> None:
        """Run packs here; `on` sees every step and stage, and may raise to cut the run."""

        def emit(event: Begun | Event) -> None:
            if isinstance(event, Begun):
                return
            if isinstance(event, StageDone):
                self.stages.append(event)
            on(event)

        for each in packs:
            run_pack(each, self.sweep, emit)

    def files(self) -> dict[str, bytes]:
        """Score matrices, predictions, kept answers of trials and snapshots, byte for byte, by path."""
        trials = f"{self.name}/trials/*"
        patterns = [f"{trials}/scores.json", f"{trials}/predictions/*.jsonl", f"{trials}/answers/*.jsonl"]
        patterns += ["snapshots/*.safetensors", "snapshots/*.json"]
        paths = [path for pattern in patterns for path in self.folder.glob(pattern)]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}
