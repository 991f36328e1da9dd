"""Recomputes the tables of docs/experiments from the archives, without importing latent_sweep.

    python sweeps/results/recompute.py

Every answer is scored again (exact match, and Rouge-L by rouge-score), and AP, LA, FM, their means, standard
deviations and differences are computed from these scores alone. Only the router's NLL, ECE and novelty AUROC are taken
from the journals, since answers do not determine them. Prints the cells that disagree and exits with 1 if there are
any. Needs numpy and rouge-score.
"""

from __future__ import annotations

import json
import re
import string
import sys
import tarfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rouge_score.rouge_scorer import RougeScorer

ARCHIVES = Path(__file__).resolve().parent
PAGES = ARCHIVES.parents[1] / "docs" / "experiments"

# --- scores of answers -----------------------------------------------------------------------------------------------

ROUGE = RougeScorer(["rougeL"], use_stemmer=True)
PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain(text: str) -> str:
    return " ".join(text.lower().translate(PUNCTUATION).split()) or text


@cache
def score(metric: str, prediction: str, references: tuple[str, ...]) -> float:
    """Score one answer against its references, of which the best counts."""
    answer, *accepted = (unicodedata.normalize("NFC", text).strip() for text in (prediction, *references))
    if not answer:
        return float("" in accepted)
    if metric == "accuracy":
        return float(plain(answer) in map(plain, accepted))
    assert metric == "rouge_l", metric
    return max(ROUGE.score(reference, answer)["rougeL"].fmeasure for reference in accepted)


# --- trials ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """The scores of a trial's answers: one array of rows per stage and task, in percent."""

    values: Mapping[str, Any]
    trained: int
    stages: list[list[np.ndarray]]
    routed: float
    """Share of test examples whose largest weight is that of their own task, after the last task, in percent."""
    journal: Mapping[str, float]
    """What the journal says of the last stage."""
    novelty: float
    """Mean over the stages before the last, in percent."""

    @property
    def matrix(self) -> list[list[float]]:
        return [[float(rows.mean()) for rows in stage] for stage in self.stages]


def jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_trial(folder: Path) -> Trial:
    records = [record for record in jsonl(folder / "journal.jsonl") if record["event"] == "stage"]
    tasks = [record["task"] for record in records]
    last = {task: jsonl(folder / "predictions" / f"{task}.jsonl") for task in tasks}
    scores = {task: np.full(len(rows), np.nan) for task, rows in last.items()}
    stages = []
    for seen, record in enumerate(records, start=1):
        # a file has the answers that differ from those of the stage before
        for row in jsonl(folder / "answers" / f"{seen}.jsonl"):
            task, references = row["task"], tuple(last[row["task"]][row["row"]]["references"])
            scores[task][row["row"]] = 100 * score(record["scored_by"][task], row["prediction"], references)
        stages.append([scores[task].copy() for task in tasks[:seen]])
    right = [
        max(row.get("weights") or {"-1": 0.0}, key=lambda name: row["weights"][name]) == str(position)
        for position, task in enumerate(tasks)
        for row in last[task]
        if row.get("weights")
    ]
    novelty = [r["metrics"]["router_novelty_auroc"] for r in records if "router_novelty_auroc" in r["metrics"]]
    return Trial(
        json.loads((folder / "result.json").read_text())["values"],
        records[0].get("trainable_parameters", 0),
        stages,
        100 * float(np.mean(right)) if right else np.nan,
        records[-1]["metrics"],
        100 * float(np.mean(novelty)) if novelty else np.nan,
    )


@cache
def trials(name: str) -> list[Trial]:
    """Read every trial of a sweep from the archive that holds it."""
    archive = name.removesuffix("-tuning")
    with TemporaryDirectory() as folder, tarfile.open(ARCHIVES / f"{archive}.tar.xz") as file:
        file.extractall(folder)
        return [read_trial(path) for path in sorted(Path(folder, name, "trials").iterdir())]


# --- measures --------------------------------------------------------------------------------------------------------


def performance(matrix: list[list[float]]) -> float:
    """Average performance: the mean of the last stage's scores."""
    return float(np.mean(matrix[-1]))


def learning(matrix: list[list[float]]) -> float:
    """Learning accuracy: the mean of every task's score when it was new."""
    return float(np.mean([stage[-1] for stage in matrix]))


def forgetting(matrix: list[list[float]]) -> float:
    """Mean over all tasks but the last of the best score, the last included, minus the last."""
    if len(matrix) == 1:
        return 0.0
    earlier = range(len(matrix) - 1)
    return float(np.mean([max(stage[task] for stage in matrix[task:]) - matrix[-1][task] for task in earlier]))


MEASURES: Mapping[str, Callable[[list[list[float]]], float]] = {
    "AP": performance,
    "LA": learning,
    "FM": forgetting,
}


def interval(pairs: list[tuple[Trial, Trial]], measure: Callable[[list[list[float]]], float]) -> tuple[float, float]:
    """Return the 95 % interval of a difference: pairs and test examples are drawn 2,000 times with replacement."""
    draw, differences = np.random.default_rng(0), []
    counts = [len(rows) for rows in pairs[0][0].stages[-1]]
    for _ in range(2000):
        chosen = [draw.integers(count, size=count) for count in counts]
        own = [pairs[i] for i in draw.integers(len(pairs), size=len(pairs))]
        values = [
            measure(
                [[float(rows[at].mean()) for rows, at in zip(stage, chosen, strict=False)] for stage in trial.stages]
            )
            for pair in own
            for trial in pair
        ]
        differences.append(np.mean(values[0::2]) - np.mean(values[1::2]))
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


# --- configurations, as the pages name them --------------------------------------------------------------------------

ALONE = {"method.train_active": "current"}
SUMMED = {"method.train_active": "sum", "router.combine": "sum"}

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "latent_lora behind the router": {"method.name": "latent_lora"},
    "latent_lora, trained and answering as a sum": {"method.name": "latent_lora", **SUMMED},
    "inc_lora, oracle": {"method.name": "inc_lora", **ALONE, "router.combine": "oracle"},
    "inc_lora behind the router": {"method.name": "inc_lora", **ALONE, "router.combine": "soft"},
    "ewc (lambda 100)": {"method.name": "ewc", "method.ewc_lambda": 100.0},
    "lwf (alpha 0.5)": {"method.name": "lwf", "method.alpha_kd": 0.5},
    "lfpt5": {"method.name": "lfpt5", "method.prompt_length": 50},
}
"""What differs from the method's name alone, which is the label of most configurations."""

OPTIONS = {"energy": "method.gpm.energy", "design": "method.design", "combine": "router.combine"}
AXES = ("training.learning_rate", "training.epochs", "seed")


def configuration(label: str) -> dict[str, Any]:
    """Return the values that a label such as "inf_lora, `energy: sigma2`" stands for."""
    if label in CONFIGURATIONS:
        return dict(CONFIGURATIONS[label])
    name, *options = label.replace("`", "").split(", ")
    pairs = (option.split(" or ")[0].split(": ") for option in options[:1])
    return {"method.name": name, **{OPTIONS[key]: value for key, value in pairs}}


def chosen(sweep: str, values: Mapping[str, Any], **axes: Any) -> list[Trial]:
    """Return the trials with exactly these values, by seed; `axes` are compared where given."""
    found = [
        trial
        for trial in trials(sweep)
        if {key: value for key, value in trial.values.items() if key not in AXES} == values
        and all(trial.values.get(f"training.{key}") == value for key, value in axes.items())
    ]
    assert found, f"{sweep} has no trial with {values} {axes}"
    return sorted(found, key=lambda trial: trial.values.get("seed", 0))


# --- cells -----------------------------------------------------------------------------------------------------------

Cell = tuple[str, str, str]
"""Where, what the page says, and what the archive says; equal if they agree."""


def rounded(cell: str, number: Any, digits: int = 1) -> str:
    """Return the cell if it is this number rounded, else the number; halves may have been rounded either way."""
    text = cell.strip("*")
    return cell if abs(float(text) - number) < 0.5 * 10**-digits + 1e-9 else f"{number:.{digits}f}"


def mean_and_sd(numbers: list[float], cell: str) -> str:
    """Return a mean and sample standard deviation in a cell's form; some leave out deviations of 0."""
    mean, sign, deviation = cell.partition(" ± ")
    return rounded(mean, np.mean(numbers)) + (sign and sign + rounded(deviation, np.std(numbers, ddof=1)))


def difference(cell: str, pairs: list[tuple[Trial, Trial]], measure: str) -> str:
    """Return the cell itself if its difference agrees, and its interval does within a point of sampling."""
    of = MEASURES[measure]
    mean = float(np.mean([of(a.matrix) - of(b.matrix) for a, b in pairs]))
    text = cell.strip("*")
    if "[" not in text:
        return cell if abs(float(text or 0) - mean) < 0.05 else f"{mean:+.1f}"
    stated = [float(number) for number in re.findall(r"[+-]?\d+\.\d+", text)]
    low, high = interval(pairs, of)
    excludes = stated[1] > 0 or stated[2] < 0
    agrees = abs(stated[0] - mean) < 0.0501 and max(abs(stated[1] - low), abs(stated[2] - high)) < 1.0
    return cell if agrees and excludes == cell.startswith("**") else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def tables(page: str) -> list[list[list[str]]]:
    """Return the tables of a page as rows of cells; the first row has the titles."""
    found: list[list[list[str]]] = [[]]
    for line in (PAGES / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not all(set(cell) <= {"-"} for cell in cells):
                found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def all_methods(page: str, sweep: str) -> Iterator[Cell]:
    (table,) = tables(page)
    baseline = chosen(sweep, configuration("latent_lora behind the router"))
    for row in table[1:]:
        own = chosen(sweep, configuration(row[0]))
        where = f"{page}: {row[0]}"
        yield f"{where}, trained", row[2], f"{own[0].trained:,}"
        yield f"{where}, n", row[3], str(len(own))
        for title, cell in zip(table[0][4:7], row[4:7], strict=True):
            yield f"{where}, {title}", cell, mean_and_sd([MEASURES[title](t.matrix) for t in own], cell)
        if row[7]:
            yield f"{where}, difference", row[7], difference(row[7], list(zip(own, baseline, strict=True)), "AP")


def learning_rates(page: str, sweep: str) -> Iterator[Cell]:
    (table,) = tables(page)
    extra = {"ewc": ("lambda", "method.ewc_lambda"), "lwf": ("alpha", "method.alpha_kd")}
    for row in table[1:]:
        name, _, option = row[0].partition(", ")
        values = configuration(row[0]) if name not in extra else {"method.name": name}
        values.pop("router.combine", None)
        if name in extra:
            values[extra[name][1]] = float(option.split()[-1].replace(",", ""))
        for rate, cell in zip(table[0][1:], row[1:], strict=True):
            if cell:
                own = chosen(sweep, values, learning_rate=float(rate))
                yield (
                    f"{page}: {row[0]} at {rate}",
                    cell.strip("*"),
                    rounded(cell.strip("*"), performance(own[0].matrix)),
                )


def one_rate(page: str, own_rate: str, common_rate: str) -> Iterator[Cell]:
    (table,) = tables(page)
    for row in table[1:]:
        for sweep, cells in ((own_rate, row[2:5]), (common_rate, row[5:8])):
            found = chosen(sweep, configuration(row[0]))
            for measure, cell in zip(("AP", "LA", "FM"), cells, strict=True):
                yield (
                    f"{page}: {row[0]}, {measure} in {sweep}",
                    cell,
                    mean_and_sd([MEASURES[measure](trial.matrix) for trial in found], cell),
                )


def budget(page: str, sweep: str) -> Iterator[Cell]:
    (table,) = tables(page)
    for row in table[1:]:
        for column, cell in enumerate(row[1:]):
            measure, epochs = ("AP", "LA", "FM")[column // 3], (1, 4, 12)[column % 3]
            (own,) = chosen(sweep, configuration(row[0]), epochs=epochs)
            yield f"{page}: {row[0]}, {measure}, {epochs} epochs", cell, rounded(cell, MEASURES[measure](own.matrix))


def penalty(page: str, sweep: str) -> Iterator[Cell]:
    (table,) = tables(page)
    kinds = {"behind the router": {"router.combine": "soft"}, "summed": SUMMED}

    def at(kind: str, weight: float) -> list[Trial]:
        return chosen(sweep, {"method.name": "latent_lora", "method.ortho_lambda": weight, **kinds[kind]})

    for row in table[1:]:
        own, without = at(row[0], float(row[1].split()[0])), at(row[0], 0.0)
        where = f"{page}: {row[0]}, lambda {row[1]}"
        for measure, cell in zip(table[0][2:5], row[2:5], strict=True):
            yield f"{where}, {measure}", cell, mean_and_sd([MEASURES[measure](t.matrix) for t in own], cell)
        for measure, cell in zip(("AP", "LA"), row[5:7], strict=True):
            if cell:
                yield (
                    f"{where}, difference of {measure}",
                    cell,
                    difference(cell, list(zip(own, without, strict=True)), measure),
                )


def router_reach(page: str, sweep: str) -> Iterator[Cell]:
    (table,) = tables(page)
    for row in table[1:]:
        definition, router = row[0], row[1].replace("`", "")
        values: dict[str, Any] = {"benchmark.prompts.definition": definition}
        oracle = chosen(sweep, {**values, "router.combine": "oracle"})
        if router in ("oracle", "ngram"):
            values["router.combine"] = router
        else:
            values |= {
                "router.components": 1,
                "router.epsilon_mode": "absolute" if "absolute" in router else "relative",
                "router.pool.scope": "input_only" if "input_only" in router else "prompt",
            }
        own, where = chosen(sweep, values), f"{page}: {definition}, {router}"
        for measure, cell in zip(("AP", "FM"), row[2:4], strict=True):
            yield f"{where}, {measure}", cell, mean_and_sd([MEASURES[measure](t.matrix) for t in own], cell)
        if row[4]:
            yield f"{where}, difference", row[4], difference(row[4], list(zip(own, oracle, strict=True)), "AP")
        numbers = {
            5: lambda t: t.routed,
            6: lambda t: 100 * t.journal["router_p_correct"],
            8: lambda t: 100 * t.journal["router_ece"],
            9: lambda t: 100 * t.journal["router_one_hot"],
            10: lambda t: t.novelty,
        }
        for column, number in numbers.items():
            if row[column] != "-":
                yield (
                    f"{where}, {table[0][column]}",
                    row[column],
                    rounded(row[column], np.mean([number(t) for t in own])),
                )
        if row[7] != "-":
            yield f"{where}, NLL", row[7], rounded(row[7], np.mean([t.journal["router_nll"] for t in own]), 2)


def cells() -> Iterator[Cell]:
    yield from all_methods("all_methods.md", "fair_superni")
    yield from all_methods("long_sequence.md", "elsewhere_long_sequence")
    yield from learning_rates("learning_rates.md", "fair_superni-tuning")
    yield from one_rate("one_rate.md", "fair_superni", "common_rate_superni")
    yield from budget("budget.md", "budget_superni")
    yield from penalty("penalty.md", "penalty_superni")
    yield from router_reach("router_reach.md", "routing_superni")


def main() -> int:
    checked = list(cells())
    wrong = [(where, stated, found) for where, stated, found in checked if stated != found]
    for where, stated, found in wrong:
        print(f"{where}: the page says {stated!r}, the archive {found!r}")
    print(f"{len(checked)} cells, {len(wrong)} of them disagree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
