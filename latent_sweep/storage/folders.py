"""A sweep and its trials on disk: what their driver wrote, and who may write now.

One driver at a time runs a sweep, and one worker at a time writes a trial: `driving` and `writing` see to it.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from latent_sweep.errors import ConfigError, StorageError
from latent_sweep.labels import distinct_labels, label, short_names
from latent_sweep.settings import flatten, local_path, read_yaml
from latent_sweep.storage.checksummed import has_valid_checksum
from latent_sweep.storage.journal import Event, Journal
from latent_sweep.storage.leases import Lease, held
from latent_sweep.storage.snapshots import SnapshotStorage
from latent_sweep.storage.storage import (
    DEFAULT_LOCATION,
    JOURNAL,
    STORAGE_VARIABLE,
    Storage,
    default_location,
    open_storage,
    storage_in,
)

log = logging.getLogger(__name__)

SWEEP_FILE = "sweep.json"
"""What makes a folder a sweep's: what its driver has planned."""
LOCKS = "locks"
"""Folder of the leases of a sweep's driver and of its trainings."""
TUNE_FOLDER = "ray"
"""Folder of what Ray Tune keeps of a run; nothing reads it, for the journals tell all that counts."""
SETTINGS = "trial.yaml"
"""A trial's settings, among the artifacts of its run; in its folder where an earlier version has written it."""


@dataclass(frozen=True)
class TrialFolder:
    """One trial of a sweep on disk; the folder is empty or missing until the trial starts."""

    journal: Journal
    """What it did."""
    trial_id: str
    training_id: str
    values: Mapping[str, Any]
    """The settings that vary in the sweep, by dotted path."""
    params: Mapping[str, Any]
    """Every resolved setting, by dotted path."""
    n_tasks: int
    lineages: Sequence[str] | None = None
    """The snapshots that it leaves behind, one a task; None where its data was not at hand when it was planned."""
    groups: Mapping[str, Any] | None = None
    """Every resolved setting, group by group; None where an earlier version wrote them into a file of the trial's."""

    @property
    def path(self) -> Path:
        """The folder."""
        return self.journal.path.parent

    def events(self) -> list[Event]:
        """Everything in the trial's journal."""
        return self.journal.read()

    def settings(self) -> Mapping[str, Any]:
        """Every resolved setting, group by group.

        Raises:
            ConfigError: an earlier version wrote them into a file of the trial's, which cannot be read.
        """
        found: Mapping[str, Any] = read_yaml(self.path / SETTINGS) if self.groups is None else self.groups
        return found

    def read_json(self, name: str) -> Any:
        """The content of the trial's file `name`, or None where it is not there.

        Raises:
            StorageError: the file cannot be read as JSON.
        """
        return _read_json(self.path / name) if (self.path / name).exists() else None


@dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk: `<storage>/<name>`. Its `sweep.json` is read once, the trials' journals every time."""

    storage: Storage
    """What all sweeps share, with the snapshots."""
    name: str
    """The sweep's, which is its folder's name and its experiment's."""

    @property
    def path(self) -> Path:
        """The folder on this node."""
        return self.storage.folder / self.name

    @property
    def where(self) -> str:
        """Where it lies, for messages."""
        return f"{self.storage.location}, sweep {self.name}" if self.storage.is_remote else f"{self.path}"

    @property
    def exists(self) -> bool:
        """Whether a sweep has been written here."""
        return (self.path / SWEEP_FILE).exists()

    @cached_property
    def _content(self) -> dict[str, Any]:
        file = self.path / SWEEP_FILE
        if not file.exists():
            candidates = SweepFolder(self.storage, tuning_name(self.name))
            self.storage.pull(candidates.path, only=(SWEEP_FILE,))
            if candidates.exists:
                raise StorageError(
                    f"{self.where}: found no {SWEEP_FILE}: its choices are still being made, among the trials of "
                    f"{candidates.where}. Run the sweep to its end, or look at that one."
                )
            raise StorageError(
                f"{self.where}: found no {SWEEP_FILE}; expected the folder of a sweep, <storage>/<sweep name>. "
                f"Run the sweep first, or check the path."
            )
        if not has_valid_checksum(file):
            raise StorageError(
                f"{file}: does not match its digest: it is damaged, or was written by an earlier version. "
                "Run the sweep again: that writes it anew, and repeats nothing that is complete."
            )
        return _read_json(file)["content"]

    @property
    def sweep_id(self) -> str:
        """The hash of the resolved sweep, 16 hexadecimal digits."""
        return self._content["sweep_id"]

    @property
    def axes(self) -> list[str]:
        """The dotted paths that vary, in the sweep file's order."""
        return self._content["axes"]

    @property
    def seed_axis(self) -> str:
        """The axis that repeats a configuration; `seed` also where the sweep does not vary it."""
        return self._content["seed_axis"]

    @property
    def tuning_of(self) -> str | None:
        """The name of the sweep whose candidates these trials are, if they are some."""
        return self._content.get("tuning_of")

    @property
    def tracking_uri(self) -> str | None:
        """The MLflow address that the sweep file names; None leaves it to the environment."""
        return self._content.get("tracking_uri")

    @property
    def run(self) -> Mapping[str, Any]:
        """Return how it was run last, as far as reports tell: `resources` and `prices`, as in its file.

        It is empty where an earlier version has written it.
        """
        return self._content.get("run", {})

    @cached_property
    def run_names(self) -> Mapping[str, tuple[str, str]]:
        """Return for each trial the settings that tell its configuration from the others, and its seed, for trackers.

        They are short, as lists of runs cut them, and empty where nothing varies.
        """
        names = {axis: name for axis, name in short_names(self.axes).items() if axis != self.seed_axis}
        points = [{name: trial.values[axis] for axis, name in names.items()} for trial in self]
        apart: dict[str, dict[str, Any]] = {}
        for point in points:
            apart.setdefault(label(point), point)
        known = dict(zip(apart, distinct_labels(list(apart.values())), strict=True))
        seed = self.seed_axis
        return {
            trial.trial_id: (known[label(point)], label({seed: trial.values[seed]}) if seed in trial.values else "")
            for trial, point in zip(self, points, strict=True)
        }

    @property
    def snapshots(self) -> SnapshotStorage:
        """Return the snapshots that its trials have learned, with those of all other sweeps of the storage."""
        return SnapshotStorage(self.storage)

    def journal(self, trial_id: str) -> Journal:
        """The journal of one of its trials."""
        return Journal(self.storage, self.path / "trials" / trial_id / JOURNAL)

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process read it for itself."""
        return SweepFolder, (self.storage, self.name)

    def __iter__(self) -> Iterator[TrialFolder]:
        return iter(self._trials)

    @cached_property
    def _trials(self) -> list[TrialFolder]:
        content, found = self._content, []
        flat = {name: [flatten(name, one) for one in groups] for name, groups in content.get("groups", {}).items()}
        for entry in content["trials"]:
            told = dict(entry)
            if (lineages := told.get("lineages")) is not None:
                told["lineages"] = lineages.split()
            if (places := told.pop("groups", None)) is not None:  # none in what an earlier version has written
                seed = {"seed": told.pop("seed")}
                told["groups"] = {name: content["groups"][name][place] for name, place in places.items()} | seed
                params = dict(itertools.chain.from_iterable(flat[name][i].items() for name, i in places.items()))
                told["params"] = params | seed | {"benchmark.tasks": told.pop("tasks")}
            found.append(TrialFolder(self.journal(told["trial_id"]), **told))
        return found


def tuning_name(name: str) -> str:
    """Name the sweep that holds the candidates of the sweep of this name."""
    return f"{name}-tuning"


def open_sweep(place: str | Path) -> SweepFolder:
    """Open the sweep in a folder `<storage>/<sweep name>`; from an object store it is brought here.

    Args:
        place: the folder's path or URI. `NAME` and `runs/NAME` also name a sweep of the default storage,
            `LATENT_SWEEP_STORAGE`, if the working directory has no such sweep.

    Raises:
        ConfigError: no folder can have this path, or the working directory and the default storage both have such
            a sweep.
        StorageError: the object store cannot be reached or refuses.
    """
    text = str(place)
    if "://" not in text:
        path, name = local_path(text).resolve(), _name_in_default_storage(text)
        here = SweepFolder(storage_in(path.parent), path.name)
        if name is None:
            return here
        there = SweepFolder(open_storage(default_location()), name)
        if there.storage.folder == path.parent or (_is_stored(here) and not _is_stored(there)):
            return here
        if _is_stored(here):
            raise ConfigError(
                f"{text}: found this sweep in {path.parent} and in {STORAGE_VARIABLE}, {there.storage.location}. "
                f"Write {path} for the first, or the second's whole address"
            )
        there.storage.pull(there.path)
        return there
    address, question, options = text.partition("?")
    parent, _, name = address.rstrip("/").rpartition("/")
    sweep = SweepFolder(open_storage(parent + question + options), name)
    sweep.storage.pull(sweep.path)
    return sweep


def _name_in_default_storage(text: str) -> str | None:
    """Return the name of the sweep that a path as typed names in the default storage; None for any other path."""
    if text.startswith((".", "/", "~")):
        return None
    parts = Path(text).parts
    return parts[-1] if len(parts) == 1 or (len(parts) == 2 and parts[0] == DEFAULT_LOCATION) else None


def _is_stored(sweep: SweepFolder) -> bool:
    """Return whether a sweep or its tuning trials have been written, here or in the object store."""
    names = (sweep.name, tuning_name(sweep.name))
    return any(sweep.storage.holds(sweep.storage.folder / name / SWEEP_FILE) for name in names)


def driving(sweep: SweepFolder, on_wait: Callable[[str], None]) -> AbstractContextManager[None]:
    """Hold the right to drive a sweep: to write what it is, to hand out its packs and to mirror it.

    Args:
        on_wait: told who drives it, where that has to be waited for.
    """
    return held(_driver_lease(sweep), on_wait)


def driven_since(sweep: SweepFolder) -> float | None:
    """Since when a driver runs a sweep, in Unix seconds; None where none does."""
    return _driver_lease(sweep).held_since()


def driver_of(sweep: SweepFolder) -> str:
    """Name the process that drives a sweep, for messages."""
    return _driver_lease(sweep).holder()


def _driver_lease(sweep: SweepFolder) -> Lease:
    return sweep.storage.lease(sweep.path / LOCKS / "driver.lock")


@contextmanager
def writing(sweep: SweepFolder, trials: Mapping[str, Iterable[str]]) -> Iterator[None]:
    """Hold the right to write these trials' folders, which are up to date then.

    A worker whose driver was killed, or that Ray has given up, may still be at work when its successor comes.

    Args:
        trials: trial ids by training id; a training is what is waited for.
    """

    def say_waiting(holder: str) -> None:
        log.warning("%s: waiting for %s, which is at work on the same trials", sweep.path, holder)

    with ExitStack() as stack:
        for training_id in sorted(trials):  # all take them in the same order, so nobody waits in a circle
            stack.enter_context(held(sweep.storage.lease(training_lock(sweep, training_id)), say_waiting))
            for trial_id in trials[training_id]:
                sweep.storage.sync_folder(sweep.path / "trials" / trial_id)
        yield


def training_lock(sweep: SweepFolder, training_id: str) -> Path:
    """Where those who write the trials of a training have their lease."""
    return sweep.path / LOCKS / f"{training_id}.lock"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise StorageError(f"{path}: cannot be read as JSON: {error}") from error
