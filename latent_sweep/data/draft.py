"""A benchmark's file, written from the data that lies in a folder: tasks, metrics, labels and lengths, as far as seen.

Found are folders with `train` and `test` files (SAPT, GainLoRA and CL_Benchmark, TRACE, one's own), task files of
Super-NaturalInstructions, folders of saved data sets, and pairs of files that differ in `train` and `test` alone. What
is guessed stands in the file with what it was guessed from, for its reader to correct.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_sweep.data.examples import ID_COLUMN, Example, to_example
from latent_sweep.data.mapping import SUPERNI_TEST, RecordReader, SourceSpec
from latent_sweep.data.records import SUFFIXES, read_json, read_records
from latent_sweep.data.schema import BENCHMARK_FILE, BenchmarkSpec
from latent_sweep.data.shapes import MESSAGES, read_chat, shape_of
from latent_sweep.errors import ConfigError, DataError
from latent_sweep.metrics import first_equivalent, rouge_coverage
from latent_sweep.settings import parse_yaml, yaml_text

MOST_LABELS = 20
"""Different answers up to which a task is taken for a classification."""
LABEL_WORDS = 4
"""Words up to which an answer may be a label."""
SHARE = 0.95
"""Share of a task's targets that `max_target_length` fits."""
MARGIN = 8
"""Tokens added to it, for the end and since numbers and rare words have more tokens than are estimated."""
MOST_FILES = 2000
"""Files that are looked through; a folder with more is none of a benchmark."""

TRACE_METRICS: Mapping[str, str] = {"MeetingBank": "rouge_l", "Py150": "edit_similarity", "20Minuten": "sari"}
"""How TRACE scores those of its tasks whose answers do not say so."""

ANSWERS = (
    "output",
    "answer",
    "answers",
    "label",
    "labels",
    "target",
    "completion",
    "response",
    "summary",
    "highlights",
)
"""Columns that are answers, by name, the surest first."""
INPUTS = (
    ("premise", "hypothesis"),
    ("instruction", "input"),
    ("question", "sentence"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("context", "question"),
    ("passage", "question"),
    *((name,) for name in ("input", "prompt", "text", "sentence", "question", "document", "article", "dialogue")),
)
"""Columns that are inputs, by name, the surest first."""

_TRAIN = re.compile(r"(?i)(?<![a-z])train(ing)?(?![a-z])")
_OTHERS = ("test", "validation", "valid", "dev", "eval")
_NUMBER = re.compile(r"(?:.*#### *)?[-+$]?[\d,.]*\d%?\.?", re.DOTALL)
_CODE = re.compile(r"[{};]\s*$|\b(def|return|import|self)\b|[=!]=|\w\(.*\)|<EOL>", re.MULTILINE)


@dataclass
class _Found:
    """A task as it was found."""

    name: str
    folder: Path | None
    """Where `train` and `test` lie, of a task that needs no source."""
    source: dict[str, Any] | None
    instruction: str = ""
    remarks: list[str] = field(default_factory=list)
    """What its reader should know, or correct."""


@dataclass(frozen=True)
class _Seen:
    """What a task's rows are like."""

    rows: Mapping[str, int]
    labels: list[str] | None
    metric: str
    words: list[int]
    """Of every input."""
    tokens: list[int]
    """Of every target, as they are estimated."""
    line_breaks: bool
    """Whether a target has one."""


def draft_benchmark(folder: Path, output: Path) -> str:
    """The text of a benchmark's file for the data below a folder.

    Args:
        output: where the file will lie: its paths are relative to that.

    Raises:
        ConfigError: there is no data, or nothing that is known as a task.
        DataError: a file cannot be read; the message names it and the row.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder with data; found {'a file' if folder.exists() else 'nothing'}")
    home = Path(os.path.abspath(output)).parent  # without `..`, whose name is no folder's
    left_over: list[Path] = []
    found = _named(list(_tasks(folder, home, left_over)))
    if not found:
        raise ConfigError(
            f"{folder}: found no task; expected folders with train.json and test.json, task files of "
            f"Super-NaturalInstructions, or files such as nli_train.csv and nli_test.csv ({', '.join(SUFFIXES)})"
        )
    text = _text(found, [_seen(task, home) for task in found], home)
    if left_over:
        named = ", ".join(_relative(path, home) for path in left_over[:5])
        text += f"# Not used, since no file of train or of test belongs to it: {_one_line(named)}\n"
    BenchmarkSpec.model_validate({"name": home.name} | parse_yaml(text, str(output)))
    return text


# --- what there is ---------------------------------------------------------------------------------------------------


def _tasks(folder: Path, home: Path, left_over: list[Path]) -> Iterator[_Found]:
    """Yield the tasks below a folder; files of train or test that are of no task become `left_over`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != BENCHMARK_FILE)
    if len(files) > MOST_FILES:
        raise ConfigError(f"{folder}: holds more than {MOST_FILES:,} files; name the folder with the benchmark's data")
    saved = sorted(path.parent for path in files if path.name == "dataset_info.json")
    data = [p for p in files if p.suffix.lower() in SUFFIXES and not any(s in p.parents for s in saved)]
    data = [path for path in data if path.name != "dataset_dict.json"]
    groups: dict[tuple[Path, str], dict[str, list[Path]]] = {}
    parts = {path: _split_of(path) for path in [*data, *saved]}
    trained = {(path.parent, part[1]) for path, part in parts.items() if part is not None and part[0] == "train"}
    for path, part in parts.items():
        cut = part is not None and (path.parent, part[1]) in trained  # CL_Benchmark has them cut already
        if path.suffix == ".json" and not cut and (content := _superni(path)) is not None:
            yield _task_file(path, content, home)
        elif part is not None:
            split, rest = part
            groups.setdefault((path.parent, rest), {}).setdefault(split, []).append(path)
    for (parent, rest), splits in groups.items():
        if "train" in splits and len(splits) > 1:
            name = parent.parent.name if parent.name == "data" else parent.name  # as the hub lays out its data sets
            yield _pair(parent, rest or name, splits, home)
        else:
            left_over += [path for paths in splits.values() for path in paths]


def _split_of(path: Path) -> tuple[str, str] | None:
    """The split that the name of a file or folder tells of, and the rest of the name; None where it tells of none."""
    name = path.stem if path.is_file() else path.name
    for split in ("train", *_OTHERS):
        pattern = _TRAIN if split == "train" else re.compile(rf"(?i)(?<![a-z]){split}(?![a-z])")
        if pattern.search(name):
            return split, re.sub(r"-\d{5}-of-\d{5}$", "", pattern.sub("", name)).strip("-_. ")
    return None


def _superni(path: Path) -> dict[str, Any] | None:
    """The content of a task file of Super-NaturalInstructions; None where it is none."""
    if path.stem.lower() in ("train", *_OTHERS):
        return None
    content = read_json(path)
    known = isinstance(content, dict) and "Definition" in content and isinstance(content.get("Instances"), list)
    return content if known else None


def _task_file(path: Path, content: Mapping[str, Any], home: Path) -> _Found:
    """The task of a file of Super-NaturalInstructions."""
    instances = len(content["Instances"])
    if instances < 2:
        raise DataError(f"{path}: found {instances} instances; expected two or more, for training and for test rows.")
    found = _Found(path.stem, None, {"superni": _relative(path, home), "test": SUPERNI_TEST}, _definition(content))
    if instances < 2 * SUPERNI_TEST:
        found.source = {"superni": _relative(path, home), "test": max(1, instances // 5)}
        found.remarks.append(f"a fifth of {instances} instances are test rows; usual are the first {SUPERNI_TEST}")
    return found


def _definition(content: Mapping[str, Any]) -> str:
    told = content.get("Definition", "")
    return str(told[0] if isinstance(told, list) and told else told or "").strip()


def _pair(parent: Path, name: str, splits: Mapping[str, list[Path]], home: Path) -> _Found:
    """The task of a pair of files, or of shards; without a source where the folder's own layout has them."""
    train = splits["train"]
    first = read_records(train[0])
    place, record = next(first.each, ("", None))
    if not isinstance(record, dict):
        raise DataError(f"{train[0]}, {place or 'row 1'}: expected a row with columns.")
    mapping, remarks = _guessed(train[0], record, first.classes)
    found = _Found(name, None, None, remarks=remarks)
    others = [split for split in _OTHERS if split in splits]
    other = next((split for split in others if _has_answers(splits[split][0], mapping)), others[0])
    test = splits[other]
    if other != "test":
        why = "those of `test` have no answers" if "test" in others else "no file is called test"
        found.remarks.append(f"test rows are those of `{other}`: {why}")
    own = [
        path for path in (*train, *test) if path.name in {f"{s}{k}" for s in ("train", "test") for k in SUFFIXES[:2]}
    ]
    if len(own) == len(train) + len(test) == 2 and not mapping:
        found.folder = parent
    else:
        found.source = {"train": _relatives(train, home), "test": _relatives(test, home), **mapping}
    if train[0].suffix == ".json" and isinstance(content := read_json(train[0]), dict):
        found.instruction = _definition(content)
    return found


def _has_answers(path: Path, mapping: Mapping[str, str]) -> bool:
    """Whether the first row of a file can be read: of many data sets the test rows have no answers."""
    opened = read_records(path)
    reader = RecordReader(SourceSpec.model_validate({"train": "train", "test": "test", **mapping}), opened.classes)
    place, record = next(opened.each, ("", None))
    try:
        return record is not None and to_example(f"{path}, {place}", record, "", reader) is not None
    except DataError:
        return False


def _guessed(path: Path, record: Mapping[str, Any], classes: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Templates over the columns of a record, with remarks; none where rows are recognised without them."""
    shape = shape_of(record)
    if shape is None and read_chat(record.get(MESSAGES)) is not None:
        return {}, _not_read(_texts(record, (MESSAGES,)))
    if shape is not None and isinstance(record[shape.answer], (str, list)):
        more = _texts(record, shape.columns)
        pair = next((names for names in INPUTS if len(names) > 1 and more and {*names} == {*shape.inputs, *more}), None)
        if pair is not None:
            template = "\n".join(f"{{{column}}}" for column in pair)
            remark = f"`input` is guessed from the columns {', '.join(pair)}"
            return {"input": template, "output": f"{{{shape.answer}}}"}, [remark]
        return {}, _not_read(more)
    told = f"{path}: found the columns {', '.join(map(repr, record))}"
    usable = [column for column in record if not re.search(r"[{}\[\]!:]", column)]  # what a template can name
    lowered = {column.lower(): column for column in usable}
    texts = [column for column in usable if isinstance(record[column], str) and not ID_COLUMN.fullmatch(column)]
    answer = next((lowered[name] for name in ANSWERS if name in lowered), None)
    answer = answer or (min(texts, key=lambda column: len(record[column])) if len(texts) > 1 else None)
    if answer is None:
        raise ConfigError(f"{told}; none of them can be told for the answer")
    named = next((names for names in INPUTS if all(n in lowered and lowered[n] != answer for n in names)), None)
    inputs = [lowered[name] for name in named] if named else [column for column in texts if column != answer]
    if not inputs:
        raise ConfigError(f"{told}; none of them is text beside {answer!r}")
    value = record[answer]
    deep = f"{answer}[text]" if isinstance(value, dict) and "text" in value else answer
    template = "\n".join(f"{{{column}}}" for column in inputs)
    remarks = [f"`input` and `output` are guessed from the columns {', '.join(record)}"]
    remarks += _not_read(_texts(record, (*inputs, answer)))
    if isinstance(value, int) and answer not in classes:
        remarks.append(f"answers are numbers; say what they mean by `names: {{{answer}: [...]}}` in the source")
    return {"input": template, "output": f"{{{deep}}}"}, remarks


def _texts(record: Mapping[str, Any], read: Sequence[str]) -> list[str]:
    """Return the columns of text that are not read and do more than number rows."""
    texts = [column for column, value in record.items() if isinstance(value, (str, list, dict)) and column not in read]
    return [column for column in texts if not ID_COLUMN.fullmatch(column)]


def _not_read(columns: Sequence[str]) -> list[str]:
    told = f"not read: the columns {', '.join(columns)}; `input` and `output` templates in a source can name them"
    return [told] if columns else []


def _safe(name: str) -> str:
    """A name without what a file's name may not have."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-")[:90]


def _named(found: list[_Found]) -> list[_Found]:
    """Give every task a name that is safe and its own."""
    taken: set[str] = set()
    for task in found:
        name = _safe(task.name) or "task"
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        task.name = name if name not in taken else next(each for each in numbered if each not in taken)
        taken.add(task.name)
    return found


def _relative(path: Path, home: Path) -> str:
    return Path(os.path.relpath(path.absolute(), home)).as_posix()


def _relatives(paths: Sequence[Path], home: Path) -> str | list[str]:
    names = [_relative(path, home) for path in paths]
    return names[0] if len(names) == 1 else names


# --- what it is like -------------------------------------------------------------------------------------------------


def _seen(task: _Found, home: Path) -> _Seen:
    """Read all rows of a task."""
    answers: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    words, tokens, numbers, codes, unread, breaks = [], [], 0, 0, 0, False
    for split, row in _rows(task, home):
        rows[split] += 1
        words.append(len(row.input.split()))
        target = row.target
        if len(answers) <= MOST_LABELS:
            answers.update(row.references)
        tokens.append(tokens_about(target))
        numbers += bool(_NUMBER.fullmatch(target.strip()))
        codes += bool(_CODE.search(target))
        unread += rouge_coverage(target) < 0.5
        breaks |= "\n" in target.strip()
    if missing := [split for split in ("train", "test") if not rows[split]]:
        raise DataError(f"Task {task.name!r}: found no {missing[0]} rows; expected at least one.")
    count = rows.total()
    labels = sorted(answers) if _are_labels(answers, count) else None
    alike = first_equivalent(labels or ()) is not None
    if labels is not None and not alike:
        metric = "accuracy"
    elif numbers >= SHARE * count:
        metric = "number_match"
    elif 2 * codes > count:
        metric = "edit_similarity"
    else:
        metric = ("rouge_l_char" if 2 * unread > count else "rouge_l") if labels is None else "accuracy"
    labels = None if alike else labels  # a file may not list them; what counts as equal is told of its rows
    return _Seen(dict(rows), labels, TRACE_METRICS.get(task.name, metric), words, tokens, breaks)


def _are_labels(answers: Counter[str], rows: int) -> bool:
    short = all(0 < len(answer.split()) <= LABEL_WORDS and "\n" not in answer for answer in answers)
    return short and len(answers) <= min(MOST_LABELS, max(2, rows // 4))


def _rows(task: _Found, home: Path) -> Iterator[tuple[str, Example]]:
    source = None if task.source is None else SourceSpec.model_validate(task.source)
    for split, path in _files(task, home):
        opened = read_records(path)
        reader = None if source is None else RecordReader(source, opened.classes)
        for position, (place, record) in enumerate(opened.each):
            row = to_example(f"{path}, {place}", record, f"{position}", reader)
            if row is not None:
                of_test = source is not None and source.kind == "superni" and position < source.test_instances
                yield "test" if of_test else split, row


def _files(task: _Found, home: Path) -> Iterator[tuple[str, Path]]:
    if task.folder is not None:
        for split in ("train", "test"):
            paths = (task.folder / f"{split}{kind}" for kind in SUFFIXES[:2])
            yield split, next(path for path in paths if path.is_file())
        return
    source = SourceSpec.model_validate(task.source)
    if source.superni is not None:
        yield "train", home / source.superni
        return
    for split, names in (("train", source.train), ("test", source.test)):
        assert not isinstance(names, int), "only task files of Super-NaturalInstructions are cut"
        yield from ((split, home / name) for name in names)


def tokens_about(text: str) -> int:
    """How many tokens a text has, about: the larger of its bytes / 4 and its words."""
    return max(math.ceil(len(text.encode(errors="replace")) / 4), len(text.split()))


# --- the file --------------------------------------------------------------------------------------------------------


def _text(found: Sequence[_Found], seen: Sequence[_Seen], home: Path) -> str:
    longest = max(_share(of.tokens) for of in seen)
    broken = [task.name for task, of in zip(found, seen, strict=True) if of.line_breaks]
    lines = [
        "# Written from the data by `latent-sweep benchmark init`. What is guessed is said so: correct it here, and",
        "# look at what `latent-sweep benchmark check` says of this file before anything is learned from it.",
    ]
    if (name := _safe(home.name) or "benchmark") != home.name:
        lines.append(
            f"name: {yaml_text(name, one_line=True)}  # its folder's has characters that file names may not have"
        )
    if all(task.source and "superni" in task.source for task in found):
        lines.append("prompt: superni  # Definition: ..., Now complete the following example -, Input: ..., Output:")
    if broken:
        named = f"{', '.join(broken[:3])}{' and others' if len(broken) > 3 else ''}"
        lines.append(f"# No `stop` string: targets of {named} have line breaks, so an answer may go on behind one.")
    else:
        lines.append(r'stop: ["\n"]  # an answer ends at a line break: no target has one')
    lines += [
        f"# Fits {SHARE:.0%} of the targets of every task. Tokens are estimated, as the larger of UTF-8 bytes / 4 and",
        f"# words, and {MARGIN} more; `latent-sweep benchmark check` counts them with a backbone's own tokenizer.",
        f"max_target_length: {longest + MARGIN}",
        "tasks:",
    ]
    for task, of in zip(found, seen, strict=True):
        lines += _task_lines(task, of, home)
    return "\n".join(lines) + "\n"


def _task_lines(task: _Found, of: _Seen, home: Path) -> Iterator[str]:
    words = sorted(of.words)
    spread = f"{words[len(words) // 2]:,} / {_share(words):,} / {words[-1]:,}"
    rows = f"{of.rows.get('train', 0):,} training and {of.rows.get('test', 0):,} test rows"
    yield f"  # {rows}; inputs of {spread} words (median / 95 % / longest)"
    yield from (f"  # {_one_line(remark)}" for remark in task.remarks)
    yield f"  - name: {yaml_text(task.name, one_line=True)}"
    yield (
        f"    metric: {of.metric}  # guessed from the answers"
        if of.metric != TRACE_METRICS.get(task.name)
        else (f"    metric: {of.metric}  # as TRACE has it")
    )
    if of.metric == "accuracy" and of.labels is not None:
        yield f"    labels: {yaml_text(of.labels, one_line=True)}"
    told = (
        yaml_text(task.instruction, one_line=True) if task.instruction else '""  # what is asked, if inputs do not say'
    )
    yield f"    instruction: {told}"
    if task.source is not None:
        yield f"    source: {yaml_text(task.source, one_line=True)}"
    elif task.folder is not None:
        yield f"    folder: {yaml_text(_relative(task.folder, home), one_line=True)}"


def _one_line(text: str) -> str:
    """A text that a comment can hold."""
    return " ".join(text.split())


def _share(counts: Sequence[int]) -> int:
    """The smallest count that `SHARE` of all counts do not exceed."""
    return sorted(counts)[math.ceil(SHARE * len(counts)) - 1]
