"""The faults of a trial whose settings are valid one by one but do not fit together, the backbone or the data."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from latent_sweep.backbones.families import sizes
from latent_sweep.backbones.folder_checks import folder_faults
from latent_sweep.backbones.registry import REGISTRY, describe
from latent_sweep.data.loaders import count_examples
from latent_sweep.data.schema import Split
from latent_sweep.memo import memoized
from latent_sweep.routing.settings import ROUTED, RouterSettings
from latent_sweep.sweep.trial import Trial


def trial_faults(trial: Trial) -> list[str]:
    s = trial.settings
    faults = _backbone_faults(trial) + _definition_faults(trial)
    if s.router.combine not in trial.method().combinations:
        possible = ", ".join(trial.method().combinations)
        faults.append(f"router.combine: found {s.router.combine!r}; snapshots of {s.method.name} answer as {possible}")
    if s.benchmark.score_on == "validation" and s.training.select == "best_validation":
        faults.append(
            "training.select: found best_validation, but benchmark.score_on: validation (as in tune:) scores the same "
            "held-out examples that it would select epochs by; use last"
        )
    if s.router.combine in ROUTED:
        faults += _router_faults(trial) + _head_faults(trial)
    _row_counts(trial, "test")  # raises if test examples cannot be read
    return faults


@memoized(lambda trial, split: (trial.settings.benchmark, split))
def _row_counts(trial: Trial, split: Split) -> list[int]:
    return [count_examples(trial.spec, task, split, trial.settings.benchmark) for task in trial.tasks]


@memoized(lambda trial: (trial.settings.backbone, trial.settings.method, trial.settings.training))
def _backbone_faults(trial: Trial) -> list[str]:
    s, faults = trial.settings, []
    described = describe(s.backbone)
    if described is None and "/" not in s.backbone.name:
        near = difflib.get_close_matches(s.backbone.name, REGISTRY, n=1, cutoff=0.8)
        faults += [f"backbone.name: found {s.backbone.name!r}; did you mean {near[0]!r}?"] if near else []
    faults += folder_faults(s.backbone)
    if described is not None:
        shapes = described.adapted(s.backbone)
        name, shape = min(shapes.items(), key=lambda item: min(item[1]))
        if trial.method().rank() > min(shape):
            faults.append(
                f"method.rank: found {trial.method().rank()}; {s.backbone.name}'s {name} is {shape[0]} x {shape[1]}, "
                f"so at most {min(shape)} is possible"
            )
        faults += trial.method().shape_faults(shapes)
        if s.training.backbone_dropout and not described.traits.dropout:
            faults.append(
                f"training.backbone_dropout: found {s.training.backbone_dropout:g}, but {s.backbone.name} has no "
                "dropout; leave it out"
            )
    return faults


@memoized(lambda trial: (trial.settings.router, trial.settings.benchmark))
def _router_faults(trial: Trial) -> list[str]:
    s, counts = trial.settings, _row_counts(trial, "train")
    rows, position = min((rows, position) for position, rows in enumerate(counts))
    wanted, task = s.router.components, trial.tasks[position]
    if wanted <= rows:
        return _scatter_faults(s.router, counts)
    advice = f"use at most {rows:,}"
    if s.benchmark.train_per_task is not None:
        whole = s.benchmark.model_copy(update={"train_per_task": None})
        enough = all(count_examples(trial.spec, task, "train", whole) >= wanted for task in trial.tasks)
        advice += f", or raise benchmark.train_per_task to {wanted:,}" if enough else ""
    return [f"router.components: found {wanted:,}, but task {task.name} has {rows:,} training examples; {advice}"]


def _head_faults(trial: Trial) -> list[str]:
    """List settings of the router that do not fit together, the method or the backbone."""
    router, faults = trial.settings.router, []
    if router.head == "klda" and router.projection is None:
        faults.append("router.projection: found none; router.head: klda needs a number of random features, e.g. 1000")
    if router.shrinkage == "ledoit_wolf":
        if router.cov.center == "component":
            faults.append("router.cov.center: found component; with router.shrinkage: ledoit_wolf use task")
        if router.gmm.whiten_first or router.gmm.em_iters:
            faults.append(
                "router.shrinkage: found ledoit_wolf; router.gmm.whiten_first and router.gmm.em_iters need epsilon"
            )
    if router.abstain is not None:
        if router.head == "ridge":
            faults.append("router.abstain: found a quantile, but router.head: ridge has no distances; leave it out")
        if router.cov.center == "component":
            faults.append("router.cov.center: found component; with router.abstain use task")
        if trial.method().virtual_tokens(len(trial.tasks)):
            faults.append(
                f"router.abstain: found a quantile, but {trial.settings.method.name} adds tokens to every prompt, "
                "which the bare backbone cannot read; leave it out"
            )
    return faults if router.features == "embeddings" else faults + _layer_faults(trial, router.features)


def _layer_faults(trial: Trial, layer: int) -> list[str]:
    router, faults = trial.settings.router, []
    described = describe(trial.settings.backbone)
    if described is not None and described.traits.stacks:
        blocks = sizes(described.traits, described.config)["blocks"]
        if layer > blocks:
            faults.append(f"router.features: found layer {layer}; expected 0 to {blocks}, or -1 for the last")
    if not router.pool.mask_pad:
        faults.append("router.pool.mask_pad: found false; hidden states are read without padding, so use true")
    if not router.pool.truncate:
        faults.append("router.pool.truncate: found false; hidden states are those of what the model reads, so use true")
    return faults


def _scatter_faults(router: RouterSettings, counts: Sequence[int]) -> list[str]:
    """List why the first stage would have no covariance: too few examples for `ddof`, or each equals its own mean."""
    pooled = counts[: router.cov.pooled_tasks(1, len(counts))]
    alone = router.cov.center == "component" and not router.gmm.em_iters  # every example may be its own component
    most = router.components if alone else 1
    if router.cov.ddof == "tasks" and sum(pooled) <= len(pooled):
        return [
            f"router.cov.ddof: found tasks, but {len(pooled)} tasks with {sum(pooled)} training examples leave no "
            "degree of freedom; use none, or raise benchmark.train_per_task"
        ]
    relative = router.epsilon_mode == "relative" and router.head != "ridge"  # the ridge's also has tasks apart
    if (relative or router.shrinkage == "ledoit_wolf") and max(pooled) <= most:
        of = "" if most == 1 else f" and router.components = {most}"
        return [
            f"router.epsilon_mode: found relative, but with {most} training examples per task{of} each example is its "
            "own mean, so the covariance is zero; use absolute, or raise benchmark.train_per_task"
        ]
    return []


@memoized(lambda trial: (trial.settings.benchmark,))
def _definition_faults(trial: Trial) -> list[str]:
    wanted, name = trial.settings.benchmark.prompts.definition, trial.settings.benchmark.name
    instructed = [task for task in trial.tasks if task.instruction.strip()]
    if wanted == "verbatim":
        return []
    if trial.settings.benchmark.score_on == "validation":
        return [
            f"benchmark.prompts.definition: found {wanted!r} with benchmark.score_on: validation, but held-out "
            "examples keep the definition that is trained with; use verbatim, or score_on: test"
        ]
    if not instructed:
        return [
            f"benchmark.prompts.definition: found {wanted!r}, but no task of {trial.spec.name} has an instruction; "
            "use verbatim"
        ]
    lacking = [task.name for task in instructed if wanted == "paraphrase" and not task.paraphrases]
    if not lacking:
        return []
    return [
        f"benchmark.prompts.definition: found 'paraphrase', but {', '.join(lacking)} of benchmark {name} have none. "
        "Add `paraphrases: [...]` to each such task in the benchmark's file: three or more texts that rephrase its "
        "`instruction` and name the same labels. Or use verbatim or none"
    ]
