"""Write a commented first sweep file for a backbone and a question, and a first benchmark next to it."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import latent_sweep
from latent_sweep.backbones.registry import PACKAGES, REGISTRY, TINY_VOCABULARY, BackboneSettings, describe
from latent_sweep.data import builtin
from latent_sweep.data.schema import BENCHMARK_FILE, BenchmarkSpec, load_benchmark
from latent_sweep.errors import ConfigError
from latent_sweep.methods import DEFAULT, METHODS, method_class
from latent_sweep.settings.strict_yaml import parse_yaml, yaml_text
from latent_sweep.sweep.config import parse_sweep, trial_settings
from latent_sweep.sweep.defaults import resolve
from latent_sweep.sweep.planning import plan_sweep
from latent_sweep.sweep.schema import TrainingSettings

LARGE_LAMBDAS, SMALL_LAMBDAS = "[0.0, 0.005, 0.01, 0.02, 0.05, 0.1]", "[0.0, 1.0e-6, 1.0e-5, 1.0e-4]"
"""Weights of the penalty around the paper's, and for a backbone of 135M parameters."""

RANKS = (4, 8, 16, 32)

OWN_TASKS = ("mood", "arrival")
"""Tasks of a first benchmark: a classification and an extraction, to be replaced."""
OWN_ROWS: Mapping[str, int] = {"train": 64, "test": 20}


@dataclass(frozen=True)
class Purpose:
    """A question that a sweep answers."""

    question: str
    search: str
    tuned: bool = False


_REFERENCES = """\
  trial:
    # references: the untouched backbone, all tasks learned together, one adapter per task with the task known
    - {method: {name: zero_shot}}
    - {method: {name: joint_lora}}
    - {method: {name: inc_lora, train_active: current}, router: {combine: oracle}}
    # the methods of the paper's tables
"""

PURPOSES: Mapping[str, Purpose] = {
    "quickstart": Purpose(
        "Does it run here? The router against plain summing, for two weights of the penalty and two seeds.",
        """\
  method.ortho_lambda: [0.0, 1.0e-5]
  seed: [0, 1]
  router.combine: [soft, sum]                            # inference only: costs no training
""",
    ),
    "lambda": Purpose(
        "How strongly should adapters be kept apart?",
        """\
  method.ortho_lambda: {lambdas}
  seed: [0, 1, 2]
  router.components: [1, 3, 5, 8]                     # inference only: costs no training
""",
    ),
    "rank": Purpose(
        "How small can an adapter be?",
        """\
  method.rank: {ranks}
  seed: [0, 1, 2]
""",
    ),
    "router": Purpose(
        "How much router does it take? All of it reads the same snapshots: one training per seed.",
        """\
  seed: [0, 1, 2]
  router.components: [1, 3, 5, 8]
  router.combine: [soft, hard, sum, oracle]              # oracle knows the task: what a router could reach
""",
    ),
    "seeds": Purpose(
        "How much is luck?",
        """\
  seed: [0, 1, 2, 3, 4]
""",
    ),
    "methods": Purpose(
        "Which method learns most and forgets least, each with the learning rate that suits it?",
        _REFERENCES
        + "".join(f"    - {{method: {{name: {name}}}}}\n" for name in METHODS if f"{{name: {name}}}" not in _REFERENCES)
        + "  seed: [0, 1, 2]\n",
        tuned=True,
    ),
}


def is_small(backbone: str) -> bool:
    """Return whether a backbone is meant for CPUs: the packaged ones, and those of a few thousand parameters."""
    described = REGISTRY.get(backbone)
    return backbone in PACKAGES or (described is not None and described.config.get("vocab_size") == TINY_VOCABULARY)


def has_random_weights(backbone: str) -> bool:
    return is_small(backbone) and backbone not in PACKAGES


NOTHING_TO_EXPECT = "random weights: scores stay at or near 0; it only shows that a sweep runs"


def sweep_text(path: str, backbone: str, benchmark: str, purpose: str) -> str:
    """Write a sweep file for one of `PURPOSES`; ConfigError for a bad name, or an unknown backbone or benchmark."""
    name, why, spec = Path(path).stem, PURPOSES[purpose], load_benchmark(benchmark)
    room = _room(backbone)
    ranks = [rank for rank in RANKS if rank <= room] or [room]
    small = is_small(backbone)
    search = why.search.replace("{lambdas}", SMALL_LAMBDAS if small else LARGE_LAMBDAS).replace("{ranks}", str(ranks))
    method = f"  method: {{name: {DEFAULT}}}"
    if why.tuned:
        search = _fitting(search, room, ranks[-1])
    elif max(RANKS) > room:
        method = _fitting(method, room, ranks[-1]).ljust(54) + f"# left out: rank {max(RANKS)}, too large here"
    lines = [
        f"# {why.question}",
        "#",
        f"#   latent-sweep plan {path}       what it would run, and how long that takes; runs nothing",
        f"#   latent-sweep run {path}        the same command again resumes it",
        f"#   latent-sweep report runs/{name}",
        "#",
        "# `latent-sweep settings` lists every setting; what is left out here is the paper's protocol.",
        f"name: {name}",
        "trial:                                                # one trial; search, below, says what varies",
        method,
        *([f"  # {backbone} has {NOTHING_TO_EXPECT}"] if has_random_weights(backbone) else []),
        f"  backbone: {{name: {_scalar(backbone)}{', dtype: float32' if small else ', dtype: bfloat16'}}}",
        *_benchmark_lines(spec, benchmark, small),
        _training_line(backbone, benchmark, small),
        "search:                                               # a list is a grid axis",
        search.rstrip("\n"),
        *(_tuning_lines(backbone, benchmark, spec) if why.tuned else ()),
        "run:                                                  # how to run it; changes no result",
        f"  resources: {'{cpus: 1}' if small else '{gpus: 1, cpus: 4}'}",
        "  storage: runs                                       # a folder that all nodes see, or s3://bucket/prefix",
        "  tracking: {uri: sqlite:///mlflow.db}                # or an MLflow server",
    ]
    text = "\n".join(lines) + "\n"
    plan_sweep(parse_sweep(parse_yaml(text, path), path), check=False)  # raises if the result cannot run
    return text


def _room(backbone: str) -> int:
    """Return the largest possible rank on a backbone; 2**16, which is no limit, if its shapes are unknown."""
    settings = BackboneSettings(name=backbone)
    described = describe(settings)
    return 1 << 16 if described is None else min(map(min, described.adapted(settings).values()))


def _fitting(text: str, room: int, rank: int) -> str:
    """Write `rank` behind the methods whose own rank is larger than `room`."""

    def written(match: re.Match[str]) -> str:
        has_rank = "rank" in method_class(match[1]).settings_class.model_fields
        return f"{match[0]}, rank: {rank}" if has_rank and max(RANKS) > room else match[0]

    return re.sub(r"method: \{name: (\w+)", written, text)


def _scalar(text: str) -> str:
    return yaml_text([text], one_line=True).strip()[1:-1]


def _order(key: str) -> str:
    return key if re.fullmatch("0|[1-9][0-9]*", key) else _scalar(key)


def _benchmark_lines(spec: BenchmarkSpec, benchmark: str, small: bool) -> list[str]:
    orders = ", ".join(f"{key} ({sequence[0]} first)" for key, sequence in spec.orders.items())
    first = next(iter(spec.orders.values()))
    lines = ["  benchmark:", f"    name: {_scalar(benchmark)}"]
    if spec.layout == "cl_benchmark":
        lines[-1] = lines[-1].ljust(54) + "# data: LATENT_SWEEP_DATA, or data_dir here"
    lines.append(f"    order: {_order(next(iter(spec.orders)))}".ljust(54) + f"# there are: {orders}")
    cut = small and len(first) > 4
    some = yaml_text(first[: 4 if cut else 2], one_line=True)
    if cut:
        lines.append(f"    tasks: {some}".ljust(54) + f"# of {len(first)}; left out: all")
    else:
        lines.append(f"    # tasks: {some}".ljust(54) + f"# some of its {len(first)}")
    if small:
        lines += ["    train_per_task: 64", "    test_per_task: 20"]
    return lines


def _training_line(backbone: str, benchmark: str, small: bool) -> str:
    training = _training(DEFAULT, backbone, benchmark)
    comment = f"left out: learning_rate {training.learning_rate:g}, batch_size {training.batch_size}"
    line = "  training: {epochs: 2}" if small else f"  # training: {{epochs: {training.epochs}}}"
    return line.ljust(54) + f"# {comment}" + ("" if small else f", epochs {training.epochs}")


def _training(method: str, backbone: str, benchmark: str) -> TrainingSettings:
    named = {"method": method, "backbone": backbone, "benchmark": benchmark}
    content = {"name": "any", "trial": {group: {"name": name} for group, name in named.items()}}
    return resolve(trial_settings(parse_sweep(content, "sweep.yaml"), {})).training


def _tuning_lines(backbone: str, benchmark: str, spec: BenchmarkSpec) -> list[str]:
    tasks = min(2, min(map(len, spec.orders.values())) - 1)  # fewer than the trials are judged on
    if not tasks:
        raise ConfigError(
            f"init methods: rates are tuned on the first tasks, but {spec.name} has an order of one task; "
            "add a task, or use another template"
        )
    rate = statistics.mode(_training(method, backbone, benchmark).learning_rate for method in METHODS)
    rates = [f"{rate * factor:.1e}" for factor in (1 / 3, 1, 3, 10, 30)]
    own_rates = {name: own for name in METHODS if (own := method_class(name).rates_to_try)}
    return [
        "tune:                                                 # selected before the trials run, on examples held out",
        "  on: first_tasks                                     # of the first tasks; test examples are never read",
        f"  tasks: {tasks}",
        f"  search: {{training.learning_rate: [{', '.join(rates[:4])}]}}",
        "  by_method:",
        "    # soft prompts need far higher rates than adapters",
        *(f"    {name}: {{training.learning_rate: [{_listed(own)}]}}" for name, own in own_rates.items()),
        f"    {DEFAULT}: {{training.learning_rate: [{', '.join(rates)}]}}",
    ]


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def benchmark_files() -> dict[str, str]:
    spec = load_benchmark("builtin")
    files = {BENCHMARK_FILE: _BENCHMARK}
    for task in (task for task in spec.tasks if task.name in OWN_TASKS):
        for split, count in OWN_ROWS.items():
            rows = builtin.generate(task.name, "train" if split == "train" else "test")[:count]
            lines = (json.dumps({"input": text, "output": answer}) for text, answer in rows)
            files[f"{task.name}/{split}.jsonl"] = "".join(f"{line}\n" for line in lines)
    return files


_BENCHMARK = """\
# A benchmark defines tasks, prompts and orders here; examples are in <task>/train.jsonl and test.jsonl, one object with
# `input` and `output` per line. Replace these two small tasks by your own.
stop: ["\\n"]               # strings at which an answer ends; no target may hold one
max_target_length: 12      # longest target and longest answer, in tokens
tasks:
  - name: mood             # examples in mood/
    metric: accuracy       # exact match after normalization; rouge_l for longer answers
    labels: [plus, minus]  # all answers of a classification task; others are a fault
    instruction: "Mark this guest review."                # precedes every input
  - name: arrival
    metric: rouge_l
    instruction: "Write the timetable entry for the end of the trip."
orders:                    # left out: one order, the tasks as listed
  "1": [mood, arrival]
  "2": [arrival, mood]
"""


def packaged_sweeps() -> dict[str, Path]:
    """Return the package's sweep files by name: the installed ones, or those of the repository in a checkout."""
    package = Path(latent_sweep.__file__).parent
    folder = package / "sweep_files"
    return {
        path.stem: path for path in sorted((folder if folder.is_dir() else package.parent / "sweeps").glob("*.yaml"))
    }


def first_comment(path: Path) -> str:
    line = path.read_text(encoding="utf-8").partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""
