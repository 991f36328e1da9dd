"""What would spoil a score, found before anything is learned: faults where nothing sensible can come out, or warnings.

`check_sweep` serves `latent-sweep plan` and the start of a run. It counts tokens where the backbone's tokenizer lies on
this machine; where it does not, `check_pack` does so in the trial, before its first task.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from latent_sweep.backbones.families import Protocol
from latent_sweep.backbones.registry import BackboneSettings, family_of
from latent_sweep.backbones.tokenizers import tokenizer_at_hand
from latent_sweep.data.chat import Chat
from latent_sweep.data.examples import Example
from latent_sweep.data.loaders import count_examples, data_digest, data_folder, load_examples, source_digest
from latent_sweep.data.prompts import (
    FRAMES,
    LOST,
    PromptParts,
    cue_of,
    definitions,
    encode_parts,
    in_chat,
    split_prompts,
)
from latent_sweep.data.schema import (
    Allowance,
    BenchmarkSettings,
    BenchmarkSpec,
    Split,
    TaskSpec,
    scoring_metric,
    stop_of,
    target_length,
)
from latent_sweep.data.text_tokens import tokenize
from latent_sweep.errors import ConfigError, DataError, MissingData
from latent_sweep.memo import memo_scope
from latent_sweep.metrics import cut_answer, metric_source, normalize_answer
from latent_sweep.routing.gaussian import ROUTED
from latent_sweep.security import quoted
from latent_sweep.settings import canonical_json, content_hash
from latent_sweep.storage.files import write_file
from latent_sweep.sweep.answer_checks import SPOILED_SHARE, AnswerReport, TaskAnswers, examine_answers, problems
from latent_sweep.sweep.config import Sweep, fault_report
from latent_sweep.sweep.plan import SPLITS, Pack, Trial
from latent_sweep.sweep.readable import Alphabet, alike, ends

log = logging.getLogger(__name__)

SAMPLE = 8
"""Texts that are counted in tokens to know how many characters a token has in others like them."""

OWN_CUE = re.compile(r"(?:\n([^\n]{1,30}[:：])|(\w+[:：]))\s*$")
"""What an input ends in that asks for an answer: a short line, or a word, with a colon behind it."""

INVISIBLE_ENDS = re.compile(r"^[\u00ad\u200b-\u200f\u2060\ufeff]|[\u00ad\u200b-\u200f\u2060\ufeff]$")
"""Zero-width characters and byte order marks at an end of an answer; inside one, some scripts need them."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""Control characters but tab and line feed."""

UNKNOWN_SHARE = 0.25
"""Share of the characters of a task's prompts, or of its targets, above which unknown ones are a fault."""

CHECKS_VERSION = 6
"""Raised when `check_pack` would find something else in the same rows."""


class Findings:
    """The faults and warnings found, each once. Warnings that differ in their tasks only become one line."""

    def __init__(self) -> None:
        self.faults: dict[str, None] = {}
        self._tasks: dict[str, dict[str, list[str]]] = {}
        self._examples: dict[str, str] = {}

    def fault(self, text: str) -> None:
        """Note a fault: nothing sensible can come out."""
        self.faults[text] = None

    def warn(self, topic: str, task: str, count: str, example: str = "") -> None:
        """Note a warning: what is not as it seems, how much of it there is in a task, and an example."""
        counts = self._tasks.setdefault(topic, {}).setdefault(task, [])
        counts += [count] if count not in counts else []
        self._examples.setdefault(topic, example)

    @property
    def warnings(self) -> list[str]:
        """Return one line for each topic."""
        return [self._line(topic, tasks) for topic, tasks in self._tasks.items()]

    def _line(self, topic: str, tasks: Mapping[str, Sequence[str]]) -> str:
        counts = "; ".join(f"{task} {', '.join(found)}" for task, found in tasks.items())
        example = self._examples[topic]
        return f"warning: {topic}: {counts}{f'; e.g. {example}' if example else ''}"


@memo_scope()
def check_sweep(sweep: Sweep, trials: Sequence[Trial], folder: Path | None = None) -> list[str]:
    """List the remarks on a sweep before it runs, one line each: warnings, and what could not be checked yet.

    Args:
        folder: a run's storage, where the trials find noted what they need not count again.

    Raises:
        ConfigError: listing every fault.
    """
    found = Findings()
    for trial in {trial.training_id: trial for trial in trials}.values():
        if _can_count(trial) and _check_validation(trial, found):
            _check_steps(trial, found)
    counted: list[str] = []
    unread: dict[str, None] = {}
    prompts = TaskPrompts()
    for case in _cases(trials):
        if case.reader.tokenizer is None:
            unread[case.backbone] = None
        if check_rows(case, found, prompts) and folder is not None:
            counted.append(case.key)
    prompts.check(found)
    for case in _cases(filter(_routes_by_inputs, trials)):
        _check_inputs(case, found)
    if found.faults:
        raise fault_report(sweep.source, list(found.faults))
    if folder is not None:
        _note(counted, folder)
    later = f"note: the tokenizer of {', '.join(unread)} is not on this machine; trials count tokens before they learn"
    return found.warnings + [later] * bool(unread)


def _routes_by_inputs(trial: Trial) -> bool:
    router = trial.settings.router
    return router.combine in ROUTED and router.pool.scope == "input_only"


def check_pack(pack: Pack, reader: Reader, folder: Path) -> None:
    """Count the targets of all tasks with the backbone's own tokenizer, unless that was done before for the same rows.

    What is found is logged; how many prompts are cut is said when they are tokenized.

    Args:
        folder: the storage, where it is noted.

    Raises:
        DataError: listing every fault.
    """
    found = Findings()
    counted = []
    for case in _cases(pack.trials, reader):
        if not _marker(case.key, folder).exists():
            _check_targets(case, found)
            _check_empty(case, found)
            _check_answers(case, found)
            _check_room(case, found)
            _check_unknown(case, found)
            _check_alike(case, found)
            counted.append(case.key)
    if counted:
        prompts = TaskPrompts()
        for case in _cases(pack.trials, reader):
            prompts.add(case)
        prompts.check(found)
    for warning in found.warnings:
        log.warning("%s", warning.removeprefix("warning: "))
    if found.faults:
        raise DataError("; ".join(found.faults))
    _note(counted, folder)


def _marker(key: str, folder: Path) -> Path:
    return folder / "tokens" / f"{key}.checked"


def _note(keys: Iterable[str], folder: Path) -> None:
    """Note that these cases need not be counted again."""
    for path in (_marker(key, folder) for key in keys):
        if not path.exists():
            write_file(path, b"")


@memo_scope()
def missing_rows(trials: Iterable[Trial]) -> dict[str, str]:
    """Say, by benchmark and task, which rows are not on this machine, and where they were looked for.

    Of published rows `check_sweep` says nothing: they may be there on the machines that run it.
    """
    found: dict[str, str] = {}
    seen: dict[tuple[int, int], Trial] = {}
    for trial in trials:
        benchmark = trial.settings.benchmark
        if seen.setdefault((id(benchmark), id(trial.tasks)), trial) is not trial:
            continue
        for task, split in itertools.product(trial.tasks, SPLITS):
            try:
                data_digest(trial.spec, task, split, benchmark)
            except MissingData as error:
                found.setdefault(f"{trial.spec.name} {task.name}", str(error))
    return found


# --- steps -----------------------------------------------------------------------------------------------------------


def _can_count(trial: Trial) -> bool:
    """Whether the training rows of all tasks can be counted; where not, the look at the rows says why."""
    try:
        for task in trial.tasks:
            count_examples(trial.spec, task, "train", trial.settings.benchmark)
    except DataError:
        return False
    return True


def _check_steps(trial: Trial, found: Findings) -> None:
    """Warn of a warm-up longer than the run: it never reaches the learning rate that the sweep file names."""
    s, tasks = trial.settings, trial.tasks
    warmup = s.training.warmup_steps
    counted = {task.name: trial.steps(position) for position, task in enumerate(tasks)} if warmup else {}
    steps = {name: count for name, count in counted.items() if count}
    short = {name: count for name, count in steps.items() if count < warmup}
    if short and len(short) == len(steps):
        found.fault(
            f"training.warmup_steps: found {warmup}, but no task of {trial.spec.name} has more than "
            f"{max(short.values())} steps, so the learning rate would never reach training.learning_rate; use fewer, "
            "or more epochs"
        )
    for name, count in short.items() if len(short) < len(steps) else ():
        found.warn(
            f"benchmark {trial.spec.name}: tasks end before training.warmup_steps = {warmup}, below the learning rate",
            name,
            f"after {count:,} steps",
        )


def _check_validation(trial: Trial, found: Findings) -> bool:
    """Check that there are rows to hold out where they are asked for; return whether there are."""
    b, before = trial.settings.benchmark, len(found.faults)
    for task in trial.tasks if trial.settings.training.select == "best_validation" else ():
        try:
            count_examples(trial.spec, task, "train", b, carve_validation=True)
        except DataError as error:
            found.fault(f"training.select: best_validation holds rows out of every task. {error}")
        rows = count_examples(trial.spec, task, "train", b)
        if rows > 1 and round(rows * b.validation_fraction) < 1:
            found.warn(
                f"benchmark {trial.spec.name}: benchmark.validation_fraction = {b.validation_fraction:g} is less than "
                "a row, so one row is held out",
                task.name,
                f"1 of {rows}",
            )
    return len(found.faults) == before


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """The reading of texts by a backbone's tokenizer; without one, what can be said all the same."""

    family: Protocol
    tokenizer: Any
    """Of the package tokenizers, or None. What `encode_parts` asks of transformers' own it is asked for below."""
    chat: Chat | None = None
    """The chat template that prompts stand in; only transformers' own tokenizers have one."""

    @property
    def backend_tokenizer(self) -> Any:
        """Return the tokenizer, under the name that transformers gives it."""
        return self.tokenizer

    eos_token_id = 0
    """Any: ids are only counted."""

    @cached_property
    def bos_token_id(self) -> int | None:
        """Return the token that the tokenizer itself puts before a text, if it does."""
        encoding = self.tokenizer.encode("a")
        return encoding.ids[0] if encoding.ids and encoding.special_tokens_mask[0] else None

    def __call__(self, text: str, add_special_tokens: bool = True, **unused: Any) -> dict[str, Any]:
        """Tokenize a text: ids, and where in the text they stand."""
        encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def decode(self, ids: Sequence[int], **unused: Any) -> str:
        """Return the text of tokens, without special ones."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @cached_property
    def digest(self) -> str:
        """Content hash of the tokenizer."""
        return content_hash(self.tokenizer.to_str())

    @cached_property
    def alphabet(self) -> Alphabet:
        """Return the characters that the tokenizer knows."""
        return Alphabet(self)

    def longer(self, text: str, tokens: int) -> bool:
        """Whether a text has more than so many tokens."""
        if text.isascii() and len(text) < tokens:  # at least a character each, and one that stands before all
            return False
        return len(tokenize(self, text).ids) > tokens

    def characters_per_token(self, texts: Sequence[str]) -> float:
        """Return the mean number of characters per token of some of these texts."""
        sample = _sample(texts)
        return sum(map(len, sample)) / max(1, sum(len(tokenize(self, text).ids) for text in sample))

    def seen(self, text: str) -> str:
        """Return what a model that repeats `text` writes: T5's tokenizers make one space of a line break."""
        if self.tokenizer is not None:
            ids = tokenize(self, text).ids
            return str(self.tokenizer.decode(ids, skip_special_tokens=True)).lstrip()
        return " ".join(text.split()) if FRAMES[self.family].one_space else text.lstrip()

    def written(self, text: str, tokens: int | None = None, stop: Sequence[str] = ()) -> str:
        """Return what a model that repeats `text` can answer: as its tokenizer writes it, up to the limits."""
        if self.tokenizer is not None:
            ids = tokenize(self, text).ids[:tokens]
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        elif FRAMES[self.family].one_space:
            text = " ".join(text.split())
        return cut_answer(text, stop)

    def is_cut(self, text: str, stop: Sequence[str]) -> bool:
        """Whether generation would end before an answer that repeats `text` does, so that its score suffers."""
        if not any(mark in form for mark in stop for form in (text, " ".join(text.split()))):
            return False
        seen = kept = self.seen(text)
        for mark in stop:
            kept = kept.partition(mark)[0]
        if kept.strip() == seen.strip():
            return False
        return not normalize_answer(kept) or normalize_answer(kept) != normalize_answer(seen)


@dataclass(frozen=True)
class Case:
    """A task's rows as one backbone reads them, under one set of settings."""

    spec: BenchmarkSpec
    """The benchmark, as it was planned."""
    sources: Mapping[str, str | None]
    """`source_digest` of the rows by split, then; none where they are taken as they are."""
    settings: BenchmarkSettings
    task: TaskSpec
    backbone: str
    reader: Reader
    alone: bool
    """Whether messages need not name the backbone."""

    @property
    def name(self) -> str:
        """Return how messages about rows begin."""
        return f"benchmark {self.spec.name}"

    @property
    def name_read(self) -> str:
        """Return how messages about tokens begin."""
        return self.name if self.alone else f"{self.name} with {self.backbone}"

    @cached_property
    def rows(self) -> Mapping[str, list[Example]]:
        """The rows that trials read, by split."""
        return {
            split: load_examples(self.spec, self.task, split, self.settings, source=self.sources.get(split))
            for split in SPLITS
        }

    def kind(self, split: str) -> str:
        """Return what messages call the rows of a split."""
        if split == "train":
            return "training"
        return "held-out" if self.settings.score_on == "validation" else "test"

    def answers(self, row: Example, split: str) -> tuple[str, ...]:
        """Return the texts that a row is trained on, or scored against."""
        if split == "train":
            return (row.target,)
        return row.references[:1] if self.settings.references == "single_first" else row.references

    @cached_property
    def answer_report(self) -> AnswerReport:
        """What answers score whose scores are known beforehand.

        Raises:
            ConfigError: as `examine_answers`.
        """
        tests, b = self.rows["test"], self.settings
        return examine_answers(
            TaskAnswers(
                metric=scoring_metric(b, self.task),
                policy=b.references,
                labels=self.task.labels,
                train=[self.answers(row, "train")[0] for row in self.rows["train"]],
                references=[self.answers(row, "test") for row in tests],
                inputs=[row.input for row in tests],
                written=self._written,
            )
        )

    def _written(self, text: str, limited: bool) -> str:
        if not limited:
            return self.reader.written(text)
        return self.reader.written(text, self.target_room("test"), stop_of(self.spec, self.task))

    @property
    def prompt_room(self) -> int:
        """Return the number of tokens that a prompt's text may have."""
        if self.reader.chat is not None:
            return self.settings.max_source_length
        begins = self.settings.bos == "auto" and self.reader.bos_token_id is not None
        return self.settings.max_source_length - begins - FRAMES[self.reader.family].ends

    def target_room(self, split: str) -> int:
        """Return the number of tokens that a target's text may have: of what is trained on, as `encode_target` cuts."""
        ends = split == "train" and FRAMES[self.reader.family].keeps_eos
        return target_length(self.settings, self.task) - ends

    @property
    def key(self) -> str:
        """Names all that the counts depend on."""
        b = self.settings
        content = {
            "version": CHECKS_VERSION,
            "data": [data_digest(self.spec, self.task, split, b, source=self.sources.get(split)) for split in SPLITS],
            "allow": sorted(self.task.allow),
            "labels": list(self.task.labels or ()),
            "metric": [metric := scoring_metric(b, self.task), metric_source(metric)],
            "tokenizer": self.reader.digest,
            "family": self.reader.family,
            "stop": list(stop_of(self.spec, self.task)),
            "lengths": [b.max_source_length, b.max_target_length, b.truncation, b.bos, b.references],
        }
        if self.reader.chat is not None:
            content["chat"] = self.reader.chat.digest
        return content_hash(content)


def reader_of(backbone: BackboneSettings) -> Reader:
    """Make the reader that reads rows as a backbone does, as far as this machine has what it takes."""
    return Reader(family_of(backbone.name), tokenizer_at_hand(backbone))


def _cases(trials: Iterable[Trial], reader: Reader | None = None) -> Iterator[Case]:
    """Yield each case of these trials once; with `reader`, or with what is on this machine."""
    tasks: dict[tuple[BenchmarkSettings, BackboneSettings], dict[str, tuple[TaskSpec, Trial]]] = {}
    seen: dict[tuple[int, int, int], Trial] = {}
    """By the objects that tell cases apart, which the trial keeps alive."""
    one_spelling: dict[str, Any] = {"order": None, "tasks": None}
    for trial in trials:
        s = trial.settings
        if seen.setdefault((id(s.benchmark), id(s.backbone), id(trial.tasks)), trial) is not trial:
            continue
        settings = s.benchmark.model_copy(update=one_spelling)
        if settings.score_on == "test":
            settings = settings.model_copy(update={"validation_fraction": 0.1})
        backbone = s.backbone.model_copy(update={"device": "auto"})
        known = tasks.setdefault((settings, backbone), {})
        known |= {task.name: (task, trial) for task in trial.tasks if task.name not in known}
    # a chat template is read by transformers alone, so with one tokens are counted by the trials
    readers = {
        (b, chat): reader or (Reader(family_of(b.name), None) if chat else reader_of(b))
        for b, chat in {(b, settings.chat): None for settings, b in tasks}
    }
    alone = len({backbone.name for backbone, _ in readers}) == 1
    for (settings, backbone), found in tasks.items():
        for task, trial in found.values():
            sources: dict[str, str | None] = {split: trial.source(task, split) for split in SPLITS}
            yield Case(trial.spec, sources, settings, task, backbone.name, readers[backbone, settings.chat], alone)


# --- rows ------------------------------------------------------------------------------------------------------------


def check_rows(case: Case, found: Findings, prompts: TaskPrompts) -> bool:
    """Look at all rows of a case; returns whether they were there, and a tokenizer to read them with.

    Args:
        prompts: gets those of the case, to be compared with those of other tasks.
    """
    try:
        _check_numbers(case, found)
    except DataError as error:
        # published rows may be there on the machines that run it, as the plan says; a user's lie beside their file
        if not isinstance(error, MissingData) or _is_own(case):
            found.fault(str(error))
        return False
    prompts.add(case)
    _check_columns(case, found)
    _check_cue(case, found)
    _check_invisible(case, found)
    _check_shared(case, found)
    _check_definition(case, found)
    _check_targets(case, found)
    _check_empty(case, found)
    _check_labels(case, found)
    _check_answers(case, found)
    _check_references(case, found)
    if case.reader.tokenizer is None:
        return False
    _check_room(case, found)
    _check_prompts(case, found)
    _check_unknown(case, found)
    _check_alike(case, found)
    return True


class TaskPrompts:
    """The training prompts of several tasks, which a router can only tell apart if they differ."""

    def __init__(self) -> None:
        self._prompts: dict[BenchmarkSettings, dict[str, frozenset[int]]] = defaultdict(dict)
        self._cases: dict[str, Case] = {}

    def add(self, case: Case) -> None:
        """Add the training prompts of a case, with their instruction."""
        known = self._prompts[case.settings]
        if case.task.name not in known:
            texts = ("".join(parts) for parts in _prompts(case, "train"))
            known[case.task.name] = frozenset(hash(" ".join(text.split())) for text in texts)
            self._cases[case.task.name] = case

    def check(self, found: Findings) -> None:
        """Find tasks that have training prompts in common: a fault where one task has all prompts of another."""
        for known in self._prompts.values():
            for (one, mine), (other, theirs) in itertools.combinations(known.items(), 2):
                if common := len(mine & theirs):
                    fewest = min(len(mine), len(theirs))
                    self._report(self._cases[one], self._cases[other], common, fewest, found)

    def _report(self, one: Case, other: Case, common: int, fewest: int, found: Findings) -> None:
        meant = any("same_prompts" in case.task.allow for case in (one, other))
        names = f"{one.task.name} and {other.task.name}"
        if not meant and (common == fewest or _copied(one, other)):
            advice = f"take one of them out, or give each an `instruction` of its own{_place(other)}"
            found.fault(
                f"{one.name}, tasks {names}: their training prompts are the same ({common:,} of {fewest:,}), so a "
                f"router can only guess between them; {_permission(one, advice, 'same_prompts')}"
            )
        else:
            topic = f"{one.name}: tasks have training prompts in common, between which a router can only guess"
            found.warn(topic, names, f"{common:,} of {fewest:,}")


def _copied(one: Case, other: Case) -> bool:
    """Whether two tasks take their training rows from the same content; their subsets may be different ones."""
    first, second = (source_digest(case.spec, case.task, "train", case.settings) for case in (one, other))
    return first is not None and first == second


def _check_numbers(case: Case, found: Findings) -> None:
    """Warn where fewer rows than asked for are taken, which would happen without a word."""
    counts = {split: len(case.rows[split]) for split in SPLITS}
    limits = {"train": case.settings.train_per_task, "test": case.settings.test_per_task}
    if case.settings.score_on == "validation":  # those are taken out of the training rows
        counts["train"] += counts["test"]
        limits["test"] = None
    for split, rows in counts.items():
        if not rows:
            found.fault(
                f"{case.name}, task {case.task.name}: no {case.kind(split)} rows are left; expected at least one"
            )
        limit = limits[split]
        if limit and rows < limit:
            topic = f"{case.name}: fewer rows than benchmark.{split}_per_task = {limit:,}"
            found.warn(topic, case.task.name, f"{rows:,}")


def _check_columns(case: Case, found: Findings) -> None:
    """Say which columns of one's own rows reach neither prompt nor answer."""
    columns = dict.fromkeys(itertools.chain.from_iterable(row.unread for split in SPLITS for row in case.rows[split]))
    if columns and _is_own(case):
        topic = f"{case.name}: columns are not read (`input` and `output` templates in a task's `source` can name them)"
        found.warn(topic, case.task.name, ", ".join(columns))


def _check_cue(case: Case, found: Findings) -> None:
    """Find prompts that end in a cue of their own, behind which the benchmark's cue would stand as a second one."""
    cue, rows = cue_of(case.spec, case.task), case.rows["train"]
    if not cue.strip() or not _is_own(case):
        return
    tails = Counter((match[1] or match[2]).strip() for row in rows if (match := OWN_CUE.search(row.input)))
    for tail, count in tails.most_common(1):
        if 2 * count > len(rows):
            topic = (
                f"{case.name}: prompts end in a cue of their own, and {cue!r} follows "
                '(`cue: ""` in the benchmark\'s file, or in the task, leaves it out)'
            )
            found.warn(topic, case.task.name, f"{count:,} of {len(rows):,} training", repr(tail))


def _check_invisible(case: Case, found: Findings) -> None:
    """Find texts with characters that no reader sees and that tokenizers and metrics do not ignore."""
    if not _is_own(case):
        return
    for split in SPLITS:
        rows, kind = case.rows[split], case.kind(split)
        hidden = [answer for row in rows for answer in case.answers(row, split)[:1] if INVISIBLE_ENDS.search(answer)]
        if hidden:
            topic = f"{case.name}: answers begin or end with an invisible character; no answer without it is equal"
            found.warn(topic, case.task.name, f"{len(hidden):,} of {len(rows):,} {kind}", ascii(hidden[0])[:60])
        texts = (text for row in rows for text in (row.input, *case.answers(row, split)[:1]))
        if controls := [match[0] for text in texts if (match := CONTROLS.search(text))]:
            topic = f"{case.name}: texts hold control characters, such as NUL or a carriage return"
            found.warn(topic, case.task.name, f"{len(controls):,} {kind}", ascii(controls[0]))


def _check_shared(case: Case, found: Findings) -> None:
    """Test rows that were trained on say nothing about what was learned."""
    train, test = (case.rows[split] for split in SPLITS)
    known = {row.input.strip() for row in train}
    shared = sum(row.input.strip() in known for row in test)
    if not shared:
        return
    whole = case.settings.model_copy(update={"train_per_task": None, "test_per_task": None})
    sets = [
        {(row.input, row.references) for row in load_examples(case.spec, case.task, split, whole)} for split in SPLITS
    ]
    if sets[0] == sets[1]:
        found.fault(
            f"{case.name}, task {case.task.name}: test and training rows are the same{_place(case)}; expected test "
            "rows that are not trained on"
        )
        return
    count, problem = f"{shared:,} of {len(test):,}", "test inputs are training inputs too"
    if _is_fault(case, shared, len(test), "shared_inputs"):
        advice = _permission(case, f"leave them out of one of the two{_place(case)}", "shared_inputs")
        found.fault(f"{case.name}, task {case.task.name}: {count} {problem}; {advice}")
    else:
        found.warn(f"{case.name}: {problem}", case.task.name, count)


def _check_targets(case: Case, found: Findings) -> None:
    """Find targets that no answer can be equal to: generation ends at a stop string, and after so many tokens."""
    limit, stop = target_length(case.settings, case.task), stop_of(case.spec, case.task)
    for split in SPLITS:
        rows = case.rows[split]
        if stop:
            spoiled = _spoiled(case, rows, split, lambda text: case.reader.is_cut(text, stop))
            marks = canonical_json(stop)
            problem = f"hold one of the stop strings {marks}, where an answer ends"
            _tell(case.name, case, split, problem, spoiled, _stop_advice(case), "stopped_targets", found)
        if case.reader.tokenizer is not None:
            room = case.target_room(split)
            spoiled = _spoiled(case, rows, split, lambda text, room=room: case.reader.longer(text, room))
            problem = f"are longer than benchmark.max_target_length = {limit:,} tokens, where they are cut"
            advice = f"raise it to {_longest(case, split) + limit - room:,}, or shorten them" if spoiled.rows else ""
            _tell(case.name_read, case, split, problem, spoiled, advice, "long_targets", found)


def _longest(case: Case, split: Split) -> int:
    """Count the tokens of the longest text that a row is trained on, or scored against."""
    texts = {text for row in case.rows[split] for text in case.answers(row, split)}
    return max(len(case.reader(text, add_special_tokens=False)["input_ids"]) for text in texts)


def _check_empty(case: Case, found: Findings) -> None:
    """Find empty answers: an empty prediction is equal to them."""
    for split in SPLITS:
        spoiled = _spoiled(case, case.rows[split], split, lambda text: not text.strip())
        advice = f"give them an answer, or leave the rows out{_place(case)}"
        if case.task.metric == "accuracy" and split == "test":
            advice = f"leave them out by benchmark.drop_unlabelled: true, or {advice}"
        problem = "are empty, so that an empty answer is right"
        _tell(case.name, case, split, problem, spoiled, advice, "empty_answers", found)


def _check_labels(case: Case, found: Findings) -> None:
    """Find answers outside of `labels`; those without a letter or digit can be read, for they may be left out."""
    labels = case.task.labels
    if labels is None or not _is_own(case):
        return
    for split in SPLITS:
        rows = case.rows[split]
        outside = [text for row in rows for text in row.references if text not in labels]
        if outside and "empty_answers" not in case.task.allow:
            advice = _permission(case, f"add it, or leave the rows out{_place(case)}", "empty_answers")
            found.fault(
                f"{case.name}, task {case.task.name}: {len(outside):,} {case.kind(split)} answers are none of "
                f"`labels`, e.g. {outside[0]!r:.60}; {advice}"
            )


def _check_inputs(case: Case, found: Findings) -> None:
    """Find rows without an input, where that is what the router takes a mean of."""
    try:
        empty = {split: [row for row in case.rows[split] if not row.input.strip()] for split in SPLITS}
    except DataError:  # which is told of all cases
        return
    for split, rows in empty.items():
        if rows:
            found.fault(
                f"{case.name}, task {case.task.name}: {len(rows):,} of {len(case.rows[split]):,} {case.kind(split)} "
                "rows have no input, which is all that router.pool.scope: input_only reads; use prompt, or leave such "
                f"rows out{_place(case)}"
            )


def _check_answers(case: Case, found: Findings) -> None:
    """Find answers that score like others, that no model can write, and that are never trained."""
    try:
        report = case.answer_report
    except ConfigError as error:  # of a metric from outside
        found.fault(f"{case.name}, task {case.task.name}: {error}")
        return
    for problem in problems(report):
        name = case.name_read if problem.of_tokenizer else case.name
        if problem.is_fault and not set(problem.allowances) & set(case.task.allow):
            example = f", e.g. {problem.example}" * bool(problem.example)
            advice = _permission(case, problem.advice, *problem.allowances[:1])
            found.fault(f"{name}, task {case.task.name}: {problem.topic}: {problem.count}{example}; {advice}")
        else:
            found.warn(f"{name}: {problem.topic}", case.task.name, problem.count, problem.example)


def _check_references(case: Case, found: Findings) -> None:
    """Say of how many test rows the first answer alone counts, which is the rule of published benchmarks."""
    if not _is_own(case) or case.settings.references != "single_first":
        return
    rows = case.rows["test"]
    if several := sum(len(set(row.references)) > 1 for row in rows):
        topic = f"{case.name}: rows have several answers, of which the first alone counts"
        advice = "benchmark.references: max_over_refs counts them all"
        found.warn(f"{topic} ({advice})", case.task.name, f"{several:,} of {len(rows):,} {case.kind('test')}")


class _Spoiled(NamedTuple):
    rows: int
    of: int
    example: str


def _spoiled(case: Case, rows: Sequence[Example], split: str, is_spoiled: Any) -> _Spoiled:
    """Count the rows none of whose answers is whole."""
    answers = [case.answers(row, split) for row in rows]
    known = {text: is_spoiled(text) for text in dict.fromkeys(itertools.chain.from_iterable(answers))}
    found = [texts[0] for texts in answers if all(known[text] for text in texts)]
    return _Spoiled(len(found), len(rows), found[0] if found else "")


def _tell(
    name: str,
    case: Case,
    split: str,
    problem: str,
    spoiled: _Spoiled,
    advice: str,
    allowance: Allowance,
    found: Findings,
) -> None:
    """Note a fault where all rows are spoiled, or too many for a mistake in a few of them, else a warning."""
    if not spoiled.rows:
        return
    kind, task = case.kind(split), case.task.name
    example = f"{spoiled.example[:60]!r}{' ...' if len(spoiled.example) > 60 else ''}"
    if _is_fault(case, spoiled.rows, spoiled.of, allowance):
        share = "all" if spoiled.rows == spoiled.of else f"{spoiled.rows:,} of"
        advice = _permission(case, advice, allowance)
        found.fault(f"{name}, task {task}: {share} {spoiled.of:,} {kind} targets {problem}, e.g. {example}; {advice}")
    else:
        found.warn(f"{name}: targets {problem}", task, f"{spoiled.rows:,} of {spoiled.of:,} {kind}", example)


def _is_fault(case: Case, rows: int, of: int, allowance: Allowance) -> bool:
    """Whether so many spoiled rows are a fault, where the benchmark's file does not permit them.

    Long targets are none as long as there are others: in published tasks up to a fifth of them are cut.
    """
    most = of - 1 if allowance == "long_targets" else min(of - 1, SPOILED_SHARE * of)
    return rows > most and allowance not in case.task.allow


def _permission(case: Case, advice: str, allowance: Allowance | None = None) -> str:
    """Add to an advice, for a benchmark of one's own, how to say that what was found is meant."""
    permits = _is_own(case) and allowance is not None
    return f"{advice}; or, if it is meant, add `allow: [{allowance}]` to the task" if permits else advice


def _is_own(case: Case) -> bool:
    return case.spec.layout == "folder"


def _stop_advice(case: Case) -> str:
    where = f"{case.settings.name}" if _is_own(case) else "the benchmark's file"
    return f"change `stop` in {where}, or the targets{_place(case)}"


def _place(case: Case) -> str:
    if case.task.source is not None:
        return " in its `source`"
    folder = data_folder(case.spec, case.settings)
    return f" in {folder / case.task.folder}" if folder else ""


# --- prompts ---------------------------------------------------------------------------------------------------------


def _check_room(case: Case, found: Findings) -> None:
    """Find instructions that take the whole prompt and leave nothing of any input."""
    for split in SPLITS:  # what one prompt has no room for, none of the same definition has
        several = len(definitions(case.task, split, case.settings))
        for parts in itertools.islice(_long_prompts(case, split), several):
            _check_room_of(parts, case, found)


def _check_room_of(parts: PromptParts, case: Case, found: Findings) -> None:
    try:
        ids = _encoded(case, parts)
    except DataError as error:
        found.fault(f"{case.name_read}, task {case.task.name}: {error}")
        return
    if parts.input.strip() and not ids.input:
        limit = f"benchmark.max_source_length = {case.settings.max_source_length:,}"
        found.fault(
            f"{case.name_read}, task {case.task.name}: the instruction takes all of {limit} tokens, so prompts lose "
            f"their whole input; raise it, to {_longest_prompt(case):,} for whole prompts, or shorten the instruction"
        )


def _longest_prompt(case: Case) -> int:
    """Count the tokens that `benchmark.max_source_length` has to allow so that no prompt is cut."""
    chat, around = case.reader.chat, case.settings.max_source_length - case.prompt_room
    prompts = {"".join(p if chat is None else in_chat(p, chat)) for split in SPLITS for p in _long_prompts(case, split)}
    return max(len(case.reader(text, add_special_tokens=False)["input_ids"]) for text in prompts) + around


def _check_definition(case: Case, found: Findings) -> None:
    """Say where test prompts stay as they are though another definition is asked for: there is none to replace."""
    wanted = case.settings.prompts.definition
    if wanted != "verbatim" and definitions(case.task, "test", case.settings) == (None,):
        topic = f"{case.name}: benchmark.prompts.definition = {wanted} changes nothing where there is no instruction"
        found.warn(topic, case.task.name, f"{len(case.rows['test']):,} test rows")


def _encoded(case: Case, parts: PromptParts) -> Any:
    b, reader = case.settings, case.reader
    tokenizer: Any = reader
    return encode_parts(parts, tokenizer, reader.family, b.max_source_length, b.truncation, b.bos, reader.chat)


def _check_prompts(case: Case, found: Findings) -> None:
    """Find prompts that are cut: counted where there are few of them, else estimated from a sample's tokens."""
    limit = case.settings.max_source_length
    for split in SPLITS:
        rows = case.rows[split]
        prompts = ["".join(parts) for parts in _long_prompts(case, split)]
        if len(prompts) <= SAMPLE:
            count, about = sum(case.reader.longer(prompt, case.prompt_room) for prompt in prompts), ""
        else:
            characters = case.prompt_room * case.reader.characters_per_token(prompts)
            count, about = sum(len(prompt) > characters for prompt in prompts), "about "
        if count:
            topic = f"{case.name_read}: prompts are longer than benchmark.max_source_length = {limit:,} tokens and lose"
            found.warn(
                f"{topic} {LOST[case.settings.truncation]}",
                case.task.name,
                f"{about}{count:,} of {len(rows):,} {case.kind(split)}",
            )


def _check_unknown(case: Case, found: Findings) -> None:
    """Find prompts and targets with characters that the tokenizer does not know, or that it reads as nothing."""
    alphabet = case.reader.alphabet
    sample = [text for row in case.rows["train"] for text in (row.input, row.target) if text.strip()]
    if (nothing := [text for text in _sample(sample) if not tokenize(case.reader, text).ids]) and len(nothing) > 1:
        found.fault(
            f"{case.name_read}, task {case.task.name}: the tokenizer makes no token of {len(nothing)} of "
            f"{len(_sample(sample))} texts that were tried, e.g. {quoted(nothing[0], 40)}; its files are missing or "
            "damaged. Put the tokenizer into the backbone's folder, or name one as backbone.tokenizer"
        )
        return
    if alphabet.unknown_id is None:
        return
    for split in SPLITS:
        kind, rows = case.kind(split), case.rows[split]
        texts = {
            "prompts": ["".join(parts) for parts in _prompts(case, split)],
            "targets": [case.answers(row, split)[0] for row in rows],
        }
        for what, read in texts.items():
            count = alphabet.count(read)
            if not count.texts:
                continue
            share = f"{100 * count.share:.2g} % of characters"
            permitted = {"unknown_characters"} | ({"empty_answers"} if what == "targets" else set())
            if count.share > UNKNOWN_SHARE and permitted.isdisjoint(case.task.allow):
                advice = _permission(case, "take a backbone whose tokenizer knows the language", "unknown_characters")
                found.fault(
                    f"{case.name_read}, task {case.task.name}: the tokenizer does not know {count.share:.0%} of the "
                    f"characters of the {kind} {what}, e.g. {count.example!r}; expected at most {UNKNOWN_SHARE:.0%}. "
                    f"{advice[:1].upper()}{advice[1:]}"
                )
                continue
            topic = f"{case.name_read}: {what} hold characters that the tokenizer does not know"
            found.warn(topic, case.task.name, f"{count.texts:,} of {len(rows):,} {kind} ({share})", repr(count.example))


def _check_alike(case: Case, found: Findings) -> None:
    """Find prompts that differ as texts and are the same tokens: cut behind what they share, or unknown."""
    for split in SPLITS:
        prompts = _prompts(case, split)
        if split == "train" and len(prompts) > 1 and len(set(prompts)) == 1:
            found.fault(
                f"{case.name_read}, task {case.task.name}: all {len(prompts):,} training prompts are the same text, so "
                f"no answer can depend on the input. Correct the inputs{_place(case)}"
            )
            continue
        try:
            groups = alike(prompts, _Kept(case), lambda parts: tuple(map(tuple, _encoded(case, parts))))
        except DataError:  # no room for any input, which `_check_room` reports
            return
        count = sum(map(len, groups))
        if not count:
            continue
        limit = f"benchmark.max_source_length = {case.settings.max_source_length:,} tokens"
        if len(groups) == 1 and count == len(prompts):
            found.fault(
                f"{case.name_read}, task {case.task.name}: all {count:,} {case.kind(split)} prompts are the same "
                f"tokens, though their texts differ, because {limit} or the tokenizer leaves nothing of the "
                "differences. Raise it, put what all rows share into the task's `instruction`, or take a backbone "
                "whose tokenizer knows the language"
            )
        else:
            topic = f"{case.name_read}: prompts that differ are the same tokens, by {limit} or unknown characters"
            found.warn(topic, case.task.name, f"{count:,} of {len(prompts):,} {case.kind(split)}")


class _Kept:
    """What surely decides the tokens of a prompt, as text: a key that needs no tokens of its own."""

    def __init__(self, case: Case):
        self._case = case
        self._around: dict[tuple[str, str], int] = {}

    def __call__(self, parts: PromptParts) -> tuple[str, str]:
        """Return the prompt's head, and the part of its input that `truncation` surely keeps."""
        case, around = self._case, (parts.head, parts.cue)
        if around not in self._around:
            self._around[around] = sum(map(len, _encoded(case, PromptParts(parts.head, "", parts.cue))))
        room = case.settings.max_source_length - self._around[around]
        both = case.settings.truncation == "keep_ends"
        return parts.head, ends(case.reader.alphabet.squashed(parts.input), room - 2, both)


def _prompts(case: Case, split: Split) -> list[PromptParts]:
    return split_prompts(case.spec, case.task, split, case.settings, (row.input for row in case.rows[split]))


def _long_prompts(case: Case, split: Split) -> Iterator[PromptParts]:
    """Yield the prompts that may not fit: a token has a byte at least."""
    chat = case.reader.chat
    for parts in _prompts(case, split):
        whole = "".join(parts if chat is None else in_chat(parts, chat))
        if len(whole.encode()) >= case.prompt_room:
            yield parts


def _sample(texts: Sequence[str]) -> list[str]:
    """Evenly spread texts, or all of them where there are few."""
    count = min(SAMPLE, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]
