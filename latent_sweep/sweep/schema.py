"""The groups of settings of a sweep file that belong to no class of their own, and the reference of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from latent_sweep.backbones.registry import BackboneSettings
from latent_sweep.data.schema import BenchmarkSettings
from latent_sweep.methods import METHODS, method_class
from latent_sweep.methods.protocol import MethodSettings
from latent_sweep.routing.gaussian import RouterSettings
from latent_sweep.security import has_credentials
from latent_sweep.settings import (
    FROM_PRESET,
    INFERENCE_ONLY,
    LEFT_OUT_AT_DEFAULT,
    NOT_IDENTITY,
    Settings,
    as_written,
    group_of,
    yaml_text,
)
from latent_sweep.storage.predictions import KeepAnswers
from latent_sweep.storage.storage import DEFAULT_LOCATION, location_faults
from latent_sweep.sweep.tracking_uris import address_faults


class TrainingSettings(Settings):
    """The `training:` group. What is left out is resolved from the method's preset, and from the paper's protocol.

    What the protocol says for every backbone alike are the defaults here (A28).
    """

    learning_rate: float = Field(gt=0, json_schema_extra=FROM_PRESET)
    """Peak learning rate, also of R (A30)."""
    schedule: Literal["constant", "linear"] = Field("constant", json_schema_extra=FROM_PRESET)
    """After the warm-up the learning rate stays, or falls linearly to zero at the task's end."""
    optimizer: Literal["adamw", "adafactor"] = Field("adamw", json_schema_extra=FROM_PRESET)
    """AdamW, or Adafactor with the given rate, neither relative nor scaled by the parameter (LFPT5's). It sees whole
    tensors, which of adapters hold all projections: they are clipped together, and LoRA's outputs share moments."""
    adam_eps: Literal["after_correction", "before_correction"] = Field(
        "after_correction", json_schema_extra=FROM_PRESET | LEFT_OUT_AT_DEFAULT
    )
    """Where AdamW adds its epsilon of 1e-8: to the root of the bias-corrected second moment, as torch and DeepSpeed do,
    or to the root before the correction, as the optimizer of transformers 4 does, which also applies weight decay after
    the step. Early steps of small gradients are then shorter. None is the preset's."""
    batch_size: int = Field(ge=1, json_schema_extra=FROM_PRESET)
    """Rows per optimizer step, over all micro-batches (A29)."""
    micro_batch_size: int | None = Field(None, ge=1, json_schema_extra=NOT_IDENTITY)
    """Rows per forward pass of a worker; gradients accumulate up to `batch_size`. None is the worker's whole share.
    Results do not depend on it beyond rounding, but with dropout the masks do, and with GainLoRA's `pooling: padded`
    the gates; on the number of workers, too. A table whose trials were not learned alike says so."""
    epochs: int = Field(ge=1, json_schema_extra=FROM_PRESET)
    """Passes over a task's training rows."""
    max_steps: int | None = Field(None, ge=1)
    """At most this many optimizer steps per task, whatever `epochs` says; joint training has those of all tasks."""
    weight_decay: float = Field(0.0, ge=0, json_schema_extra=FROM_PRESET)
    """Decoupled weight decay (A28)."""
    gradient_clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; None does not clip (A28)."""
    backbone_dropout: float = Field(0.0, ge=0, lt=1, json_schema_extra=FROM_PRESET)
    """Rate of the frozen backbone's own dropout while adapters are trained, as released trainers leave it on; T5 has
    it, Llama has none. None is the preset's: 0, or under `preset: official` what T5's configuration says, 0.1."""
    warmup_steps: int = Field(0, ge=0, json_schema_extra=FROM_PRESET)
    """Steps over which the learning rate rises linearly to its peak (A28)."""
    warmup_start: Literal["share", "zero"] = Field("share", json_schema_extra=FROM_PRESET)
    """The rate of a warm-up's first step: peak / `warmup_steps`, or zero as in the schedules of transformers, whose
    first step moves nothing. None is the preset's: `share`, or what the method's released trainer has."""
    loss_reduce: Literal["token_mean", "sequence_mean", "sum"] = "token_mean"
    """Cross-entropy over a batch: mean over target tokens, mean over rows of their sums, or the sum (A5)."""
    select: Literal["last", "best_validation"] = "last"
    """Which parameters a task leaves behind; `best_validation` scores held-out training rows every epoch (A31)."""
    group_by_length: bool = Field(True, json_schema_extra=FROM_PRESET)
    """Batches of rows of similar length: less padding, same rows per epoch. Otherwise rows are shuffled, as in most
    released trainers. None is the preset's."""
    gradient_checkpointing: bool | Literal["auto"] = Field(False, json_schema_extra=NOT_IDENTITY)
    """Recompute activations in the backward pass: less memory, about a third more time. `auto` does so on a GPU
    where learning without is not predicted to leave 1.5 GiB free; a trial's journal says what was decided."""
    checkpoint_every: int = Field(50, ge=1, json_schema_extra=NOT_IDENTITY)
    """Optimizer steps between checkpoints inside a task: what a killed worker loses at most."""

    @model_validator(mode="after")
    def _epsilon_of_adam(self) -> TrainingSettings:
        if self.optimizer == "adafactor" and self.adam_eps == "before_correction":
            raise ValueError(
                f"adam_eps = {self.adam_eps} has no effect with optimizer = {self.optimizer}; write adam_eps: "
                "after_correction, or take optimizer: adamw"
            )
        return self

    def rows_in_a_pass(self, workers: int) -> int:
        """Rows of a forward pass of one of so many workers at most: its share of a batch, or a micro-batch of it."""
        share = math.ceil(self.batch_size / workers)
        return min(share, self.micro_batch_size or share)

    def step_count(self, rows: int, tasks: int = 1) -> int:
        """Optimizer steps for this many training rows, which so many tasks have together."""
        steps = self.epochs * math.ceil(rows / self.batch_size)
        return steps if self.max_steps is None else min(steps, tasks * self.max_steps)


class EvaluationSettings(Settings):
    """The `evaluation:` group; training reads none of it."""

    batch_size: int = Field(16, ge=1, json_schema_extra=INFERENCE_ONLY)
    """Rows generated together. In bfloat16 the answers depend on it, so it is part of what identifies a score. Where
    memory does not suffice, batches are answered in halves, and the table says so."""


class ResourceSettings(Settings):
    """The resources that one trial asks Ray for."""

    workers: int = Field(1, ge=1)
    """Processes that run a trial together: each has its share of every batch. They are placed all at once or not at
    all. Results do not depend on their number beyond rounding."""
    cpus: float = Field(1, gt=0)
    """CPU cores of each worker; torch uses as many threads, at least one. With `--local` it uses what it finds."""
    gpus: float = Field(0, ge=0, le=1)
    """GPUs of each worker. With 0 it sees none, whatever its node has. A fraction lets several trials of one worker
    share one; each may take that share of its memory."""
    accelerator: str | None = None
    """Accelerator type as Ray names it, e.g. `A100`."""

    @model_validator(mode="after")
    def _a_gpu_each(self) -> ResourceSettings:
        if self.workers > 1 and self.gpus not in (0, 1):
            raise ValueError(
                f"gpus = {self.gpus:g} with workers = {self.workers}: workers of one trial cannot share a GPU; give "
                "each its own, gpus: 1, or none"
            )
        return self


class EngineSettings(Settings):
    """The engine that computes a trial; it changes no result beyond rounding, so snapshots fit every engine."""

    name: Literal["torch", "deepspeed"] = "torch"
    """Plain torch holds the whole backbone in every worker; `deepspeed` can shard it over them."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """What DeepSpeed ZeRO shards over the workers: 3 the backbone's weights; 0, 1 and 2 nothing, as what is trained is
    about a megabyte, which every worker holds and steps whole. They compute as plain torch does."""
    offload: Literal["none", "cpu"] = "none"
    """Where the shards of the weights wait: with `cpu` in host memory. Needs stage 3."""
    gather: Literal["auto", "always", "never"] = "auto"
    """Whether stage 3 gathers the weights for answering, once per evaluation: `auto` where they fit beside what is
    there. Without it every new token gathers every weight, which is slow beyond use for more than a look."""
    config: Mapping[str, Any] = {}
    """DeepSpeed's own JSON, merged over ours, e.g. {zero_optimization: {stage3_prefetch_bucket_size: 50000000}}. Needs
    stage 3. What is trained is not DeepSpeed's, so what it says of gradients and optimizers has no effect."""

    @model_validator(mode="after")
    def _for_deepspeed(self) -> EngineSettings:
        fields = type(self).model_fields
        set_here = sorted(n for n in fields if n != "name" and getattr(self, n) != fields[n].default)
        if self.name == "torch" and set_here:
            raise ValueError(f"{', '.join(set_here)}: plain torch has no such setting; add name: deepspeed")
        of_shards = [name for name in set_here if name != "zero_stage"]
        if self.zero_stage < 3 and of_shards:
            raise ValueError(
                f"{', '.join(of_shards)}: has no effect with zero_stage: {self.zero_stage}, which shards nothing; "
                "leave it out, or use zero_stage: 3"
            )
        return self


class SchedulerSettings(Settings):
    """The scheduler's settings: who goes on and who stops early."""

    name: Literal["fifo", "asha"] = "fifo"
    """`asha` stops the worse half of the packs at each rung of tasks: whole configurations with `run.pack: [seed]`,
    single seeds with packs of one trial, and the mean of a row is then that of those that were left."""
    metric: Literal["AP"] = "AP"
    """Average performance over the tasks seen so far; higher is better."""
    grace_tasks: int = Field(3, ge=1)
    """Tasks that every trial learns before it may be stopped."""
    reduction_factor: int = Field(2, ge=2)
    """One in this many goes on at each rung."""


class TrackingSettings(Settings):
    """The tracker's settings: where runs are compared."""

    uri: str | None = None
    """MLflow tracking URI: a server, or a database such as sqlite:///mlflow.db, the default. If MLFLOW_TRACKING_URI is
    set, it replaces the default and a relative path. `none` does without MLflow."""

    @field_validator("uri")
    @classmethod
    def _holds_no_password(cls, uri: str | None) -> str | None:
        if uri is not None and has_credentials(uri):
            raise ValueError(
                "found an address with a user, password or token in it, which would be written to the sweep's folder; "
                "expected an address without. Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
                "MLFLOW_TRACKING_TOKEN, or the whole address as MLFLOW_TRACKING_URI, in the environment"
            )
        return uri

    @field_validator("uri")
    @classmethod
    def _is_taken_by_mlflow(cls, uri: str | None) -> str | None:
        if uri is not None and (faults := address_faults(uri)):
            raise ValueError("; ".join(faults))
        return uri


Price = Annotated[float, Field(ge=0)]


class PriceSettings(Settings):
    """Prices in any one currency, by which `plan` and `report` say what a sweep costs. None is looked up or assumed."""

    gpu_hour: Mapping[str, Price] = {}
    """Of a GPU for an hour, by types as in `resources.accelerator`, e.g. {A100: 4.1}; `any` is that of all others."""
    cpu_hour: Price | None = None
    """Of a CPU core for an hour; told where a sweep asks for no GPU."""


class RunSettings(Settings):
    """The `run:` group: how to run a sweep. It changes no result."""

    storage: str = Field(DEFAULT_LOCATION, min_length=1)
    """Where everything that is computed lies, shared by all sweeps that name it: a folder, which all nodes must see, or
    an object store, `s3://bucket/prefix` or `gs://bucket/prefix` as pyarrow reads it, without credentials. If
    LATENT_SWEEP_STORAGE is set, it replaces the default and a relative path."""
    resources: ResourceSettings = ResourceSettings()
    """What each trial asks for."""
    engine: EngineSettings = EngineSettings()
    """What computes it."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """Early stopping."""
    tracking: TrackingSettings = TrackingSettings()
    """MLflow."""
    allow_insecure: bool = False
    """Go on although a Ray cluster on another machine asks for no token, or an MLflow server there is without TLS
    or credentials: for networks that nobody else can enter."""
    keep_answers: KeepAnswers = "all"
    """Keep the answers of every stage (`all`), so that each entry of the score matrix can be scored again, or those of
    the newest stage alone (`last`)."""
    page: bool = True
    """Draw the report as a page, `report.html`, when a run ends."""
    log_model: Literal["none", "best"] = "none"
    """Put the model of the finished trial with the highest AP into the sweep's MLflow run when a run ends; the driver
    loads its backbone for that, and reads the benchmark's rows."""
    pack: Annotated[tuple[str, ...], Field(strict=False)] | Literal["auto"] | Annotated[int, Field(ge=1)] = 1
    """Trainings that learn side by side in one worker, in one forward pass of the shared backbone: axes whose values go
    together (`[seed]`: a scheduler then compares their mean), a number, or `auto`, measured at the start."""
    prices: PriceSettings = PriceSettings()
    """What it costs."""
    max_concurrent: int | None = Field(None, ge=1)
    """Trials that run at the same time at most; None is as many as fit."""
    num_samples: int = Field(1, ge=1)
    """Random draws of the searched values, for each point of the grid."""
    search_seed: int = Field(0, ge=0)
    """Seed of those draws: the same file always means the same trials."""
    max_failures: int = Field(3, ge=0)
    """How often in a row, without finishing a task in between, a trial is started again whose worker died, or lost its
    GPU, on a node that stayed. Losing the node is free; out of memory is tried once more with half the rows in a pass
    of what ran out, learning, answering or a method's statistics; other faults are not retried."""

    @model_validator(mode="after")
    def _has_where_to_log(self) -> RunSettings:
        if self.log_model != "none" and self.tracking.uri == "none":
            raise ValueError(
                f"log_model = {self.log_model} with tracking.uri = none: there is no MLflow to log it in; leave one of "
                "them out. `latent-sweep export --to model` writes a model without MLflow"
            )
        return self

    @field_validator("storage")
    @classmethod
    def _can_be_opened(cls, place: str) -> str:
        if faults := location_faults(place):
            raise ValueError("; ".join(faults))
        return place


Candidates = Annotated[tuple[Any, ...], Field(strict=False, min_length=1)]
"""Values that one setting tries."""


class TuneSettings(Settings):
    """The `tune:` block: settings chosen before the trials run, on rows that no trial is judged on.

    Each configuration's candidates are trials of their own, of the first tasks of its stream (Chaudhry et al. 2019,
    arXiv 1812.00420, and for the first task alone Lee et al. 2024, arXiv 2404.06466) or of another benchmark (Cha and
    Cho 2024, arXiv 2403.09066). The best average performance on held-out training rows wins; where several have it,
    the lowest loss of the last epoch, then the smallest values.
    """

    on: Literal["first_tasks"] | Mapping[str, Any] = "first_tasks"
    """What candidates learn: the first tasks of the order that the first of the trials has; or another benchmark, as
    settings of `benchmark:`, e.g. {name: long_sequence, order: 3}."""
    tasks: int | None = Field(2, ge=1)
    """So many first tasks, fewer than the trials have; None is all tasks of another benchmark."""
    seed: int = Field(0, ge=0)
    """Seed of every candidate."""
    validation_fraction: float = Field(0.2, gt=0, le=0.5)
    """Share of the training rows that is held out, to score candidates on; see `benchmark.validation_fraction`."""
    search: Mapping[str, Candidates] = {}
    """Values to try for every method, by dotted path below `trial`: settings of `method`, `router` and `training`."""
    by_method: Mapping[str, Mapping[str, Candidates]] = {}
    """Values to try for one method, beside those of `search` or in their place."""
    apply_to: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("method", "backbone", "benchmark.name")
    """Groups or settings of a trial that have a choice each for every value; trials that differ elsewhere, as in order
    and seed, share it, and candidates are made from the first of them."""

    @model_validator(mode="after")
    def _can_choose(self) -> TuneSettings:
        if not self.search and not any(self.by_method.values()):
            raise ValueError("found no values to try; expected some under search, e.g. training.learning_rate: [...]")
        if not {"method", "method.name"} & set(self.apply_to):
            raise ValueError(
                "apply_to holds neither method nor method.name: what suits one method says nothing about another; "
                "for one value for all, write it under trial"
            )
        if self.tasks is None and self.on == "first_tasks":
            raise ValueError("tasks is null, but all tasks of the stream are what trials are judged on; give a number")
        return self

    def tried(self, method: str) -> dict[str, tuple[Any, ...]]:
        """Return the values to try for a method, by dotted path."""
        return dict(self.search) | dict(self.by_method.get(method, {}))


class TrialSettings(Settings):
    """One trial with every setting known, as `plan.resolve` makes it."""

    method: SerializeAsAny[MethodSettings]
    router: RouterSettings
    backbone: BackboneSettings
    benchmark: BenchmarkSettings
    training: TrainingSettings
    evaluation: EvaluationSettings
    seed: int = Field(0, ge=0)
    """Seed of initialisation, data order and K-means."""


@dataclass(frozen=True)
class WrittenTrial:
    """The `trial:` group of a sweep file: one trial, each group as `as_written` has it."""

    method: MethodSettings
    router: RouterSettings
    backbone: BackboneSettings
    benchmark: BenchmarkSettings
    training: TrainingSettings
    evaluation: EvaluationSettings
    seed: int


GROUPS: Mapping[str, type[Settings]] = {
    "router": RouterSettings,
    "backbone": BackboneSettings,
    "benchmark": BenchmarkSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
}


def resolved_settings(content: Mapping[str, Any]) -> TrialSettings:
    """Read back the settings of a trial, as its `trial.yaml` and a model's folder have them.

    Raises:
        ConfigError: there is no such method.
        ValidationError, LookupError: they are not those of a trial of this version.
    """
    method = method_class(content["method"]["name"]).settings_class.model_validate(content["method"])
    groups: dict[str, Any] = {name: kind.model_validate(content[name]) for name, kind in GROUPS.items()}
    return TrialSettings(method=method, seed=content["seed"], **groups)


REQUIRED = "required"
"""Stands for the default of a setting that has none."""


class SettingFacts(NamedTuple):
    """A setting of a sweep file."""

    path: str
    default: str
    """As a sweep file would write it, or `REQUIRED`."""
    meaning: str


def every_setting() -> dict[str, list[SettingFacts]]:
    """Return every setting of a sweep file, from the classes themselves, by the group that has it."""
    sections = {}
    for kind, methods in _method_groups().items():
        own = [name for name in kind.model_fields if name in kind.__annotations__ and name != "name"]
        if own:
            sections[f"`trial.method` of {', '.join(methods)}"] = _facts("trial.method", kind, own)
    groups: list[tuple[str, type[Settings]]] = [(f"trial.{name}", kind) for name, kind in GROUPS.items()]
    groups += [("tune", TuneSettings), ("run", RunSettings)]
    sections |= {f"`{path}`": _facts(path, kind, list(kind.model_fields)) for path, kind in groups}
    return sections | {"`trial`": _facts("trial", TrialSettings, ["seed"])}


def describe_settings() -> str:
    """Every setting of a sweep file, as Markdown: path, default and what it means."""
    head = ["| setting | default | meaning |", "|---|---|---|"]
    return "\n\n".join("\n".join([f"{title}:\n", *head, *map(_row, found)]) for title, found in every_setting().items())


def _row(facts: SettingFacts) -> str:
    default = facts.default if facts.default == REQUIRED else f"`{facts.default}`"
    meaning = facts.meaning.replace("|", "\\|")
    return f"| `{facts.path}` | {default} | {meaning} |"


def _method_groups() -> dict[type[Settings], list[str]]:
    """The classes that give methods their settings, each with the methods that have them, the most shared first."""
    groups: dict[type[Settings], list[str]] = {}
    for name in METHODS:
        for kind in method_class(name).settings_class.__mro__:
            if issubclass(kind, MethodSettings) and kind is not MethodSettings:
                groups.setdefault(kind, []).append(name)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _facts(path: str, kind: type[Settings], names: Sequence[str]) -> list[SettingFacts]:
    found = []
    for name in names:
        field = as_written(kind).model_fields[name]
        if inner := group_of(field):
            found += _facts(f"{path}.{name}", inner, list(inner.model_fields))
            continue
        default = REQUIRED if field.is_required() else yaml_text(field.default, one_line=True)
        found.append(SettingFacts(f"{path}.{name}", default, " ".join((field.description or "").split())))
    return found
