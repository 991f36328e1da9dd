"""list, gc, delete and cp: what lies in a storage, and what need not lie there."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_sweep.cli.command import Commands, Parser, add_command, add_json, add_sweep_folder, print_json
from latent_sweep.security import printable

if TYPE_CHECKING:
    from latent_sweep.storage.folders import SweepFolder
    from latent_sweep.storage.inventory import Deletion, Garbage, Inventory

KEEP_DAYS = 7.0


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    listing = add_command(
        commands,
        "list",
        _list,
        "list the sweeps of a storage: where each stands, what came out, how much it takes",
        "list s3://bucket/sweeps",
        "List the sweeps of a storage: where each stands, the best AP so far (of the trials that have seen the most "
        "tasks), the bytes of its folder, of the snapshots that it alone refers to, and of those that it shares with "
        "others. Changes nothing.",
    )
    _add_storage(listing)
    add_json(listing)

    gc = add_command(
        commands,
        "gc",
        _gc,
        "find what no sweep of a storage refers to, and delete it if asked to",
        "gc runs --delete",
        "Find snapshots and checkpoints that no sweep refers to, files that were set aside as damaged, and what "
        "writers and probes have left over; print bytes by kind. Deletes nothing without --delete. What was written "
        "within --keep-days stays, and so does what a sweep refers to that has not run yet: it is safe beside running "
        "sweeps.",
    )
    _add_storage(gc)
    gc.add_argument("--delete", action="store_true", help="delete what is found")
    gc.add_argument(
        "--keep-days",
        type=_days,
        default=KEEP_DAYS,
        metavar="DAYS",
        help="leave what was written within so many days, and in any case within an hour; default: %(default)g",
    )
    gc.add_argument(
        "--caches",
        action="store_true",
        help="also tokens, factors, embeddings and known answers of this node: they are made again when needed",
    )
    add_json(gc)

    delete = add_command(
        commands,
        "delete",
        _delete,
        "delete a sweep with what no other sweep refers to, after asking",
        "delete runs/lambda",
        "Delete a sweep's folder, that of its candidates, and the snapshots that no other sweep of the storage refers "
        "to. Says what that takes and asks. Its runs in MLflow stay. Exit codes: 0 deleted, 1 nothing was, as that was "
        "the answer, 2 it could not be carried out.",
    )
    add_sweep_folder(delete)
    delete.add_argument("--yes", action="store_true", help="do not ask")

    cp = add_command(
        commands,
        "cp",
        _cp,
        "copy a sweep with all that it refers to into another storage or an archive, or from an archive",
        "cp runs/lambda lambda.tar.gz",
        "Copy a sweep, that of its candidates, and the snapshots that they refer to. What is copied is checked by "
        "`latent-sweep verify`, and resumes as it would here. An archive holds one storage; from there the sweep is "
        "copied with the archive in the folder's place. Caches stay behind, and are made again when needed.",
    )
    cp.add_argument("folder", help="the sweep's folder or its URI, or an archive, e.g. runs/lambda")
    cp.add_argument("target", help="a storage: a folder or a URI; or an archive: .tar, .tar.gz, .tgz or .tar.xz")
    cp.add_argument(
        "--without-snapshots",
        action="store_true",
        help="leave the weights behind: the evidence behind a table, for `report`, `figures` and `rescore`; `verify` "
        "says of each snapshot that it is missing, and `run` learns nothing again that has ended",
    )


def _add_storage(parser: Parser) -> None:
    parser.add_argument(
        "storage", nargs="?", help="a folder or a URI; default: that of LATENT_SWEEP_STORAGE, else runs"
    )


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a number of days, 0 or more")
    return days


def bytes_text(size: int) -> str:
    """A number of bytes for people: `1.5 GiB`."""
    amount, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def _inventory(place: str | None) -> Inventory:
    """Open the storage that a command names, or the default one."""
    from latent_sweep.errors import ConfigError
    from latent_sweep.storage.inventory import Inventory
    from latent_sweep.storage.storage import default_place, open_storage

    storage = open_storage(place or default_place())
    if not storage.is_remote and not storage.folder.is_dir():
        raise ConfigError(f"{storage.place}: found no such folder; expected a storage, as `run.storage` names it")
    return Inventory(storage)


def _list(options: argparse.Namespace) -> int:
    inventory = _inventory(options.storage)
    found = [_listed(inventory, sweep) for sweep in inventory.sweeps]
    if options.json:
        print_json(found)
        return 0
    rows = [["sweep", "stands", "trials", "best AP", "own", "snapshots", "shared", "last written"]]
    for one in found:
        if "fault" in one:
            rows.append([one["name"], "damaged", "", "", "", "", "", _day(one["changed"])])
            continue
        done = f"{one['done']} of {one['trials']}" + (f", {one['failed']} failed" if one["failed"] else "")
        best = "" if one["best_AP"] is None else f"{100 * one['best_AP']:.1f}"
        sizes = [bytes_text(one[kind]) for kind in ("bytes_own", "bytes_snapshots", "bytes_shared")]
        rows.append([one["name"], one["course"], done, best, *sizes, _day(one["changed"])])
    print(printable(_table(rows) if found else f"{inventory.storage.place}: no sweeps"))
    for one in found:
        if "fault" in one:
            print(printable(f"{one['name']}: {one['fault']}"))
    return 0


def _listed(inventory: Inventory, sweep: SweepFolder) -> dict[str, Any]:
    from latent_sweep.errors import StoreError
    from latent_sweep.monitor.state import SweepWatch
    from latent_sweep.storage.folders import SWEEP_FILE

    told: dict[str, Any] = {"name": sweep.name, "place": str(sweep.path), "changed": inventory.changed(sweep)}
    try:
        sweep.storage.pull(sweep.path, only=(SWEEP_FILE,))
        state, size = SweepWatch(sweep).look(), inventory.size(sweep)
    except StoreError as error:
        return told | {"fault": str(error)}
    return told | {
        "tuning_of": sweep.tuning_of,
        "course": state.course,
        "driver": state.driver,
        "trials": len(state.trials),
        "done": state.trials_done,
        "failed": len(state.failed),
        "best_AP": state.best.stages[-1].AP if state.best else None,
        "bytes_own": size.own,
        "bytes_snapshots": size.snapshots,
        "bytes_shared": size.shared,
    }


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Write rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _gc(options: argparse.Namespace) -> int:
    from latent_sweep.storage.inventory import AT_WORK, DAY, collect, garbage

    inventory = _inventory(options.storage)
    found = garbage(inventory, options.keep_days, options.caches)
    deleted = collect(inventory, found) if options.delete else []
    if options.json:
        by_kind = {kind: {"files": count, "bytes": size} for kind, count, size in _by_kind(found)}
        print_json({"found": by_kind, "deleted": len(deleted), "bytes_deleted": sum(one.size for one in deleted)})
        return 0
    if not found:
        age = f"{options.keep_days:g} days" if options.keep_days * DAY > AT_WORK else "an hour; what is younger stays"
        print(printable(f"{inventory.storage.place}: nothing that is older than {age}"))
        return 0
    rows = [[kind, f"{count:,}", bytes_text(size)] for kind, count, size in _by_kind(found)]
    print(printable(_table([["kind", "files", "bytes"], *rows])))
    if not options.delete:
        print("nothing was deleted; the same command with --delete deletes it")
    else:
        left = f"; {len(found) - len(deleted):,} are in use and stay" if len(deleted) < len(found) else ""
        print(f"deleted {len(deleted):,} files, {bytes_text(sum(one.size for one in deleted))}{left}")
    return 0


def _by_kind(found: Sequence[Garbage]) -> list[tuple[str, int, int]]:
    """Count files and bytes of each kind."""
    counts, sizes = Counter[str](), Counter[str]()
    for one in found:
        counts[one.kind] += 1
        sizes[one.kind] += one.size
    return [(kind, counts[kind], sizes[kind]) for kind in counts]


def _delete(options: argparse.Namespace) -> int:
    from latent_sweep.storage.folders import open_sweep
    from latent_sweep.storage.inventory import Inventory, delete, deletion

    sweep = open_sweep(options.folder)
    inventory = Inventory(sweep.storage)
    going = deletion(inventory, sweep.name)
    print(printable("\n".join(_going(going))))
    if not options.yes and not _agreed(sweep.name):
        print("nothing was deleted")
        return 1
    delete(inventory, going)
    print(printable(f"deleted {sweep.name}; its runs in MLflow stay, `mlflow experiments delete` deletes them"))
    return 0


def _going(going: Deletion) -> list[str]:
    """Say what a deletion takes away, and what it leaves."""
    own, alone = (sum(facts.size for facts in files.values()) for files in (going.files, going.snapshots))
    lines = [f"{sweep.path}: {len(list(sweep))} trials" for sweep in going.sweeps]
    lines.append(f"{bytes_text(own)} of results, {bytes_text(alone)} of snapshots that no other sweep refers to")
    if going.shared:
        lines.append(f"{going.shared} snapshots stay: other sweeps refer to them")
    return lines


def _agreed(name: str) -> bool:
    """Ask for the sweep's name; nobody there to answer is a no."""
    if not sys.stdin.isatty():
        print("no terminal to ask on; --yes deletes without asking")
        return False
    try:
        return input("Type the sweep's name to delete it: ").strip() == name
    except EOFError:
        return False


def _cp(options: argparse.Namespace) -> int:
    from latent_sweep.storage.folders import open_sweep
    from latent_sweep.storage.inventory import copy_sweep, is_archive, unpacked

    if is_archive(options.folder):
        with unpacked(Path(options.folder)) as (storage, name):
            copied = copy_sweep(storage, name, options.target, not options.without_snapshots)
    else:
        sweep = open_sweep(options.folder)
        copied = copy_sweep(sweep.storage, sweep.name, options.target, not options.without_snapshots)
    name = copied.sweeps[-1]
    print(printable(f"{', '.join(copied.sweeps)}: {copied.files:,} files, {bytes_text(copied.size)}"))
    check = "verify" if copied.snapshots else "rescore"
    if is_archive(options.target):
        print(printable(f"elsewhere: latent-sweep cp {options.target} runs && latent-sweep {check} runs/{name}"))
    else:
        print(printable(f"check it: latent-sweep {check} {options.target.rstrip('/')}/{name}"))
    return 0
