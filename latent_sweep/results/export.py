"""The pictures of a sweep as files for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from latent_sweep.results.page import all_pictures
from latent_sweep.results.summaries import summarise
from latent_sweep.store.folders import SweepFolder

_EMBEDDED = {"pdf.fonttype": 42}  # TrueType, which publishers accept; matplotlib's default is type 3
_DPI = 300


def export_pictures(
    sweep: SweepFolder, folder: Path, over: Sequence[str] = (), baseline: Sequence[str] = ()
) -> list[str]:
    """Write every picture as PDF and PNG, and their captions into README.md; `over` and `baseline` as in `summarise`.

    Returns:
        The names of the pictures.

    Raises:
        ConfigError: the sweep has no such axis, or not exactly one such configuration.
        StoreError: the sweep or a journal is missing or damaged.
    """
    found = all_pictures(sweep, summarise(sweep, over, baseline))
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_EMBEDDED):
        for picture in found:
            for kind in ("pdf", "png"):
                picture.figure.savefig(folder / f"{picture.name}.{kind}", dpi=_DPI)
    captions = [f"- `{picture.name}`: {_sentence(picture.title)} {_sentence(picture.caption)}" for picture in found]
    (folder / "README.md").write_text("\n".join([f"# Pictures of {sweep.name}", "", *captions, ""]), encoding="utf-8")
    return [picture.name for picture in found]


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?")) else f"{text}."
