"""Journal events without a journal, and the fields of those in one."""

from __future__ import annotations

import dataclasses
from typing import Any

from latent_sweep.storage.journal import Event, Failed, Finished, Lost, Stage, Started, Stopped

_DEFAULTS: dict[type, dict[str, Any]] = {
    Started: {"attempt": 1},
    Stage: {"tasks_seen": 1, "task": "mood", "lineage": "lineage", "scores": {}, "metrics": {}},
    Finished: {"metrics": {}},
    Failed: {"kind": "error", "message": "failed"},
    Lost: {"kind": "worker_died", "message": "lost"},
    Stopped: {"tasks_seen": 1, "reason": "stopped"},
}


def an_event(name: str, **fields: Any) -> Event:
    """An event of this name; fields that are not given have some value."""
    (event,) = [event for event in _DEFAULTS if event.name == name]
    return event(**{"seq": 0, "time": 0.0} | _DEFAULTS[event] | fields)


def fields_of(event: Event) -> dict[str, Any]:
    """The fields to append an equal event with."""
    fields = dataclasses.asdict(event)
    del fields["seq"], fields["time"], fields["sha256"]
    return fields
