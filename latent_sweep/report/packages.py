"""The packages that draw: a missing one is reported before a report is computed."""

from __future__ import annotations

from importlib.util import find_spec

from latent_sweep.errors import ConfigError


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def check_can_draw(what: str, instead: str = "") -> None:
    """Raise ConfigError if `what`, a page or pictures, needs a package that is not installed.

    Args:
        instead: what works without them, for the message.
    """
    if missing := [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]:
        raise ConfigError(f"{what} needs {' and '.join(missing)}; `pip install {' '.join(missing)}`{instead}")
