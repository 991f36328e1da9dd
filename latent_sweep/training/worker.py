"""The workers of a group with rank > 0: they compute what the first worker orders, and decide nothing."""

from __future__ import annotations

import socket
from contextlib import suppress

from latent_sweep.errors import Paused, StorageError
from latent_sweep.storage.failures import during
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.sweep.packs import Pack
from latent_sweep.training.context import Context
from latent_sweep.training.evaluation import CombinedAdapters, answer
from latent_sweep.training.events import ignore_event
from latent_sweep.training.preflight import try_backbone
from latent_sweep.training.run import ActiveRun, ActiveRuns
from latent_sweep.training.stage import learn_together


def run_worker(pack: Pack, context: Context) -> None:
    """Execute the first worker's orders until the last one. Raises StorageError if a snapshot is not found here."""
    by_id = {run.training_id: ActiveRun(run, [], context) for run in pack.runs}
    runs = ActiveRuns(list(by_id.values()), context)
    snapshots: dict[str, Snapshot] = {}
    adapters: dict[str, CombinedAdapters] = {}

    def snapshot(lineage: str) -> Snapshot:
        recalled = snapshots.get(lineage) or context.store.recall(lineage)
        if recalled is None:
            group = context.engine.group
            raise StorageError(
                f"worker {group.rank} of {group.size} on {socket.gethostname()} does not find snapshot {lineage} in "
                f"{context.store.folder}, where the first worker has it; run.storage must be shared by all nodes"
            )
        return snapshots.setdefault(lineage, recalled)

    while (order := context.engine.group.next_order()) != ("end",):
        command, *arguments = order
        if command == "load":
            _ = context.backbone
        elif command == "try":
            try_backbone(runs, *arguments)
        elif command == "learn":
            position, lineages = arguments
            adapters.clear()
            for run in runs.all:
                learns = run.lineages[position] in lineages
                if learns and run.method.reads_history(position):
                    run.snapshots = [snapshot(lineage) for lineage in run.lineages[:position]]
            with suppress(Paused):  # the first worker ends the pack
                learn_together(runs, position, lineages, ignore_event)
        else:
            training_id, trial_id, batches = arguments
            run = by_id[training_id]
            (trial,) = (trial for trial in run.planned.trials if trial.trial_id == trial_id)
            with during("answering"):
                if trial_id not in adapters:
                    adapters = {trial_id: CombinedAdapters(run.method_of(trial))}
                answer(batches, snapshot, adapters[trial_id], context.engine, context.bank)
