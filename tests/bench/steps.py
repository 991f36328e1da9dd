"""One optimizer step: against the bare backbone and the baseline, in packs, and late in a task sequence."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench.rows import Reading, Target, ratio, take_turns
from bench.workbench import Workbench

from latent_sweep.backbones.batches import collate, label_logits
from latent_sweep.backbones.outputs import Example, Outputs


def step(bench: Workbench) -> list[Reading]:
    """One optimizer step on the same batch: the bare backbone, our adapters, and peft in the Trainer."""
    contenders = {
        "bare backbone": partial(bare_step_seconds, bench),
        "latent": bench.step_seconds,
        "lora": partial(bench.step_seconds, method="seq_lora"),
        "peft + Trainer": BaselineStep(bench).seconds,
    }
    seconds = take_turns(contenders, bench.sizes.turns)
    limit = Target(1.05 if bench.subject.dtype == "float32" else 1.08)
    rows = [Reading.of(f"{name}: step", [1000 * s for s in turns], "ms") for name, turns in seconds.items()]
    for name in ("latent", "lora"):
        rows.append(ratio(f"{name} / bare backbone", seconds[name], seconds["bare backbone"], limit))
        rows.append(ratio(f"{name} / peft + Trainer", seconds[name], seconds["peft + Trainer"], Target(0.75)))
    batch = bench.one_batch()
    rows += _operations(bench)
    tokens = sum(len(row["prompt_ids"]) + len(row["target_ids"]) for row in batch)
    note = f"{len(batch)} rows, {tokens} tokens a step"
    rows.append(Reading.of("latent: tokens trained", [tokens / s for s in seconds["latent"]], "tokens/s", note=note))
    run = collate([batch], bench.backbone, uniform=True).inputs["input_ids"].numel()  # what rows share is run once
    return rows + _utilization(bench, run, seconds["latent"])


def tasks(bench: Workbench) -> list[Reading]:
    """One optimizer step on a batch of every task: ours, the bare backbone on the same padded rows, and peft's."""
    baseline, readings, shares = BaselineStep(bench), [], []
    ratios: dict[str, list[float]] = {"bare backbone": [], "peft + Trainer": []}
    for name, rows in bench.batches_of_tasks().items():
        run, padded = _tokens(bench, rows)
        shares.append(run / padded)
        note = f"{run} tokens instead of {padded}"
        contenders = {"bare backbone": partial(bare_step_seconds, bench), "latent": bench.step_seconds}
        contenders |= {"peft + Trainer": baseline.seconds}
        timed = {name: partial(measure, rows) for name, measure in contenders.items()}
        seconds = take_turns(timed, bench.sizes.few_turns)
        for other, of_tasks in ratios.items():
            of_turns = [a / b for a, b in zip(seconds["latent"], seconds[other], strict=True)]
            of_tasks.append(statistics.median(of_turns))
            readings.append(Reading.of(f"{name}: latent / {other}", of_turns, "x", note=note))
    limits = {"bare backbone": Target(0.5), "peft + Trainer": Target(0.35)}
    limits = {} if bench.backbone.traits.encoder_decoder else limits
    means = {other: statistics.fmean(of_tasks) for other, of_tasks in ratios.items()}
    return [
        *readings,
        Reading("mean: tokens run / padded tokens", statistics.fmean(shares), "share", note="equal work per token"),
        *(Reading(f"mean: latent / {other}", mean, "x", None, limits.get(other)) for other, mean in means.items()),
    ]


def _tokens(bench: Workbench, rows: Sequence[Example]) -> tuple[int, int]:
    """Return the tokens that a step runs, and those of the padded rows."""
    ours, padded = (collate([rows], bench.backbone, alike).inputs["input_ids"].numel() for alike in (True, False))
    return ours, padded


def bare_step_seconds(bench: Workbench, rows: Sequence[Example] | None = None) -> float:
    """Time a lower bound: the backbone alone, forward and back to its input embeddings, logits at labels only."""
    rows, clock = rows or bench.one_batch(), bench.clock()
    embedding = bench.backbone.model.get_input_embeddings()
    denominator = sum(len(row["target_ids"]) for row in rows)
    for _ in range(bench.sizes.steps + 1):
        batch = collate([rows], bench.backbone)
        inputs = {name: value for name, value in batch.inputs.items() if name != "input_ids"}
        inputs["inputs_embeds"] = embedding(batch.inputs["input_ids"]).detach().requires_grad_()
        logits = label_logits(bench.backbone, replace(batch, inputs=inputs))
        Outputs(rows, logits, batch.labels, denominator).task_loss().backward()
        clock.tick()
    return clock.seconds_per_step


def _operations(bench: Workbench) -> list[Reading]:
    """Count the operators of a step that compute; on a GPU each is one or more launches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        count = 0

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            result = function(*arguments, **(keywords or {}))
            views = function.is_view or function._schema.name in ("aten::detach", "aten::alias")
            self.count += not views
            return result

    def counted(call: Callable[[], Any]) -> int:
        with Operators() as operators:
            call()
        return operators.count // (bench.sizes.steps + 1)

    return [
        Reading("bare backbone: operators a step", counted(partial(bare_step_seconds, bench)), "count"),
        Reading("latent: operators a step", counted(bench.step_seconds), "count"),
    ]


class BaselineStep:
    """peft's LoRA in the transformers Trainer, on the same batch."""

    def __init__(self, bench: Workbench):
        from bench import baseline
        from peft import get_peft_model

        baseline.quiet()
        self.bench = bench
        self.config = bench.baseline_config(bench.trial, bench.sizes.steps + 1)
        model, self.tokenizer = baseline.load(self.config)
        self.model = get_peft_model(model, baseline.lora_config(self.config))

    def seconds(self, rows: Sequence[Example] | None = None) -> float:
        from bench.baseline import trainer_arguments
        from transformers import Trainer, TrainerCallback

        clock = self.bench.clock()

        class Ticks(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.tick()

        arguments = trainer_arguments(
            self.config, self.model, self.tokenizer, rows or self.bench.one_batch(), 0, self.bench.subject.folder
        )
        Trainer(**arguments, callbacks=[Ticks()]).train()
        return clock.seconds_per_step


def _utilization(bench: Workbench, tokens: int, seconds: Sequence[float]) -> list[Reading]:
    """Compare achieved arithmetic on a GPU with a large matrix product: 4 N per token, as no weight gets a gradient.

    N counts the layers' weights. An encoder-decoder's halves read different tokens, so it has no such row.
    """
    model = bench.backbone.model
    if bench.subject.device != "cuda" or bench.backbone.traits.encoder_decoder:
        return []
    apart = {id(p) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()}
    weights = sum(p.numel() for p in model.parameters() if id(p) not in apart)
    achieved = [4 * weights * tokens / s / 1e12 for s in seconds]
    peak = _matrix_product_rate(bench) / 1e12
    return [
        Reading("matrix product", peak, "TFLOP/s", note="8192 x 8192, the same type"),
        Reading.of("latent: achieved", achieved, "TFLOP/s"),
        Reading.of("latent: utilization", [rate / peak for rate in achieved], "share"),
    ]


def _matrix_product_rate(bench: Workbench, size: int = 8192, products: int = 20) -> float:
    a = torch.randn(size, size, device="cuda", dtype=bench.backbone.model.dtype)
    clock = bench.clock()
    for _ in range(products):
        a @ a
        clock.tick()
    return 2 * size**3 / clock.seconds_per_step


def packs(bench: Workbench) -> list[Reading]:
    """Train runs side by side, each on its own batches: run-steps per second, as far as memory allows."""
    rows = bench.train_rows()

    def rate(size: int) -> float:
        clock, steps = bench.clock(), 2  # the second is timed; a clock ticks once per run
        trainings = [bench.training(rows, steps, seed=i) for i in range(size - 1)]
        bench.train([*trainings, bench.training(rows, steps, clock.tick, seed=size - 1)])
        return size / clock.seconds_per_step

    sizes: Sequence[int] = bench.sizes.pack_sizes
    if bench.subject.device == "cuda":
        sizes = fitting(sizes, rate)
    rates = take_turns({str(n): partial(rate, n) for n in sizes}, bench.sizes.few_turns)
    readings = [Reading.of(f"pack of {n}", turns, "run-steps/s") for n, turns in rates.items()]
    return readings + [ratio(f"pack of {n} / pack of 1", rates[n], rates["1"]) for n in list(rates)[1:]]


def fitting(sizes: Sequence[int], measure: Callable[[int], float]) -> Sequence[int]:
    """Return the rising sizes that fit the GPU's memory. Raises OutOfMemoryError if not even the first does."""
    for count, size in enumerate(sizes):
        try:
            measure(size)
        except torch.cuda.OutOfMemoryError:
            if not count:
                raise
            torch.cuda.empty_cache()
            return sizes[:count]
    return sizes


def history(bench: Workbench) -> list[Reading]:
    """One optimizer step with the penalty against fifteen earlier tasks, and against one."""
    earlier = [{"R": torch.randn(len(bench.backbone.targets), *[bench.subject.rank] * 2) * 1e-3} for _ in range(15)]
    contenders = {str(n): partial(bench.step_seconds, history=earlier[:n]) for n in (1, 15)}
    seconds = take_turns(contenders, bench.sizes.turns)
    rows = [Reading.of(f"{n} earlier tasks: step", [1000 * s for s in turns], "ms") for n, turns in seconds.items()]
    return [*rows, ratio("15 earlier tasks / 1", seconds["15"], seconds["1"], Target(1.02))]
