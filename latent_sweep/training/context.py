"""What learning and scoring share on one worker: the engine with the backbone, the bank, methods, tokens, the store."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch

from latent_sweep.adapters.bank import AdapterBank
from latent_sweep.backbones.architectures import device_name
from latent_sweep.backbones.identity import backbone_identity
from latent_sweep.backbones.loading import Backbone
from latent_sweep.data.chat import Chat, chat_of
from latent_sweep.data.loaders import WHOLE_PROMPT, load_examples, tokenized
from latent_sweep.data.schema import BenchmarkSettings, Split, scoring_metric
from latent_sweep.data.tokenized import TokenizedExamples
from latent_sweep.errors import ConfigError, DataError
from latent_sweep.methods import method_class
from latent_sweep.methods.protocol import Method, MethodContext, MethodSettings
from latent_sweep.metrics import score_rows
from latent_sweep.routing.combination import Combiner, Gates
from latent_sweep.routing.gaussian import ROUTED, PooledScatter, TaskGmm
from latent_sweep.settings import canonical_json
from latent_sweep.storage import versions
from latent_sweep.storage.failures import Phase
from latent_sweep.storage.predictions import KeepAnswers
from latent_sweep.storage.snapshots import Snapshot, SnapshotStorage
from latent_sweep.storage.storage import Storage
from latent_sweep.sweep.plan import SPLITS, Trial
from latent_sweep.training.engine import Engine
from latent_sweep.training.evaluation import Recent
from latent_sweep.training.events import Begun, Doing, Emit, say_nothing

log = logging.getLogger(__name__)


class Context:
    """All that trials on one backbone share while they are learned and scored; expensive parts load when needed.

    Args:
        trial: names the backbone and the tasks; what runs together agrees on both.
        storage: snapshots, factors, embeddings and tokens lie here, shared by all sweeps.
        engine: what computes; None is plain torch in this process.
        halved: what is done with half the rows in a pass; learning has its own setting for it.
        keep_answers: whose answers trials keep: those of every stage, or of the last one.
        emit: told of what takes a while, when it begins.
        keeps_features: whether methods keep features of prompts in the storage.
    """

    def __init__(
        self,
        trial: Trial,
        storage: Storage,
        engine: Engine | None = None,
        halved: frozenset[Phase] = frozenset(),
        keep_answers: KeepAnswers = "all",
        emit: Emit = say_nothing,
        keeps_features: bool = True,
    ):
        self.trial, self.tasks, self.storage = trial, trial.tasks, storage
        self.engine, self.halved, self.keep_answers = engine or Engine(), halved, keep_answers
        self.keeps_features = keeps_features
        self.store = SnapshotStorage(storage)
        self._emit, self._begun = emit, list[Begun]()
        self._folds: dict[str, PooledScatter] = {}
        self._gmms: dict[str, TaskGmm] = {}
        self._recent: dict[tuple[str, int], Recent] = {}
        self._tokens: dict[Any, TokenizedExamples] = {}
        self._constants: dict[tuple[BenchmarkSettings, str], float] = {}
        self._methods: dict[str, Method] = {}

    @contextmanager
    def doing(self, what: Doing, position: int | None = None) -> Iterator[None]:
        """Tell that this begins, and at the end of the block that the pack is back at what it is a part of."""
        self._begun.append(Begun(what, position))
        self._emit(self._begun[-1])
        try:
            yield
        finally:
            self._begun.pop()
            if self._begun:
                self._emit(self._begun[-1])

    @cached_property
    def backbone(self) -> Backbone:
        """The frozen model, loaded by every worker of the group at the same time."""
        settings = self.trial.settings.backbone
        if (found := backbone_identity(settings)) != self.trial.backbone:
            raise ConfigError(
                f"backbone {settings.name}: found {found} on {socket.gethostname()}; the sweep was planned with "
                f"{dict(self.trial.backbone)}. Nothing was learned or scored with it. Put back what was planned with "
                "and run the same command again, or end the sweep and start it again to plan it with what is there now."
            )
        if self.engine.group.leads:
            self.engine.group.order("load")
        with self.doing("loading the backbone"):
            backbone = self.engine.load(settings)
        if self.trial.settings.benchmark.chat:
            return self.engine.end_answers_with(chat_of(backbone.tokenizer).end)
        return backbone

    @cached_property
    def chat(self) -> Chat | None:
        """The chat template that prompts stand in, if the trials want one."""
        return chat_of(self.backbone.tokenizer) if self.trial.settings.benchmark.chat else None

    @cached_property
    def bank(self) -> AdapterBank:
        """Return the adapter bank of the backbone."""
        return AdapterBank(self.backbone.targets, self.backbone.prompt_embedding)

    def close(self) -> None:
        """Take what was added to the backbone off it again: another pack of this process may use it."""
        if "bank" in self.__dict__:
            self.bank.remove()

    def order(self, *what: Any) -> None:
        """Tell the other workers what all of them do now with the backbone, which all of them have by then."""
        _ = self.backbone
        self.engine.group.order(*what)

    def check(self, snapshots: Sequence[Snapshot]) -> None:
        """Hold snapshots that were found in the store against the backbone that is loaded here.

        Their lineages say what the backbone was called; a hub, a random generator or a conversion may have made other
        weights of it at another place.

        Raises:
            ConfigError: a snapshot was learned on other weights, or with another tokenizer.
        """
        here = backbone_facts(self.backbone)
        for snapshot in snapshots:
            if (there := snapshot.facts["backbone"]) != here:
                raise ConfigError(
                    f"backbone {self.trial.settings.backbone.name}: snapshot {snapshot.lineage} in {self.store.folder} "
                    f"was learned with {there}, but what is loaded on {socket.gethostname()} is {here}: one name, two "
                    "backbones. Install the versions that the snapshot's .json names, or use another run.storage."
                )

    def passes(self, phase: Phase) -> int:
        """Return the number of passes that a batch is cut into."""
        return 2 if phase in self.halved else 1

    def method(self, settings: MethodSettings, largest_rank: int) -> Method:
        """A method with these settings, able to train and to answer; made once.

        Args:
            largest_rank: of the sweep: factors computed for it serve every smaller one.
        """
        key = canonical_json([settings.identity(), largest_rank])
        if key not in self._methods:
            passes = self.passes("statistics")
            folder, keeps = self.storage.folder, self.keeps_features
            context = MethodContext(self.backbone, self.bank, folder, largest_rank, passes, keeps)
            with self.doing("preparing"):
                self._methods[key] = method_class(settings.name)(settings, context)
        return self._methods[key]

    def tokens(
        self, trial: Trial, position: int, split: Split, carve: bool = False, whole: bool = False
    ) -> TokenizedExamples:
        """The tokenized rows of a trial's task; found once.

        Args:
            carve: whether validation rows are taken out of the training rows (A31).
            whole: whether prompts are left as long as they are (A19).
        """
        b, task = trial.settings.benchmark, trial.tasks[position]
        key = (b, task.name, split, carve, whole)
        if key not in self._tokens:
            backbone = self.backbone
            with self.doing("tokenising", position):
                found = tokenized(
                    trial.spec,
                    task,
                    split,
                    b,
                    backbone.tokenizer,
                    backbone.tokenizer_digest,
                    backbone.traits.protocol,
                    WHOLE_PROMPT if whole else b.max_source_length,
                    self.storage.folder / "tokens",
                    carve_validation=carve,
                    source=trial.source(task, split),
                )
            self._check_rows(found, f"{split} rows of {task.name}", trial, whole)
            self._tokens[key] = found
        return self._tokens[key]

    def _check_rows(self, rows: TokenizedExamples, told: str, trial: Trial, whole: bool) -> None:
        """Refuse rows that the backbone cannot read: torch would only say that some index is out of range."""
        backbone, b = self.backbone, trial.settings.benchmark
        name = f"backbone.name: {trial.settings.backbone.name}"
        if (largest := rows.largest()) >= (known := backbone.model.get_input_embeddings().num_embeddings):
            raise ConfigError(
                f"{name} embeds {known:,} tokens, and its tokenizer makes the token {largest:,} of {told}. Save the "
                "model after resize_token_embeddings, or take the tokenizer that it was trained with "
                "(backbone.tokenizer)"
            )
        router = trial.settings.router
        by_input = router.combine in ROUTED and router.pool.scope == "input_only"
        if by_input and (place := rows.empty("input_ids")) is not None:
            raise DataError(
                f"router.pool.scope: input_only takes the mean over an input's tokens, and row {place:,} (0-based) of "
                f"the {told} has none. Use prompt, or leave such rows out of the benchmark"
            )
        if whole:  # for their embeddings alone
            return
        virtual, answer = len(trial.method().prompt(())), b.max_target_length
        prompt = rows.longest_prompt() + virtual
        needed = max(prompt, answer) if backbone.traits.encoder_decoder else prompt + answer
        if needed > backbone.positions:
            raise ConfigError(
                f"{name} has places for {backbone.positions:,} tokens, and {told} need {needed:,}: prompts of up to "
                f"{prompt:,}{f' ({virtual:,} virtual ones)' * bool(virtual)}, answers of {answer:,}. Lower "
                "benchmark.max_source_length or benchmark.max_target_length, or take another backbone"
            )

    def inputs(self, trial: Trial, position: int) -> list[str]:
        """The inputs of a trial's test rows as texts, which the tokenized rows do not hold."""
        task = trial.tasks[position]
        source = trial.source(task, "test")
        return [row.input for row in load_examples(trial.spec, task, "test", trial.settings.benchmark, source=source)]

    def constant(self, trial: Trial, position: int) -> float | None:
        """Return the score of the most frequent training answer as the answer to every test row of a trial's task.

        None if the rows are no longer on this machine: tokens of them may be cached.
        """
        b, task = trial.settings.benchmark, trial.tasks[position]
        key = b, task.name
        if key not in self._constants:
            try:
                train, test = (
                    load_examples(trial.spec, task, split, b, source=trial.source(task, split)) for split in SPLITS
                )
            except DataError as error:
                log.warning("the score of the most frequent answer of %s is not known: %s", task.name, error)
                return None
            ((most, _),) = Counter(row.target for row in train).most_common(1)
            answers, references, inputs = [most] * len(test), [row.references for row in test], [r.input for r in test]
            scores = score_rows(scoring_metric(b, task), answers, references, b.references, inputs)
            self._constants[key] = float(scores.mean())
        return self._constants[key]

    def combiner(self, trial: Trial, gates: Gates) -> Combiner:
        """Make the combiner that weighs a trial's snapshots.

        Args:
            gates: gives the weights where that is how its method mixes.
        """
        router = trial.settings.router
        whole = router.combine in ROUTED and not router.pool.truncate
        pooled: Callable[[int, Split], Any] = partial(self.tokens, trial, whole=whole)
        seed = trial.settings.seed
        folder, known = self.storage.folder, (self._folds, self._gmms)
        return Combiner(router, self.backbone, pooled, gates, len(trial.tasks), seed, folder, *known)

    def recent(self, trial: Trial, position: int) -> Recent:
        """The answers that a trial has given last to the test rows of its task at this position."""
        return self._recent.setdefault((trial.trial_id, position), {})


def backbone_facts(backbone: Backbone) -> dict[str, str]:
    """Return the digests of the loaded backbone's weights and tokenizer."""
    return {"weights": backbone.weights_digest, "tokenizer": backbone.tokenizer_digest}


def computed_with(backbone: Backbone) -> dict[str, str]:
    """Return what can move a number in its last digits: libraries, device and type."""
    dtype = str(backbone.model.dtype).split(".")[-1]
    return {**versions.libraries(), "device": device_name(backbone.device), "dtype": dtype}


def hardware(engine: Engine | None = None) -> dict[str, Any]:
    """Describe the machine and the engine that trials run on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}
    return found | (engine.facts() if engine else {})
