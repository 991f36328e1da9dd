"""The parts of the documents that the code itself writes: every setting, and what the presets of methods fill in.

    PYTHONPATH=tests python -m tools.reference

Writes each part between two marks of its document, where it has changed, and says so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from latent_sweep.errors import ConfigError
from latent_sweep.methods import METHODS, method_class
from latent_sweep.settings import Settings, as_written, yaml_text
from latent_sweep.sweep.schema import describe_settings

ROOT = Path(__file__).parents[2]
FAMILIES = {"T5": "t5-large", "Llama": "llama-2-7b"}
"""What a document calls a family, and a backbone of it."""
BENCHMARKS = {"SuperNI": "superni", "Long Sequence": "long_sequence"}


def describe_presets() -> str:
    """What presets of released code fill in, as Markdown, a row for each difference by method, family or benchmark."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in METHODS:
        field = method_class(name).settings_class.model_fields.get("preset")
        for preset in get_args(field.annotation)[1:] if field else ():
            filled_in = _filled_in(name, preset).items()
            cells = [f"`{preset}` | {where} | {method} | {training} |" for (method, training), where in filled_in]
            alike.setdefault(tuple(cells), []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {cells}" for filled, names in alike.items() for cells in filled]
    return "\n".join(["| method | preset | on | `trial.method` | `trial.training` |", "|---|---|---|---|---|", *rows])


def _filled_in(name: str, preset: str) -> Mapping[tuple[str, str], str]:
    """What is filled in, and for which families and benchmarks: none is named where it is the same for all."""
    kind = method_class(name)
    written = as_written(kind.settings_class).model_validate({"name": name, "preset": preset})
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for family, backbone in FAMILIES.items():
        for title, benchmark in BENCHMARKS.items():
            try:
                after = _leaves(kind.resolve(written, backbone, benchmark))
            except ConfigError:  # nothing was released for this family
                continue
            before = _leaves(written)
            method = {path: value for path, value in after.items() if value != before[path]}
            training = kind.training_defaults(written, backbone, benchmark)
            found.setdefault((_listed(method), _listed(training)), []).append((family, title))
    return {filled: _where(places) for filled, places in found.items()}


def _where(places: list[tuple[str, str]]) -> str:
    families, benchmarks = {family for family, _ in places}, {title for _, title in places}
    assert len(places) == len(families) * len(benchmarks), "the table cannot say this"
    named = [*(families if len(families) == 1 else ()), *(benchmarks if len(benchmarks) == 1 else ())]
    return ", ".join(named) or "all"


def _leaves(group: Settings, path: str = "") -> dict[str, Any]:
    """The values of a group of settings, by dotted path."""
    values: dict[str, Any] = {}
    for name in type(group).model_fields:
        value = getattr(group, name)
        values |= _leaves(value, f"{path}{name}.") if isinstance(value, Settings) else {f"{path}{name}": value}
    return values


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} {yaml_text(value, one_line=True)}" for path, value in values.items())


PARTS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "settings": ("sweeps/README.md", describe_settings),
    "presets": ("latent_sweep/methods/README.md", describe_presets),
}
"""Each part by its name: the document, and what writes it."""


def written_into(text: str, name: str) -> str:
    """The text of a document with the part `name` as the code writes it now.

    Raises:
        ValueError: the two marks are not there exactly once.
    """
    begin, end = f"<!-- {name}: written by `make reference` -->\n\n", f"\n\n<!-- end of {name} -->"
    found = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"found {len(found)} times the lines {begin.strip()!r} and {end.strip()!r}; expected once")
    return text.replace(found[0], f"{begin}{PARTS[name][1]()}{end}")


def main() -> int:
    """Write every part that has changed."""
    for name, (document, _) in PARTS.items():
        path = ROOT / document
        text = path.read_text(encoding="utf-8")
        current = written_into(text, name)
        if current != text:
            path.write_text(current, encoding="utf-8")
        print(f"{document}: {name} {'as before' if current == text else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
