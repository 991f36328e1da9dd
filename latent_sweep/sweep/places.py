"""Find a sweep's storage and tracker from the command line, the sweep file and the environment.

The first of these counts: the command line; an absolute path or a URI in the sweep file; the environment
(`LATENT_SWEEP_STORAGE`, `MLFLOW_TRACKING_URI`); a relative path in the file; the default. So the environment replaces a
relative path: with LATENT_SWEEP_STORAGE=/data/sweeps, `storage: runs` means /data/sweeps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from latent_sweep.data.probes import located
from latent_sweep.errors import ConfigError
from latent_sweep.security import quoted
from latent_sweep.settings.paths import local_path
from latent_sweep.storage.storage import STORAGE_VARIABLE, default_location, in_job_package
from latent_sweep.sweep.schema import RunSettings
from latent_sweep.sweep.tracking_uris import (
    DEFAULT_URI,
    TRACKING_VARIABLE,
    address_faults,
    location_faults,
    relative_place,
)


def placed(run: RunSettings, given: Mapping[str, Any]) -> tuple[RunSettings, list[str]]:
    tracking = given.get("tracking")
    uri, tracker_faults = _tracker(run.tracking.uri, isinstance(tracking, Mapping) and "uri" in tracking)
    storage, faults = _storage(run.storage, "storage" in given)
    changed = {"storage": storage, "tracking": run.tracking.model_copy(update={"uri": uri})}
    changed |= {"probes": located(run.probes)}
    return run.model_copy(update=changed), faults + tracker_faults


def _storage(place: str, given: bool) -> tuple[str, list[str]]:
    where = "run.storage"
    if not given and os.environ.get(STORAGE_VARIABLE) and not _is_absolute(place):
        try:
            place, where = default_location(), STORAGE_VARIABLE
        except ConfigError as error:
            return place, [str(error)]
    return place, [f"{where}: {fault}" for fault in _folder_faults(place)]


def _is_absolute(place: str) -> bool:
    return "://" in place or os.path.isabs(os.path.expanduser(place))


def _folder_faults(place: str) -> list[str]:
    if variable := re.search(r"\$\{?\w+\}?", place):
        return [
            f"found {quoted(place)}; variables such as {variable[0]} are not read here. Write the path, or give it by "
            f"--set run.storage={variable[0]}/..., which the shell fills in"
        ]
    if "://" in place:
        return []
    folder = local_path(place)
    if in_job_package(folder):
        return [
            f"found {quoted(place)}, a folder in Ray's copy of this job's working directory, where later jobs do not "
            f"find it. Set {STORAGE_VARIABLE} to an absolute path or a URI where the cluster starts, or add --set "
            "run.storage=/PATH/THAT/ALL/NODES/SEE"
        ]
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:
        return [f"found {quoted(place)}; no folder can have this path: {error.strerror}"]
    if nearest.is_dir():
        return []
    return [f"found {quoted(place)}; expected a folder, but {nearest} is a file. Name another folder"]


def _tracker(uri: str | None, given: bool) -> tuple[str | None, list[str]]:
    if uri == "none":
        return uri, []
    if not given and os.environ.get(TRACKING_VARIABLE) and (uri is None or relative_place(uri) is not None):
        uri = None
    variable = os.environ.get(TRACKING_VARIABLE) if uri is None else None
    where, address = (TRACKING_VARIABLE, variable) if variable else ("run.tracking.uri", uri or DEFAULT_URI)
    text_faults = address_faults(address) if variable else []  # a setting was checked when it was read
    return uri, [f"{where}: {fault}" for fault in text_faults or location_faults(address)]
