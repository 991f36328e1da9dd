"""LFPT5: one soft prompt for all tasks, which also learns to write rows of them, so that later tasks replay some.

    (1 - k) (L_task + l L_lm) + k KL(p_previous || p_current on replayed rows)

After Qin & Joty, "LFPT5: a unified framework for lifelong few-shot language learning based on prompt tuning of T5"
(2022), and its released code. What it replays is generated, but it does replay. The original runs on LM-adapted T5 v1.1
alone (`backbone.name: google/t5-large-lm-adapt`), with 16 rows a label and sources of 128 tokens.

Departures from the code:

- Nothing is added to the vocabulary: a row is asked for by its task's name, and a special token that the tokenizer has
  stands between its input and its target.
- Only a row's input and target are written; instruction and cue are put around them. A long input is cut, so that the
  target behind it stays.
- L_lm is a mean over tokens row by row, and rows weigh in it as their targets do in L_task: micro-batches add up.
- KL is a sum over rows, target tokens and vocabulary; theirs counts the padding of two rows too.
- L_task and L_lm are means over a batch; theirs are sums of the means over its four micro-batches of two rows, while
  their KL is the same sum either way. `accumulation` is that number: only the ratio matters, since Adafactor's steps do
  not depend on the size of the loss. Their first step of an epoch has one micro-batch alone.
- The first task has no KL, and no factor 1 - k either.
- Tens of pseudo-samples are drawn for an earlier task, not thousands, and validation has those that are trained on.
- Answers are decoded as every method's are.
- The prompt follows its row; theirs stands behind the padding of the batch, so that T5's relative positions between a
  row and the prompt depend on the longest row of its batch.

As there, the teacher of KL drops out too where the backbone does (`training.backbone_dropout`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from latent_sweep.backbones.outputs import Example, Outputs
from latent_sweep.backbones.registry import EMBEDDED, dropout_rate
from latent_sweep.methods.protocol import Learner, Method, MethodSettings, TaskData
from latent_sweep.settings import FROM_PRESET, NOT_IDENTITY

if TYPE_CHECKING:
    from torch import Tensor

    from latent_sweep.adapters.bank import Adaptation
    from latent_sweep.backbones.loading import Backbone
    from latent_sweep.methods._pseudo_samples import RowFormat, Samples

DESCRIPTION = "sentence classification"
"""What the first vector of a new prompt says."""

FREQUENT = 5000
"""Vectors of a new prompt that say nothing else are embeddings of tokens among so many most frequent ones."""


class Lfpt5Settings(MethodSettings):
    """The `method:` group of a sweep file for LFPT5."""

    name: Literal["lfpt5"] = "lfpt5"
    """Name of the method."""
    preset: Literal["unified", "official"] = Field("unified", json_schema_extra=NOT_IDENTITY)
    """Where left-out settings of `training` come from: the paper's common protocol, whose learning rate hardly moves a
    soft prompt, or the method's own released scripts."""
    prompt_length: int = Field(300, ge=1)
    """Vectors of the prompt; the model reads them behind up to `benchmark.max_source_length` tokens."""
    lm_weight: float = Field(0.25, ge=0)
    """l; the scripts have 0.25 for classification, 0.1 for entity recognition and summarisation."""
    kl_weight: float = Field(0.01, ge=0, lt=1)
    """k; the scripts have 0.01 for classification, 0.03 for entity recognition, 0.04 for summarisation."""
    accumulation: int = Field(1, ge=1, json_schema_extra=FROM_PRESET)
    """Micro-batches whose mean losses the released code adds up without dividing by their number (4, of two rows each):
    beside them KL, a sum over all rows, weighs so many times less than beside one mean. None is the preset's: 1, or 4
    under `preset: official`."""
    sample_length: int = Field(256, ge=1)
    """Tokens of a pseudo-sample, at most; the code's is twice its source length."""
    samples_per_label: int = Field(2, ge=0)
    """Pseudo-samples replayed for each label of an earlier task; targets that come twice on average are labels."""
    samples_per_task: int = Field(4, ge=0)
    """Pseudo-samples replayed of an earlier task without labels, as in the code's summarisation."""
    tries: int = Field(64, ge=1)
    """Pseudo-samples drawn for each earlier task, at most, until enough of them are well-formed."""
    top_k: int = Field(64, ge=1)
    """Likeliest tokens from which each token of a pseudo-sample is drawn."""
    repetition_penalty: float = Field(2.5, gt=0)
    """What logits of tokens are divided by that the pseudo-sample already has; 1 is none."""


class Lfpt5(Method):
    """One prompt carried through all tasks; the newest answers."""

    settings_class = Lfpt5Settings
    replays = True
    keeps_rows = True
    settings: Lfpt5Settings

    @classmethod
    def defaults(cls, settings: Lfpt5Settings, backbone: str, benchmark: str) -> Mapping[str, Any]:
        """Return the released code's number of micro-batches, under the preset `official`."""
        return {"accumulation": 4} if settings.preset == "official" else {}

    @classmethod
    def training_defaults(cls, settings: Lfpt5Settings, backbone: str, benchmark: str) -> Mapping[str, Any]:
        """Return what the released scripts train with, under `official`: in training mode, gradients not clipped.

        Departure: ten epochs; theirs are 421, over 16 rows a label. On the embedded backbone, which no protocol knows,
        a prompt learns a task in a few dozen steps of Adafactor at 0.3.
        """
        scripts = {"learning_rate": 0.5, "optimizer": "adafactor", "weight_decay": 1e-5, "batch_size": 8, "epochs": 10}
        if settings.preset == "official":
            own = {"gradient_clip": None, "group_by_length": False, "backbone_dropout": dropout_rate(backbone)}
            return {**scripts, **own}
        return {"learning_rate": 0.3, "optimizer": "adafactor"} if backbone == EMBEDDED else {}

    def stage_identity(self, position: int) -> dict[str, Any]:
        """Leave out what is read for pseudo-samples alone, where there are none: task 1 is shared by all k."""
        s, identity = self.settings, super().stage_identity(position)
        if not s.kl_weight:
            del identity["accumulation"]
        if position > 0 and (s.samples_per_label or s.samples_per_task):
            return identity
        unread = {
            "kl_weight",
            "accumulation",
            "samples_per_label",
            "samples_per_task",
            "tries",
            "top_k",
            "repetition_penalty",
        }
        if not s.lm_weight:
            unread.add("sample_length")
        return {name: value for name, value in identity.items() if name not in unread}

    def rank(self) -> int:
        """Return 0: no projection is adapted."""
        return 0

    def parameter_count(self, shapes: Mapping[str, tuple[int, int]], width: int) -> int:
        """Multiply the prompt's vectors by their width."""
        return self.settings.prompt_length * width

    def try_task(self, task: TaskData) -> None:
        """Check that the task's rows can be written as pseudo-samples.

        Raises:
            ConfigError: the tokenizer has no special token to spare.
            DataError: no row has an input.
        """
        from latent_sweep.methods._pseudo_samples import check_inputs, separator

        separator(self.context.backbone)
        check_inputs(task)

    def begin_task(self, task: TaskData, history: Sequence[Mapping[str, Tensor]]) -> Lfpt5Learner:
        """Take the previous prompt to train it further, with pseudo-samples of every earlier task that it draws now."""
        from latent_sweep.methods._pseudo_samples import RowFormat, draw

        backbone = self.context.backbone
        format = RowFormat.of(task, backbone)
        if not history:
            start = first_prompt(task, format, backbone, self.settings.prompt_length)
            return Lfpt5Learner(self, start, format, [])
        prompt, generator = history[-1]["prompt"].to(backbone.device), task.generator("pseudo-samples")
        earlier = [RowFormat.load(snapshot, backbone) for snapshot in history]
        samples = [draw(self.context, prompt, of_task, self.settings, generator) for of_task in earlier]
        return Lfpt5Learner(self, prompt, format, samples)

    def combine(self, history: Sequence[Mapping[str, Tensor]], weights: Tensor) -> Adaptation:
        """Answer all rows with the newest prompt."""
        from latent_sweep.adapters.bank import Adaptation

        return Adaptation(prompt=history[-1]["prompt"].to(self.context.backbone.device))

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Put the soft prompt behind the input."""
        from latent_sweep.adapters.bank import virtual_tokens

        return [*ids, *virtual_tokens(self.settings.prompt_length)]


def first_prompt(task: TaskData, format: RowFormat, backbone: Backbone, length: int) -> Tensor:
    """Make the prompt that the first task starts from, (length, d) in float32.

    A description, the task's name and every label have a vector each, the mean embedding of their tokens. The others
    are embeddings of tokens drawn, with replacement, among the most frequent of the task's rows (of a corpus, in the
    released code). All are as the model reads them: of Gemma-3, whose embedding scales them, scaled.
    """
    import torch

    said = [backbone.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (DESCRIPTION, task.name)]
    said = [*said, *format.labels][:length]
    counts = Counter(token for row in task.rows for ids in (row["prompt_ids"], row["target_ids"]) for token in ids)
    frequent = [[token] for token, _ in counts.most_common(FREQUENT)]
    drawn = torch.randint(len(frequent), (length - len(said),), generator=task.generator("start")).tolist()
    table = backbone.embedding_table
    scale = backbone.embedding_scale
    return torch.stack([scale * table[ids].float().mean(0) for ids in [*said, *(frequent[i] for i in drawn)]])


class Lfpt5Learner(Learner):
    """Trains the prompt to answer, to write rows, and to stay near its earlier answers on replayed ones.

    Args:
        method: whose settings and context it has.
        prompt: where it starts; it is copied, and the teacher stays there.
        format: of this task's rows.
        samples: of every earlier task, oldest first.
    """

    def __init__(self, method: Lfpt5, prompt: Tensor, format: RowFormat, samples: Sequence[Samples]):
        self.prompt = prompt.detach().clone().requires_grad_(True)
        self._method, self._settings, self._previous = method, method.settings, prompt
        self._format, self._samples = format, samples

    def parameters(self) -> dict[str, Tensor]:
        """Return the prompt alone."""
        return {"prompt": self.prompt}

    def adaptation(self, rows: Sequence[Example]) -> Adaptation:
        """Use the prompt, the same for all rows."""
        from latent_sweep.adapters.bank import Adaptation

        return Adaptation(prompt=self.prompt)

    def examples(self, rows: Sequence[Example]) -> list[Example]:
        """Return the task's rows and the pseudo-samples, each with the prompt and, as `lm`, as it is to be written."""
        own = [self._with_prompt(row, self._format, pseudo=False) for row in rows]
        return own + [self._with_prompt(row, s.format, pseudo=True) for s in self._samples for row in s.rows]

    def drawn(self) -> dict[str, Tensor]:
        """Return the pseudo-samples, by the position of their task."""
        parts = ((position, samples.tensors()) for position, samples in enumerate(self._samples))
        return {f"{position}.{name}": tensor for position, tensors in parts for name, tensor in tensors.items()}

    def load_drawn(self, drawn: Mapping[str, Tensor]) -> None:
        """Take the pseudo-samples that the steps so far have replayed."""
        from latent_sweep.methods._pseudo_samples import Samples

        self._samples = [
            Samples.load(
                samples.format, {part: drawn[f"{position}.{part}"] for part in ("inputs", "targets", "counts")}
            )
            for position, samples in enumerate(self._samples)
        ]

    def _with_prompt(self, row: Example, format: RowFormat, pseudo: bool) -> Example:
        written = format.write(row, self._settings.sample_length)
        lm = {"prompt_ids": self._method.prompt(format.name), "target_ids": written}
        return {**row, "prompt_ids": self._method.prompt(row["prompt_ids"]), "lm": lm, "pseudo": pseudo}

    def loss(self, outputs: Outputs) -> dict[str, Tensor]:
        """Return `task`, `lm` and, where there are pseudo-samples, `kl`, each with its coefficients."""
        s, terms = self._settings, {"task": outputs.task_loss()}
        if s.lm_weight:
            terms["lm"] = s.lm_weight * self._lm_loss(outputs)
        if not s.kl_weight or not any(samples.rows for samples in self._samples):
            return terms
        terms = {name: (1 - s.kl_weight) * term for name, term in terms.items()}
        return {**terms, "kl": s.kl_weight / s.accumulation * self._divergence(outputs)}

    def _lm_loss(self, outputs: Outputs) -> Tensor:
        import torch
        from torch.nn.functional import cross_entropy

        told = self._forward([row["lm"] for row in outputs.rows], self.adaptation(outputs.rows))
        of_tokens = cross_entropy(told.logits.float(), told.labels, reduction="none")
        weights = [len(row["target_ids"]) / len(row["lm"]["target_ids"]) for row in outputs.rows]
        # each weight goes along with a launch; a tensor of them would be copied, and the host would wait
        of_rows = [of_row.sum() * weight for of_row, weight in zip(told.by_row(of_tokens), weights, strict=True)]
        return torch.stack(of_rows).sum() / outputs.denominator

    def _divergence(self, outputs: Outputs) -> Tensor:
        import torch

        from latent_sweep.adapters.bank import Adaptation
        from latent_sweep.methods.lwf import divergence

        pseudo = [i for i, row in enumerate(outputs.rows) if row["pseudo"]]
        if not pseudo:
            return outputs.logits.new_zeros(())
        with torch.no_grad():
            rows, teacher = [outputs.rows[i] for i in pseudo], Adaptation(prompt=self._previous)
            told = self._forward(rows, teacher, drop_out=True)
        of_rows = outputs.by_row(outputs.logits)
        return divergence(torch.cat([of_rows[i] for i in pseudo]), told.logits, temperature=1.0)

    def _forward(self, rows: Sequence[Example], adaptation: Adaptation, drop_out: bool | None = None) -> Outputs:
        from latent_sweep.backbones.batches import forward

        context = self._method.context
        return forward(context.backbone, context.bank, rows, adaptation, drop_out=drop_out)

    def finish(self) -> dict[str, Tensor]:
        """Return the prompt, the format of this task's rows, and every earlier task's pseudo-samples, token ids."""
        from latent_sweep.methods._pseudo_samples import padded

        longest = self._settings.sample_length
        written = [[samples.format.write(row, longest) for row in samples.rows] for samples in self._samples]
        pseudo_samples = {f"pseudo_samples.{position}": padded(ids) for position, ids in enumerate(written)}
        return super().finish() | self._format.tensors() | pseudo_samples

    def facts(self) -> dict[str, float]:
        """Return the pseudo-samples replayed, and the share of all drawn that was well-formed."""
        drawn = sum(samples.drawn for samples in self._samples)
        if not drawn:
            return {}
        well_formed = sum(samples.well_formed for samples in self._samples)
        replayed = sum(len(samples.rows) for samples in self._samples)
        return {"pseudo_samples": float(replayed), "well_formed_share": well_formed / drawn}
