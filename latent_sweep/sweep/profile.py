"""What one machine does per second with one backbone, as a file that `latent-sweep plan` reads. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from latent_sweep.errors import StoreError
from latent_sweep.storage.checksummed import is_sealed, write_sealed_json


@dataclass(frozen=True)
class Profile:
    """The speed of one machine with one backbone."""

    backbone: str
    device: str
    """`cpu` or `cuda`."""
    dtype: str
    tokens_per_second_train: float
    """Prompt and target tokens, padding left out, of one Latent-LoRA trial that has the machine to itself."""
    rows_per_second_generate: float
    """Test rows that a trained adapter answers per second, in the batches that evaluation uses."""
    measured_at: str
    """UTC, ISO 8601."""
    versions: Mapping[str, str]


def profile_path(storage: Path, backbone: str, dtype: str, device: str = "cpu") -> Path:
    """Return where the profile of a backbone lies, whether or not there is one."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", backbone)  # a hub name or a folder has slashes
    return storage / "profiles" / f"{name}-{dtype}-{device}.json"


def read_profile(path: Path) -> Profile | None:
    """A profile that `latent-sweep bench` has written; None where there is none.

    Raises:
        StoreError: the file is not as it was written.
    """
    if not path.exists():
        return None
    if not is_sealed(path):
        raise StoreError(
            f"{path} is not a profile that checks against its digest: it is damaged, or was written by an earlier "
            "version; delete it and run `latent-sweep bench` again"
        )
    return Profile(**json.loads(path.read_bytes())["content"])


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile where `read_profile` finds it."""
    write_sealed_json(path, asdict(profile), indent=1)
