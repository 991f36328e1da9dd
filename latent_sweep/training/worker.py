"""The other workers of a group: they do their share of what the first one orders, and decide nothing."""

from __future__ import annotations

import socket

from latent_sweep.errors import StorageError
from latent_sweep.storage.failures import during
from latent_sweep.storage.snapshots import Snapshot
from latent_sweep.sweep.plan import Pack
from latent_sweep.training.context import Context
from latent_sweep.training.evaluation import CombinedAdapters, answer
from latent_sweep.training.events import say_nothing
from latent_sweep.training.preflight import try_backbone
from latent_sweep.training.run import ActiveRun, ActiveRuns
from latent_sweep.training.stage import learn_together


def follow(pack: Pack, context: Context) -> None:
    """Do this worker's share of what the group's first worker orders, until it has no more.

    Raises:
        StorageError: this worker does not see a snapshot that the first one has.
    """
    by_id = {member.training_id: ActiveRun(member, [], context) for member in pack.runs}
    members = ActiveRuns(list(by_id.values()), context)
    snapshots: dict[str, Snapshot] = {}
    blends: dict[str, CombinedAdapters] = {}

    def snapshot(lineage: str) -> Snapshot:
        found = snapshots.get(lineage) or context.store.recall(lineage)
        if found is None:
            group = context.engine.group
            raise StorageError(
                f"worker {group.rank} of {group.size} on {socket.gethostname()} does not find snapshot {lineage} in "
                f"{context.store.folder}, where the first worker has it; run.storage must be shared by all nodes"
            )
        return snapshots.setdefault(lineage, found)

    while (order := context.engine.group.next_order()) != ("end",):
        what, *how = order
        if what == "load":
            _ = context.backbone
        elif what == "try":
            try_backbone(members, *how)
        elif what == "learn":
            position, lineages = how
            blends.clear()
            for member in members.all:
                learns = member.lineages[position] in lineages  # not what has failed, or is in the store
                if learns and member.method.reads_history(position):
                    member.snapshots = [snapshot(lineage) for lineage in member.lineages[:position]]
            learn_together(members, position, lineages, say_nothing)
        else:
            training_id, trial_id, batches = how
            member = by_id[training_id]
            (trial,) = (trial for trial in member.member.trials if trial.trial_id == trial_id)
            with during("answering"):
                if trial_id not in blends:
                    blends = {trial_id: CombinedAdapters(member.method_of(trial))}
                answer(batches, snapshot, blends[trial_id], context.engine, context.bank)
