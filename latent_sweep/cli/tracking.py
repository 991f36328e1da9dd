"""sync and verify: what is on disk, and what MLflow holds of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from latent_sweep.cli.command import (
    Commands,
    Parser,
    add_command,
    add_json,
    add_sweep_folder,
    add_tracker,
    print_json,
)
from latent_sweep.errors import ConfigError
from latent_sweep.security import printable

if TYPE_CHECKING:
    from latent_sweep.storage.folders import SweepFolder
    from latent_sweep.tracking.mlflow import MlflowTracker, NullTracker
    from latent_sweep.tracking.verify import Verdict


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    sync = add_command(
        commands,
        "sync",
        _sync,
        "bring everything on disk that MLflow lacks into it; safe to repeat",
        "sync runs/lambda --uri https://mlflow.example.org",
    )
    _add_tracker_arguments(sync)

    verify = add_command(
        commands,
        "verify",
        _verify,
        "check that the disk is whole and that MLflow holds what the journals say",
        "verify runs/lambda --repair",
        "Check the disk: every line of every journal checks against its digest, every file of results and every "
        "snapshot against what the journals say. If it is whole, check MLflow: runs, params, tags, status, every point "
        "of every metric, artifacts (pictures by name, snapshots by size, the rest byte for byte). Prints what "
        "differs; changes nothing without --repair. Exit codes: 0 equal, 1 something differs (with --repair: something "
        "is left for the next run), 2 it could not be checked.",
    )
    verify.add_argument(
        "--repair",
        action="store_true",
        help="set aside what is damaged on disk, so that the same run command makes it again, and say what that takes; "
        "if the disk is whole, bring MLflow what it lacks, with new runs in the place of those that cannot be mended",
    )
    _add_tracker_arguments(verify)
    add_json(verify)


def _add_tracker_arguments(parser: Parser) -> None:
    add_sweep_folder(parser)
    add_tracker(parser)


def _sync(options: argparse.Namespace) -> int:
    _, mirror = _tracked_sweep(options)
    changed = mirror.close()
    lines = [f"{changed} runs brought up to date", f"compare   {mirror.ui_command()}", f"          {mirror.link()}"]
    print(printable("\n".join(lines)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from latent_sweep.tracking.mlflow import MlflowTracker
    from latent_sweep.tracking.verify import repair_disk, repair_tracker, verify_disk, verify_tracker

    folder, mirror = _tracked_sweep(options)
    told: dict[str, Any] = {}
    """What `--json` prints; without it, every verdict is printed as soon as it is known."""

    def say(place: str, verdict: Verdict, what: str) -> None:
        told[what] = verdict.record()
        if not options.json:
            print(printable(f"{place}\n{verdict.text()}"), flush=True)

    def ended(code: int, *lines: str) -> int:
        if options.json:
            print_json(told)
        elif lines:
            print(*map(printable, lines), sep="\n")
        return code

    disk = verify_disk(folder)
    say("disk", disk, "disk")
    if disk.faults and options.repair:
        told["set_aside"] = repair_disk(folder)
        if told["set_aside"]:
            return ended(1, "set aside; the same run command makes it again:", *told["set_aside"])
        if not options.json:
            print("fetched again from the object store")
    elif disk.faults:
        return ended(1, _UNCHANGED)
    if not isinstance(mirror, MlflowTracker):
        return ended(0)
    if options.uri is None:
        _check_place(mirror.uri)
    tracker = verify_tracker(folder, mirror)
    say(f"MLflow at {mirror.uri}", tracker, "tracker")
    if tracker.faults and options.repair:
        repair_tracker(folder, mirror)
        tracker = verify_tracker(folder, mirror)
        say("repaired", tracker, "repaired")
    elif tracker.faults:
        return ended(1, _UNCHANGED)
    return ended(1 if tracker.faults else 0)


_UNCHANGED = "nothing was changed; the same command with --repair mends it, or makes it ready for the next run to mend"


def _check_place(uri: str) -> None:
    """Refuse a relative address that means nothing here: everything would be missing, and a repair would make another.

    Raises:
        ConfigError: there is no such database or folder.
    """
    from latent_sweep.sweep.tracking_uris import relative_place

    place = relative_place(uri)
    if place is not None and not place.exists():
        raise ConfigError(
            f"MLflow at {uri}: found no {place.absolute()}; expected the one that the sweep was brought into: the "
            "address is relative to the working directory. Run the command where the sweep ran, or name the tracker "
            "with --uri"
        )


def _tracked_sweep(options: argparse.Namespace) -> tuple[SweepFolder, MlflowTracker | NullTracker]:
    from latent_sweep.storage.folders import open_sweep
    from latent_sweep.tracking.mlflow import tracker_for

    folder = open_sweep(options.folder)
    return folder, tracker_for(options.uri or folder.tracking_uri, folder, options.allow_insecure)
