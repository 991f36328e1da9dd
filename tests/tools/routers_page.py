"""Write the tables of docs/experiments/routers.md from the archive of `tools.routers`.

    PYTHONPATH=tests python -m tools.routers_page [ARCHIVE]

Needs no data: the default archive is sweeps/results/routers.json. Tables stand between `<!-- NAME -->` and
`<!-- end -->`, with the names of `tables`. Accuracy in percent, NLL in nats; means over tasks, with 95 % bootstrap
intervals over tasks.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "experiments" / "routers.md"
ARCHIVE = ROOT / "sweeps" / "results" / "routers.json"

TITLES = {"superni": "SuperNI", "long_sequence": "Long Sequence"}
DEFAULT = "embeddings", "gaussian, K = 5 (default)"
SHOWN = ("embeddings", "8", "30")
"""Features with a table of all heads."""
COMPARED: Mapping[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "layer 8 - embeddings": (("8", DEFAULT[1]), DEFAULT),
    "layer 30 - embeddings": (("30", DEFAULT[1]), DEFAULT),
    "Ledoit-Wolf - default": (("embeddings", "gaussian, K = 1, Ledoit-Wolf"), DEFAULT),
    "ncm - default": (("embeddings", "ncm"), DEFAULT),
    "ridge - default": (("embeddings", "ridge"), DEFAULT),
    "ncm - default, on layer 30": (("30", "ncm"), ("30", DEFAULT[1])),
    "ridge - default, on layer 30": (("30", "ridge"), ("30", DEFAULT[1])),
}
"""Features and head, and those that they are compared with."""

Results = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]]]
"""Accuracy and NLL of every task by benchmark, prompts, features, head and measure."""
Values = npt.NDArray[np.float64]


def values(results: Results, name: str, prompts: str, router: tuple[str, str], measure: str = "accuracy") -> Values:
    """Return a measure of each task; accuracy in percent."""
    features, head = router
    return (100 if measure == "accuracy" else 1) * np.array(results[name][prompts][features][head][measure]) + 0.0


def interval(values: Values, draws: int = 10_000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a mean over tasks."""
    source = np.random.default_rng(0)
    means = values[source.integers(len(values), size=(draws, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def with_interval(differences: Values, decimals: int = 1) -> str:
    mean, low, high = (f"{number:+.{decimals}f}" for number in (differences.mean(), *interval(differences)))
    return f"{mean} [{low}, {high}]"


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(cells)} |" for cells in rows)]


def named(name: str) -> str:
    return TITLES.get(name, name)


# --- tables ----------------------------------------------------------------------------------------------------------


def by_head(results: Results, name: str, features: str) -> list[str]:
    """Return a table of all heads on one feature: accuracy, and NLL in parentheses."""
    prompts = list(results[name])

    def cells(head: str) -> Iterator[str]:
        for column in prompts:
            measures = (values(results, name, column, (features, head), m).mean() for m in ("accuracy", "nll"))
            yield "{:.1f} ({:.2f})".format(*measures)

    return table(["head", *prompts], ([head, *cells(head)] for head in results[name][prompts[0]][features]))


def by_features(results: Results) -> list[str]:
    """Return a table of all features behind the default head."""
    columns = [(name, prompts) for name in results for prompts in results[name]]
    features = results[columns[0][0]][columns[0][1]]
    rows = ([each, *(f"{values(results, *c, (each, DEFAULT[1])).mean():.1f}" for c in columns)] for each in features)
    return table(["features", *(f"{named(name)}, {prompts}" for name, prompts in columns)], rows)


def chosen(results: Results, name: str, columns: Sequence[str], tasks: slice) -> tuple[str, str]:
    """Return the features and the head with the best mean accuracy over these columns and tasks of a benchmark."""

    def mean(router: tuple[str, str]) -> float:
        return float(np.mean([values(results, name, column, router)[tasks] for column in columns]))

    by_features = results[name][columns[0]]
    return max(((features, head) for features, heads in by_features.items() for head in heads), key=mean)


def verdict(results: Results, name: str) -> list[str]:
    """Return accuracies and differences from the default on tasks that the choice was not made on, with intervals.

    Features and head are chosen on every second task and judged on the others, and the other way round.
    """

    def rows() -> Iterator[Sequence[str]]:
        names = list(results[name])
        purposes = {column: [column] for column in names} | {"the first three": names[:3]}
        halves = slice(0, None, 2), slice(1, None, 2)
        for purpose, columns in purposes.items():
            choices = [chosen(results, name, columns, half) for half in halves[::-1]]
            for prompts in columns if purpose in names else names:
                base = values(results, name, prompts, DEFAULT)
                own = base.copy()
                for half, choice in zip(halves, choices, strict=True):
                    own[half] = values(results, name, prompts, choice)[half]
                made = "; ".join(", ".join(choice) for choice in choices)
                yield [purpose, made, prompts, f"{own.mean():.1f}", with_interval(own - base)]

    head = ["chosen for", "features, head for odd; even tasks", "judged on", "accuracy", "minus the default's"]
    return table(head, rows())


def differences(results: Results, measure: str) -> list[str]:
    """Return a table of what `COMPARED` differ by."""
    prompts = list(next(iter(results.values())))

    def rows() -> Iterator[Sequence[str]]:
        for name, (label, routers) in itertools.product(results, COMPARED.items()):
            cells = []
            for column in prompts:
                own, other = (values(results, name, column, router, measure) for router in routers)
                cells.append(with_interval(own - other, 1 if measure == "accuracy" else 2))
            yield [named(name), label, *cells]

    return table(["benchmark", "difference", *prompts], rows())


def abstained(shares: Mapping[str, Any], name: str) -> list[str]:
    """Return a table of the shares of test examples for which the router abstains, in percent."""
    routers = [(features, head, by) for features, heads in shares[name].items() for head, by in heads.items()]
    columns = list(routers[0][2])
    rows = ([*router, *(f"{100 * np.mean(by[c]):.1f}" for c in columns)] for *router, by in routers)
    return table(["features", "head", *columns], rows)


def tables(archive: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the lines of every table, by name."""
    results = archive["routed"]
    made = {"all features": by_features(results)}
    made |= {f"differences in {measure}": differences(results, measure) for measure in ("accuracy", "nll")}
    for name in results:
        made |= {f"{name}, {features}": by_head(results, name, features) for features in SHOWN}
        made[f"{name}, chosen"] = verdict(results, name)
        made[f"{name}, abstention"] = abstained(archive["abstained"], name)
    return made


# --- page ------------------------------------------------------------------------------------------------------------


def with_tables(text: str, archive: Mapping[str, Any]) -> str:
    """Return the page with the tables of an archive. Raises KeyError if the archive has no table of a name."""
    made = tables(archive)

    def written(match: re.Match[str]) -> str:
        lines = "\n".join(made[match[1]])
        return f"<!-- {match[1]} -->\n\n{lines}\n\n<!-- end -->"

    return re.sub(r"<!-- (?!end)([^>]+) -->\n.*?<!-- end -->", written, text, flags=re.S)


def main() -> None:
    archive = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else ARCHIVE).read_text(encoding="utf-8"))
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), archive), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
