"""What all methods that train LoRA pairs share: settings and their presets, pairs in snapshots, and a learner.

A snapshot holds one pair, `A` (M, r, n) and `B` (O, r), plus what its method adds; the letters are explained in
`latent_sweep.adapters.lora`. `LoraMethod` carries one pair through all tasks, `TaskAdapterMethod` learns a new pair for
every task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from latent_sweep.backbones.outputs import Example
from latent_sweep.backbones.registry import EMBEDDED, dropout_rate, family_of
from latent_sweep.errors import ConfigError
from latent_sweep.methods.protocol import ADAPTER_COMBINATIONS, Learner, LowRankPairs, Method, MethodSettings, TaskData
from latent_sweep.settings import FROM_PRESET, NOT_IDENTITY

if TYPE_CHECKING:
    from torch import Tensor

    from latent_sweep.adapters.bank import Adaptation, Delta
    from latent_sweep.adapters.lora import LoraPair


# --- presets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scripts:
    """The settings of a method's released scripts, by the names that the settings have here."""

    method: Mapping[str, Any]
    """Settings of the method's own group."""
    training: Mapping[str, Any]
    """Settings of the `training:` group. Rows are shuffled, not grouped by length, if it does not say otherwise."""


def o_lora_scripts(family: str, benchmark: str) -> Scripts:
    """O-LoRA's released scripts, which also ran SeqLoRA and IncLoRA; the same for every benchmark.

    Departures: MNLI's second epoch, and on Llama the first task's learning rate of 1e-3, cannot be said per task here.
    """
    training = {"learning_rate": {"t5": 1e-3, "llama": 1e-4}[family], "batch_size": 64, "epochs": 1}
    return Scripts({"rank": 8, "alpha": 32.0, "dropout": 0.1}, training)


def gain_lora_scripts(family: str, benchmark: str) -> Scripts:
    """The released scripts of the SAPT and GainLoRA lineage; benchmarks other than Long Sequence take SuperNI's.

    Their optimizer is that of transformers 4.30, for T5 by default and for Llama since DeepSpeed's file names none.

    Departure: they keep the best checkpoint on the dev split, which is their test split; here `training.select` says.
    """
    long = benchmark == "long_sequence"
    # learning rate; epochs and rank, on Long Sequence and elsewhere
    rate, epochs, rank = {"t5": (3e-4, (10, 100), (8, 4)), "llama": (5e-5, (20, 50), (4, 4))}[family]
    training = {"learning_rate": rate, "batch_size": 32, "epochs": epochs[not long], "adam_eps": "before_correction"}
    method = {"rank": rank[not long], "alpha": 32.0, "dropout": 0.0, "old_branch_grad": "detach"}
    return Scripts(method, training)


LATER: Literal["official-2025-11"] = "official-2025-11"
"""The preset of GainLoRA's later release."""

Presets = Literal["unified", "official", "official-2025-11"]
"""Of methods that GainLoRA released twice."""


class LoraSettings(MethodSettings):
    """The settings that the `method:` group of every LoRA method has.

    Defaults of what a preset may say are those of the preset `unified`, here and in the methods' own groups. Here they
    are the Latent-LoRA paper's common protocol for LoRA baselines (appendix "Training"); it states no dropout (A28).
    """

    preset: Literal["unified", "official"] = Field("unified", json_schema_extra=NOT_IDENTITY)
    """Where left-out settings come from, those of `training` too: the paper's common protocol, or the method's own
    released scripts."""
    rank: int = Field(8, ge=1, json_schema_extra=FROM_PRESET)
    """r, rows of every A and columns of every B; None is the preset's."""
    alpha: float = Field(16.0, gt=0, json_schema_extra=FROM_PRESET)
    """LoRA's alpha; the scale is s = alpha / rank. None is the preset's."""
    dropout: float = Field(0.0, ge=0, lt=1, json_schema_extra=FROM_PRESET)
    """Dropout on the adapter's input during training, one mask for all pairs; None is the preset's."""

    @property
    def s(self) -> float:
        """The scale in front of every pair."""
        return self.alpha / self.rank


class TaskAdapterSettings(LoraSettings):
    """The settings that the `method:` group of a method with a pair for every task has besides."""

    train_active: Literal["sum", "current"] = "sum"
    """Pairs active while a task is learned: its own with all earlier ones, or its own alone."""
    old_branch_grad: Literal["flow", "detach"] = Field("flow", json_schema_extra=FROM_PRESET)
    """Whether gradients flow through active earlier pairs to lower layers, or stop there; None is the preset's."""


# --- method and learner ----------------------------------------------------------------------------------------------


class LoraMethod(Method):
    """Presets, pairs in snapshots, and how they answer: `dW = sum_t w_t(x) s B_t A_t`."""

    settings: LoraSettings

    # --- planning ---

    @classmethod
    def official(cls, family: str, benchmark: str) -> Scripts:
        """Return what the preset `official` fills in; the rest is the unified preset's, the settings' default.

        Raises:
            ConfigError: the method's class does not say: nothing of it was released.
        """
        raise ConfigError(
            f"method.preset: found 'official', but no scripts of {cls.__name__} were released, or its class does not "
            "say what they set (`official`); expected 'unified'"
        )

    @classmethod
    def later(cls, family: str, benchmark: str) -> Scripts:
        """Return what the preset `official-2025-11` fills in, for methods whose settings have it."""
        raise NotImplementedError

    @classmethod
    def scripts(cls, settings: Any, backbone: str, benchmark: str) -> Scripts | None:
        """Return the released scripts' settings that the preset names; None under `unified`."""
        if settings.preset == "unified":
            return None
        scripts = cls.later if settings.preset == LATER else cls.official
        return scripts(family_of(backbone), benchmark)

    @classmethod
    def defaults(cls, settings: Any, backbone: str, benchmark: str) -> Mapping[str, Any]:
        """Return what the released scripts set for the method, under a preset that names some."""
        scripts = cls.scripts(settings, backbone, benchmark)
        return scripts.method if scripts else {}

    @classmethod
    def training_defaults(cls, settings: Any, backbone: str, benchmark: str) -> Mapping[str, Any]:
        """Return what the released scripts train with, under a preset that names some; else the paper's protocol holds.

        The released trainers, Hugging Face's with changes of their own, call `model.train()` at every step: so the
        backbone's own dropout is on there. Statistics are read, and answers given, without it, as there. They shuffle
        rows, whatever their lengths.

        It knows no backbone as small as the embedded one, where LoRA learns a task in a few dozen steps at 1e-3.
        """
        if scripts := cls.scripts(settings, backbone, benchmark):
            return {"group_by_length": False, **scripts.training, "backbone_dropout": dropout_rate(backbone)}
        return {"learning_rate": 1e-3} if backbone == EMBEDDED else {}

    def rank(self) -> int:
        """Return the adapter rank r."""
        return self.settings.rank

    def parameter_count(self, shapes: Mapping[str, tuple[int, int]], width: int) -> int:
        """Count r (m + n) per projection."""
        return sum(self.rank() * (m + n) for m, n in shapes.values())

    # --- pairs ---

    @property
    def outputs(self) -> list[int]:
        """Return m of every adapted projection."""
        from latent_sweep.adapters.lora import outputs_of

        return outputs_of(self.context.backbone.targets)

    @property
    def inputs(self) -> list[int]:
        """Return the number of inputs of every adapted projection."""
        from latent_sweep.adapters.lora import inputs_of

        return inputs_of(self.context.backbone.targets)

    def fresh(self, task: TaskData) -> LoraPair:
        """Make a new pair: A drawn, B = 0."""
        from latent_sweep.adapters.lora import new_pair

        return new_pair(self.context.backbone.targets, self.rank(), task.generator("start"))

    def carried(self, task: TaskData, history: Sequence[Mapping[str, Tensor]]) -> LoraPair:
        """Return the newest snapshot's pair, or a new one at the first task."""
        return self.pair(history[-1]) if history else self.fresh(task)

    def pair(self, snapshot: Mapping[str, Tensor]) -> LoraPair:
        """Return a snapshot's pair, on the backbone's device."""
        device = self.context.backbone.device
        return snapshot["A"].to(device), snapshot["B"].to(device)

    def low_rank_pairs(self, snapshot: Mapping[str, Tensor]) -> LowRankPairs:
        """Return a snapshot's pair as it is; a projection with fewer inputs has the first columns of its A."""
        A = [own[:, :n] for own, n in zip(snapshot["A"], self.inputs, strict=True)]
        return LowRankPairs(A, snapshot["B"].split(self.outputs), self.settings.s)

    def combine(self, history: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Adaptation:
        """Have each row answer with its own sum of pairs; snapshots that no row weighs play no part."""
        from latent_sweep.adapters.bank import Adaptation
        from latent_sweep.adapters.lora import merged

        pairs = [self.pair(snapshot) for snapshot in history]
        dtype = self.context.backbone.model.dtype
        return Adaptation(merged(pairs, weights, self.outputs, self.settings.s, dtype))


class TaskAdapterMethod(LoraMethod):
    """A new pair for every task, the earlier ones frozen, and active in training unless the settings say otherwise."""

    combinations = ADAPTER_COMBINATIONS
    settings: TaskAdapterSettings

    def reads_history(self, position: int) -> bool:
        """Whether there are earlier pairs that are active in training: only they are read."""
        return position > 0 and self.settings.train_active == "sum"

    def stage_identity(self, position: int) -> dict[str, Any]:
        """Leave out what matters through earlier pairs alone, where none is active."""
        identity = super().stage_identity(position)
        if position == 0:
            identity["train_active"] = "current"
        if identity["train_active"] == "current":
            del identity["old_branch_grad"]
        return identity

    def active(self, history: Sequence[Mapping[str, Tensor]]) -> Sequence[Delta]:
        """Return the earlier pairs' deltas, frozen, as they are active in training; none where they are not."""
        from latent_sweep.adapters.lora import DeltaSum, summed

        s = self.settings
        if not history or s.train_active == "current":
            return ()
        pairs = [self.pair(snapshot) for snapshot in history]
        deltas = summed(pairs, self.outputs, s.s, self.context.backbone.model.dtype)
        return DeltaSum([deltas], detach=[True]) if s.old_branch_grad == "detach" else deltas


class LoraLearner(Learner):
    """Trains one pair, or its B alone, beside frozen earlier ones.

    Args:
        pair: where the pair starts; it is copied.
        outputs: m of every projection.
        settings: give scale and dropout.
        earlier: deltas that are active too.
        train_A: whether A is trained; if not, it is still part of the snapshot.
    """

    def __init__(
        self,
        pair: LoraPair,
        outputs: Sequence[int],
        settings: LoraSettings,
        earlier: Sequence[Delta] = (),
        train_A: bool = True,
    ):
        A, B = pair
        self.A, self.B = A.detach().clone().requires_grad_(train_A), B.detach().clone().requires_grad_(True)
        self.outputs, self.settings = outputs, settings
        self._earlier = earlier

    def parameters(self) -> dict[str, Tensor]:
        """Return A and B, as far as they are trained."""
        return {name: tensor for name, tensor in (("A", self.A), ("B", self.B)) if tensor.requires_grad}

    def adaptation(self, rows: Sequence[Example]) -> Adaptation:
        """Use the pair and the earlier ones, the same for all rows; no dropout where nothing is learned."""
        import torch

        from latent_sweep.adapters.bank import Adaptation
        from latent_sweep.adapters.lora import DeltaSum, LoraDeltas

        own = LoraDeltas(self.A, self.B, self.outputs, self.settings.s)
        rate = self.settings.dropout if torch.is_grad_enabled() else 0.0
        return Adaptation(DeltaSum([own, self._earlier], rate) if self._earlier or rate else own)

    def finish(self) -> dict[str, Tensor]:
        """Return the pair."""
        return {"A": self.A.detach().cpu().clone(), "B": self.B.detach().cpu().clone()}
