"""What a benchmark's rows are like, task by task: what a sweep on it would refuse, and what is worth knowing before.

Near duplicates are inputs whose sets of shingles (three words in a row, in lower case) have a Jaccard similarity of 0.8
or more. They are found exactly and without comparing all with all: two sets that are so alike have one of their rarest
shingles in common, so each is looked up under the rarest fifth of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from latent_sweep.backbones.folder_checks import folder_faults
from latent_sweep.backbones.registry import EMBEDDED, BackboneSettings, family_of
from latent_sweep.data.prompts import LOST, split_prompts
from latent_sweep.data.schema import BenchmarkSettings, Split, load_benchmark
from latent_sweep.data.text_tokens import special_tokens
from latent_sweep.errors import ConfigError, DataError
from latent_sweep.metrics import normalize_answer
from latent_sweep.sweep.answer_checks import AnswerReport, other_form
from latent_sweep.sweep.data_checks import Case, Findings, TaskPrompts, check_rows, reader_of
from latent_sweep.sweep.plan import SOURCE_LENGTHS, SPLITS

SHINGLE = 3
"""Words in a shingle."""
ALIKE = 0.8
"""Jaccard similarity from which two inputs are near duplicates."""
LABELS_SHOWN = 8
MOST_LABELS = 50
"""Different answers up to which a task without `labels` counts as one of few answers."""
UNEVEN = 0.9
"""Share of a task's rows with one answer from which that is said."""
FEW_CHARACTERS = 2.0
"""Characters a token below which a language is expensive; English has four."""


@dataclass(frozen=True)
class Spread:
    """How long texts are, in tokens."""

    median: int
    most_are_within: int
    """95 % have at most so many."""
    longest: int

    def __str__(self) -> str:
        return f"{self.median:,} / {self.most_are_within:,} / {self.longest:,}"


@dataclass(frozen=True)
class SplitReport:
    """The rows of one split."""

    rows: int
    answers: int
    """Different ones."""
    labels: Mapping[str, int]
    """Rows by answer, the most frequent first; none where answers are many."""
    repeated: int
    """Rows whose input an earlier row has."""
    alike: int
    """Rows whose input is nearly that of an earlier row; equal ones are none of them."""
    empty: int
    """Rows whose answer holds no letter or digit."""
    beside_labels: int
    """Rows with an answer that is none of `labels`."""
    prompts: Spread | None = None
    """None, as all below, where the backbone's tokenizer is not on this machine."""
    targets: Spread | None = None
    cut: int | None = None
    """Prompts longer than `max_source_length`."""
    long: int | None = None
    """Targets longer than `max_target_length`."""
    unknown: int | None = None
    """Targets with a character that the tokenizer does not know."""
    unknown_prompts: int | None = None
    """The same of prompts."""
    spelled: int | None = None
    """Rows whose prompt or target has the name of a special token in it."""
    characters_per_token: float | None = None


@dataclass(frozen=True)
class TaskReport:
    """The rows of one task."""

    task: str
    metric: str
    splits: Mapping[str, SplitReport]
    shared: int
    """Test rows whose input is a training input."""
    alike: int
    """Test rows whose input is nearly a training input."""
    other_form: int
    """Test rows in another Unicode normalization form than most training rows, see `other_form`."""
    scores: AnswerReport | None
    """What answers score whose scores are known beforehand; None where the metric cannot be tried."""


@dataclass(frozen=True)
class BenchmarkReport:
    """A benchmark as one backbone reads it."""

    benchmark: str
    backbone: str
    max_source_length: int
    max_target_length: int
    loses: str
    """What prompts lose that are too long."""
    reads_tokens: bool
    """Whether the backbone's tokenizer is on this machine."""
    tasks: tuple[TaskReport, ...]
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for people."""
        limits = f"prompts of {self.max_source_length:,} tokens, answers of {self.max_target_length:,}"
        lines = [f"benchmark {self.benchmark} as {self.backbone} reads it: {limits}"]
        for task in self.tasks:
            lines += ["", f"{task.task} ({task.metric})"]
            for name, split in task.splits.items():
                lines += [f"  {name:<6}{text}" for text in self._split_lines(split)]
            counts = {"test inputs that are trained on": task.shared, "nearly so": task.alike}
            counts["rows in another Unicode form than training rows"] = task.other_form
            lines += _counted(counts, "  test  ")
            lines += [] if task.scores is None else [f"  score {self._score_line(task.scores)}"]
        lines.append("")
        lines += [f"fault: {fault}" for fault in self.faults] + list(self.warnings)
        counts = {"fault": len(self.faults), "warning": len(self.warnings)}
        lines.append(", ".join(f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items()))
        return lines

    def _score_line(self, scores: AnswerReport) -> str:
        written = f"{scores.attainable:.1%}" if self.reads_tokens else "not checked"
        return (
            f"on {scores.tried:,} test rows: references {scores.equal:.1%}, references as the tokenizer writes them "
            f"{written}, the most frequent training answer {scores.most_frequent[:40]!r} {scores.constant:.1%}, copies "
            f"of the input {scores.copied:.1%}, empty answers {scores.empty:.1%}"
        )

    def _split_lines(self, split: SplitReport) -> Iterable[str]:
        yield f"{split.rows:,} rows, {split.answers:,} different answers"
        if split.labels:
            shown = list(split.labels.items())[:LABELS_SHOWN]
            more = f" and {len(split.labels) - LABELS_SHOWN} more" if len(split.labels) > LABELS_SHOWN else ""
            yield f"answers: {', '.join(f'{label!r} {count:,}' for label, count in shown)}{more}"
        if split.prompts is not None:
            tokens = f"tokens (median / 95 % / longest): prompts {split.prompts}, targets {split.targets}"
            yield f"{tokens}; {split.characters_per_token:.1f} characters a token"
        counts = {
            f"prompts are cut ({self.loses})": split.cut,
            "targets are cut": split.long,
            "targets have characters that the tokenizer does not know": split.unknown,
            "prompts have characters that the tokenizer does not know": split.unknown_prompts,
            "prompts or targets spell a special token, which is read as text": split.spelled,
            "inputs are those of earlier rows": split.repeated,
            "inputs are nearly so": split.alike,
            "answers have no letter or digit": split.empty,
            "answers are none of `labels`": split.beside_labels,
        }
        yield from _counted(counts)


def _counted(counts: Mapping[str, int | None], before: str = "") -> list[str]:
    """One line with the counts that are not zero; none where all are."""
    found = "; ".join(f"{name}: {count:,}" for name, count in counts.items() if count)
    return [before + found] if found else []


def examine_benchmark(name: str, backbone: str = EMBEDDED) -> BenchmarkReport:
    """Look at every row of every task of a benchmark, as a sweep on it would before it starts, and more.

    Args:
        name: a packaged one, or the folder or file of one's own.
        backbone: whose tokenizer counts, as in a sweep file.

    Raises:
        ConfigError: there is no such benchmark or backbone, or the benchmark's file is not valid.
    """
    spec = load_benchmark(name)
    read_by = BackboneSettings(name=backbone)
    if faults := folder_faults(read_by):
        raise ConfigError("; ".join(faults))
    reader = reader_of(read_by)
    settings = BenchmarkSettings(
        name=name,
        max_source_length=SOURCE_LENGTHS[backbone if backbone in SOURCE_LENGTHS else family_of(backbone)],
        max_target_length=spec.max_target_length,
    )
    found, prompts, tasks = Findings(), TaskPrompts(), []
    for task in spec.tasks:
        case = Case(spec, {}, settings, task, backbone, reader, alone=True)
        check_rows(case, found, prompts)
        try:
            tasks.append(_task_report(case, found))
        except DataError as error:
            found.fault(str(error))
    prompts.check(found)
    if reader.tokenizer is None:
        found.warn(f"the tokenizer of {backbone} is not on this machine", "no token", "was counted")
    return BenchmarkReport(
        benchmark=spec.name,
        backbone=backbone,
        max_source_length=settings.max_source_length,
        max_target_length=settings.max_target_length,
        loses=f"they lose {LOST[settings.truncation]}",
        reads_tokens=reader.tokenizer is not None,
        tasks=tuple(tasks),
        faults=tuple(found.faults),
        warnings=tuple(found.warnings),
    )


def _task_report(case: Case, found: Findings) -> TaskReport:
    train, test = (case.rows[split] for split in SPLITS)
    known = {row.input.strip() for row in train}
    shared = [row.input.strip() in known for row in test]
    alike = near_duplicates([row.input for row in (*train, *test)])
    of_train, of_test = _alike_within(alike, 0, len(train)), _alike_within(alike, len(train), len(train) + len(test))
    across = {j - len(train) for i, j in alike if i < len(train) <= j}
    reports = {
        "train": _split_report(case, "train", len(of_train)),
        "test": _split_report(case, "test", len(of_test)),
    }
    nearly = sum(not shared[j] for j in across)
    try:
        scores = case.answer_report
    except ConfigError:  # a fault that `check_rows` has noted
        scores = None
    form = other_form(train, test)
    report = TaskReport(case.task.name, case.task.metric, reports, sum(shared), nearly, form, scores)
    _warn(case, report, found)
    return report


def _alike_within(pairs: Iterable[tuple[int, int]], first: int, end: int) -> set[int]:
    """The later rows of pairs that lie in a range."""
    return {j for i, j in pairs if first <= i and first <= j < end}


def _split_report(case: Case, split: Split, alike: int) -> SplitReport:
    rows, task = case.rows[split], case.task
    answers = Counter(case.answers(row, split)[0] for row in rows)
    few = task.labels is not None or (len(answers) <= MOST_LABELS and 2 * len(answers) <= len(rows))
    return SplitReport(
        rows=len(rows),
        answers=len(answers),
        labels=dict(answers.most_common()) if few else {},
        repeated=len(rows) - len({row.input.strip() for row in rows}),
        alike=alike,
        empty=sum(count for text, count in answers.items() if not normalize_answer(text)),
        beside_labels=sum(count for text, count in answers.items() if task.labels and text not in task.labels),
        **({} if case.reader.tokenizer is None else _lengths(case, split)),
    )


def _lengths(case: Case, split: Split) -> dict[str, Any]:
    """Count tokens of every prompt, those included that a backbone puts around it, and of every target.

    Returns:
        What `SplitReport` says of them.
    """
    rows, settings, tokenizer = case.rows[split], case.settings, case.reader.tokenizer
    parts = split_prompts(case.spec, case.task, split, settings, (row.input for row in rows))
    texts = ["".join(part) for part in parts]
    around, special = settings.max_source_length - case.prompt_room, special_tokens(case.reader)
    prompts = [len(found.ids) + around for found in tokenizer.encode_batch(texts, add_special_tokens=False)]
    answers = [case.answers(row, split)[0] for row in rows]
    targets = [found.ids for found in tokenizer.encode_batch(answers, add_special_tokens=False)]
    return {
        "prompts": _spread(prompts),
        "targets": _spread([len(ids) for ids in targets]),
        "cut": sum(length > settings.max_source_length for length in prompts),
        "long": sum(len(ids) > case.target_room(split) for ids in targets),
        "unknown": case.reader.alphabet.count(answers).texts,
        "unknown_prompts": case.reader.alphabet.count(texts).texts,
        "spelled": sum(
            special.spelled(f"{text}\n{answer}") is not None for text, answer in zip(texts, answers, strict=True)
        ),
        "characters_per_token": sum(map(len, texts)) / max(1, sum(prompts)),
    }


def _spread(lengths: Sequence[int]) -> Spread:
    median, most = np.percentile(lengths, [50, 95], method="higher")
    return Spread(int(median), int(most), max(lengths))


def _warn(case: Case, report: TaskReport, found: Findings) -> None:
    """Warn of what a sweep does not refuse, and whoever reads its scores should know."""
    name, task = case.name, report.task
    for split, of in report.splits.items():
        kind = case.kind(split)
        share, label = max(((count / of.rows, label) for label, count in of.labels.items()), default=(0.0, ""))
        if share >= UNEVEN:
            found.warn(f"{name}: nearly all answers are one", task, f"{label!r} {share:.0%} of {kind}")
        if of.repeated:
            found.warn(f"{name}: inputs stand there twice", task, f"{of.repeated:,} of {of.rows:,} {kind}")
        if of.alike:
            found.warn(f"{name}: inputs are nearly those of other rows", task, f"{of.alike:,} of {of.rows:,} {kind}")
        if of.beside_labels:
            found.warn(f"{name}: answers are none of `labels`", task, f"{of.beside_labels:,} of {of.rows:,} {kind}")
        if of.characters_per_token is not None and of.characters_per_token < FEW_CHARACTERS:
            topic = f"{case.name_read}: prompts have few characters a token, so that texts take many tokens"
            found.warn(topic, task, f"{of.characters_per_token:.1f} in {kind}")
    if report.other_form:
        topic = f"{name}: test rows are in another Unicode normalization form than training rows"
        found.warn(topic, task, f"{report.other_form:,} of {report.splits['test'].rows:,}")
    if report.alike:
        found.warn(
            f"{name}: test inputs are nearly training inputs",
            task,
            f"{report.alike:,} of {report.splits['test'].rows:,}",
        )


# --- near duplicates -------------------------------------------------------------------------------------------------


def near_duplicates(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs (i, j), i < j, of texts that are not equal and whose shingles have a Jaccard similarity of `ALIKE` or more.

    Of texts with the same shingles only the first one stands in pairs with others.
    """
    # any one order of all shingles would do; in this one those that are seen late come first, most of which are rare
    order: dict[tuple[str, ...], int] = {}
    sets: list[frozenset[int]] = []
    first: dict[frozenset[int], int] = {}
    index: dict[int, list[int]] = {}
    pairs = []
    for j, text in enumerate(texts):
        found = frozenset(order.setdefault(shingle, -len(order)) for shingle in _shingles(text))
        sets.append(found)
        if not found:
            continue
        if (same := first.setdefault(found, j)) != j:
            pairs += [(same, j)] if texts[same].strip() != texts[j].strip() else []
            continue
        rarest = sorted(found)[: len(found) - math.ceil(ALIKE * len(found)) + 1]
        near = {i for shingle in rarest for i in index.get(shingle, ()) if _may_be_alike(sets[i], found)}
        pairs += [(i, j) for i in sorted(near) if _similarity(sets[i], found) >= ALIKE]
        for shingle in rarest:
            index.setdefault(shingle, []).append(j)
    return pairs


def _shingles(text: str) -> set[tuple[str, ...]]:
    """The shingles of a text; of a text of fewer words all of it is one."""
    words = text.lower().split()
    return {tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))} if words else set()


def _may_be_alike(one: frozenset[int], other: frozenset[int]) -> bool:
    return min(len(one), len(other)) >= ALIKE * max(len(one), len(other))


def _similarity(one: frozenset[int], other: frozenset[int]) -> float:
    common = len(one & other)
    return common / (len(one) + len(other) - common)
