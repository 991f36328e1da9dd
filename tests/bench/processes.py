"""Measurements of whole processes: a sweep from start to end, a warm start, threads, and memory."""

from __future__ import annotations

import json
import os
import resource
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.rows import Reading, Target, ratio, take_turns
from bench.workbench import LAMBDAS, SWEEP_LEARNING_RATE, TASKS, Subject, Workbench, first_trial

from latent_sweep.errors import LatentSweepError
from latent_sweep.security import redact

TESTS = Path(__file__).parents[1]


def sweep(bench: Workbench) -> list[Reading]:
    """Run a small sweep with our command and with the baseline, from the start of the process to its end."""
    sizes, folder = bench.sizes, Path(bench.subject.folder)
    tasks = TASKS["builtin"][: sizes.tasks]
    benchmark = {
        "name": "builtin",
        "tasks": list(tasks),
        "train_per_task": sizes.sweep_batch_size * sizes.learning_steps,
        "test_per_task": sizes.sweep_test_rows,
    }
    search = {
        "method.ortho_lambda": list(LAMBDAS[: sizes.lambdas]),
        "router.components": list(sizes.components),
        "seed": list(sizes.seeds),
    }
    training = {"batch_size": sizes.sweep_batch_size, "learning_rate": SWEEP_LEARNING_RATE}
    content = bench.subject.sweep(benchmark, training, search=search)
    config = bench.baseline_config(first_trial(content), sizes.learning_steps)
    bench.free()
    ours, our_scores = _our_sweep(folder, content)
    config.write(folder / "baseline.json")
    baseline, _ = _run_timed("bench.baseline", str(folder / "baseline.json"), str(folder / "scores.json"))
    baseline_scores = [point["AP"] for point in json.loads((folder / "scores.json").read_text(encoding="utf-8"))]
    points = sizes.lambdas * len(sizes.components) * len(sizes.seeds)
    steps = f"{sizes.learning_steps} steps of {config.batch_size} rows each"
    what = f"{points} trials of {len(tasks)} built-in tasks, {steps}"
    theirs = "a peft LoRA per task with O-LoRA's penalty, a K-means router, a trial for every K"
    return [
        Reading("ours: sweep", ours, "s", note=what),
        Reading("baseline: sweep", baseline, "s", note=f"{what}; {theirs}"),
        Reading("baseline / ours", baseline / ours, "x", None, Target(10, at_most=False)),
        Reading.of("ours: AP", our_scores, "share", note=_range(our_scores)),
        Reading.of("baseline: AP", baseline_scores, "share", note=_range(baseline_scores)),
    ]


def _range(scores: Sequence[float]) -> str:
    return f"of {len(scores)} trials, from {min(scores):.3f} to {max(scores):.3f}"


def _our_sweep(folder: Path, content: Mapping[str, Any]) -> tuple[float, list[float]]:
    """Return the seconds of a sweep run by our command, and each trial's AP."""
    import yaml

    from latent_sweep.storage.folders import open_sweep

    # a storage of its own: nothing that another part has left behind is read
    content = {**content, "run": {**content["run"], "storage": str(folder / "sweep")}}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    seconds, _ = _run_timed("latent_sweep.run", str(path))
    results = [trial.path / "result.json" for trial in open_sweep(folder / "sweep" / content["name"])]
    return seconds, [json.loads(result.read_text(encoding="utf-8"))["metrics"]["AP"] for result in results]


def start(bench: Workbench) -> list[Reading]:
    """Time from the start of a process to the end of its first optimizer step, on one row, with warm caches."""
    bench.free()
    times = [_child(bench.subject, "start", str(time.time())) for _ in range(bench.sizes.few_turns + 1)][1:]
    imports = [child["imported"] for child in times]
    ours = [child["stepped"] - child["imported"] for child in times]
    return [
        Reading.of("start to first step", [child["stepped"] for child in times], "s", Target(15)),
        Reading.of("of which imports of others", imports, "s", note="torch, transformers, datasets, scikit-learn"),
        Reading.of("of which ours", ours, "s", Target(3)),
    ]


def threads(bench: Workbench) -> list[Reading]:
    """Compare two trials with a thread each with one trial with two."""
    bench.free()
    turns, steps = bench.sizes.turns, bench.sizes.steps
    arrangements = {"1 x 2 threads": [2], "2 x 1 thread": [1, 1]}

    def rate(trainees: Sequence[_Trainee]) -> float:
        for trainee in trainees:
            trainee.go()
        return len(trainees) * steps / max(trainee.seconds() for trainee in trainees)

    with ExitStack() as stack:
        running = {
            name: [stack.enter_context(_Trainee(bench.subject, n)) for n in each] for name, each in arrangements.items()
        }
        rates = take_turns({name: partial(rate, trainees) for name, trainees in running.items()}, turns)
    readings = [Reading.of(name, turns, "steps/s") for name, turns in rates.items()]
    better = Target(1.0, at_most=False)
    return [*readings, ratio("2 x 1 thread / 1 x 2 threads", rates["2 x 1 thread"], rates["1 x 2 threads"], better)]


def memory(bench: Workbench) -> list[Reading]:
    """Compare the peak memory of training steps with that of the bare backbone."""
    bench.free()
    peaks = {what: _child(bench.subject, what)["peak_gib"] for what in ("bare", "train")}
    kind = "of the GPU" if bench.subject.device == "cuda" else "resident"
    return [
        Reading("bare backbone: peak memory", peaks["bare"], "GiB", note=kind),
        Reading("latent: peak memory", peaks["train"], "GiB", note=kind),
        Reading("latent / bare backbone", peaks["train"] / peaks["bare"], "x", None, Target(1.10)),
    ]


def environment_of(threads: int | None = None) -> dict[str, str]:
    """Return the environment of a process that starts a Ray cluster of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    return environment | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})


def _run_timed(module: str, *arguments: str) -> tuple[float, str]:
    """Run a module as a program; return its seconds and what it printed."""
    began, command = time.perf_counter(), [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment_of(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise LatentSweepError(f"{module} ended with {done.returncode}:\n{redact(done.stdout + done.stderr)[-4000:]}")
    return time.perf_counter() - began, done.stdout


def _child(subject: Subject, what: str, *arguments: str) -> dict[str, float]:
    """Run a measuring process and return the values that it prints as its last line."""
    _, output = _run_timed("bench.processes", what, json.dumps(asdict(subject)), *arguments)
    return json.loads(output.strip().splitlines()[-1])


class _Trainee:
    """A process that trains for some steps on request."""

    def __init__(self, subject: Subject, threads: int):
        command = [sys.executable, "-m", "bench.processes", "turns", json.dumps(asdict(subject)), str(threads)]
        self._process = subprocess.Popen(
            command, env=environment_of(threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> _Trainee:
        """Wait until it has loaded everything and taken its first step."""
        self.seconds()
        return self

    def __exit__(self, *error: Any) -> None:
        self._process.kill()
        self._process.communicate()

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def seconds(self) -> float:
        """Wait for the end of the turn, and return its seconds."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LatentSweepError(f"a measuring process ended with {self._process.wait()}; its messages stand above")
        return float(line)


def _measure_start(subject: Subject, began: str) -> None:
    import datasets  # noqa: F401
    import sklearn.cluster  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoTokenizer, LlamaForCausalLM, T5ForConditionalGeneration  # noqa: F401

    imported = time.time() - float(began)

    from latent_sweep.storage.folders import SweepFolder
    from latent_sweep.sweep.config import parse_sweep
    from latent_sweep.sweep.packs import pack
    from latent_sweep.sweep.plan import expand
    from latent_sweep.training.events import Step
    from latent_sweep.training.pack import run_pack

    task = TASKS[subject.benchmark][0]
    benchmark = {"name": subject.benchmark, "tasks": [task], "train_per_task": 8, "test_per_task": 1}
    content = subject.sweep(benchmark, {"batch_size": 1})

    def stop(event: Any) -> None:
        if not isinstance(event, Step):
            return
        print(json.dumps({"imported": imported, "stepped": time.time() - float(began)}), flush=True)
        os._exit(0)  # the rest of the trial is of no interest, and this leaves no trace of it in the store

    run_pack(pack(expand(parse_sweep(content, "bench")))[0], SweepFolder(subject.storage, "start"), stop)


def _measure_turns(subject: Subject, threads: str) -> None:
    """Train; after the first step and after every turn, print its seconds and wait for `go`."""
    import torch

    torch.set_num_threads(int(threads))
    bench = Workbench(subject)
    turn, began = bench.sizes.steps, time.perf_counter()

    def on_step(step: int, steps: int, losses: Mapping[str, float]) -> None:
        nonlocal began
        if (step - 1) % turn == 0:
            print(time.perf_counter() - began, flush=True)
            if step < steps:
                sys.stdin.readline()
            began = time.perf_counter()

    bench.train([bench.training(bench.one_batch(), 1 + turn * bench.sizes.turns, on_step)])


def _measure_peak(take_steps: Callable[[Workbench], Any], subject: Subject) -> None:
    take_steps(Workbench(subject))
    print(json.dumps({"peak_gib": peak_bytes(subject) / 2**30}))


def _bare_steps(bench: Workbench) -> None:
    from bench.steps import bare_step_seconds

    bare_step_seconds(bench)


def peak_bytes(subject: Subject) -> int:
    """Return the peak memory of this process, of the GPU or resident."""
    import torch

    if subject.device == "cuda":
        return torch.cuda.max_memory_allocated()
    if Path("/proc/self/status").is_file():
        return memory_status("VmHWM")  # Linux's `ru_maxrss` starts with what the parent held
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, in bytes


def memory_status(entry: str) -> int:
    """Return an entry of Linux's memory status of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(lines[entry].split()[0]) * 1024


CHILDREN: Mapping[str, Callable[..., None]] = {
    "start": _measure_start,
    "turns": _measure_turns,
    "bare": partial(_measure_peak, _bare_steps),
    "train": partial(_measure_peak, Workbench.step_seconds),
}


if __name__ == "__main__":
    CHILDREN[sys.argv[1]](Subject(**json.loads(sys.argv[2])), *sys.argv[3:])
