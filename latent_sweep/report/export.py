"""The pictures of a sweep as files for a paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from latent_sweep.report.page import all_pictures
from latent_sweep.results.summaries import summarize
from latent_sweep.storage.folders import SweepFolder

_EMBEDDED = {"pdf.fonttype": 42}  # TrueType: publishers reject type 3, matplotlib's default
_DPI = 300
_CAPTIONS, _TITLE = "README.md", "# Pictures of "


def export_pictures(
    sweep: SweepFolder, folder: Path, over: Sequence[str] = (), baseline: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Write every picture as PDF and PNG, and the captions into README.md; return as `all_pictures`.

    `over` and `baseline` are as in `summarize`. Pictures of an earlier call that this one does not draw are removed.
    """
    pictures, not_drawn = all_pictures(sweep, summarize(sweep, over, baseline))
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_EMBEDDED):
        for picture in pictures:
            for kind in ("pdf", "png"):
                picture.figure.savefig(folder / f"{picture.name}.{kind}", dpi=_DPI)
    for name in _listed(folder / _CAPTIONS) - {picture.name for picture in pictures}:
        for kind in ("pdf", "png"):
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    captions = [f"- `{picture.name}`: {_sentence(picture.title)} {_sentence(picture.caption)}" for picture in pictures]
    text = "\n".join([f"{_TITLE}{sweep.name}", "", *captions, ""])
    (folder / _CAPTIONS).write_text(text, encoding="utf-8")
    return [picture.name for picture in pictures], not_drawn


def _listed(captions: Path) -> set[str]:
    text = captions.read_text(encoding="utf-8") if captions.is_file() else ""
    return set(re.findall(r"^- `([\w-]+)`: ", text, re.MULTILINE)) if text.startswith(_TITLE) else set()


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?")) else f"{text}."
