"""The content of a sweep file as nested mappings, and the changes that `--set path=value` makes to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from latent_sweep.settings.faults import shown
from latent_sweep.settings.strict_yaml import parse_yaml, yaml_text


def plain_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain_values(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain_values(inner) for inner in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def override(path: str, value: Any) -> str:
    return f"{path}={yaml_text(plain_values(value), one_line=True)}"


def mapping_of(content: Mapping[str, Any], key: str) -> tuple[dict[str, Any], list[str]]:
    value = content.get(key)
    if value is None:
        return {}, []
    if not isinstance(value, dict):
        return {}, [f"{key}: found {shown(value)}; expected a mapping, {EXAMPLES[key]}"]
    return value, []


def copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copied(value) if isinstance(value, dict) else value for key, value in tree.items()}


def put(tree: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    for key in path[:-1]:
        if tree.get(key) is None:
            tree[key] = {}
        tree = tree[key]
        if not isinstance(tree, dict):
            return False
    tree[path[-1]] = value
    return True


def apply_override(content: dict[str, Any], override: str) -> list[str]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return [f"--set {override}: expected path=value, e.g. --set trial.training.epochs=1"]
    value = parse_yaml(text, f"--set {override}")
    if value is None and text.strip().lower() not in ("null", "~"):  # such as an empty shell variable
        end = f"write {path.strip()}=null to remove an axis" if keys[0] == "search" else "leave it out for the file's"
        return [f"--set {override}: found nothing after '='; write a value, or {end}"]
    keys = _joined(keys)
    if keys[0] == "search" and len(keys) == 2 and value is None:
        axes = content.get("search")
        if not isinstance(axes, dict) or keys[1] not in axes:
            return [f"--set {override}: search has no axis {keys[1]!r} to remove"]
        del axes[keys[1]]
        return []
    if not put(content, keys, value):
        return [f"--set {override}: {'.'.join(keys[:-1])} is a plain value, not a group"]
    return []


def _joined(keys: list[str]) -> list[str]:
    for block in (["search"], ["tune", "search"], ["tune", "by_method"]):
        start = len(block) + (block[-1] == "by_method")
        if keys[: len(block)] == block and len(keys) > start:
            return [*keys[:start], ".".join(keys[start:])]
    return keys


EXAMPLES: Mapping[str, str] = {
    "trial": "e.g. {method: {name: latent_lora}, benchmark: {name: builtin}}",
    "search": "e.g. {seed: [0, 1]}",
    "run": "e.g. {storage: runs}",
}
