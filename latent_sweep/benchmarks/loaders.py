"""Rows of a task: read, checked, cut to a subset, identified by a digest, and tokenized once for all trials.

Data lies in the layout of the public continual-learning repositories, `<folder>/<task>/train.json` and `test.json`:
an object with `Instances`, or a plain list, of `{input, output}` or `{sentence, label}`; or the same objects one a
line in `train.jsonl` and `test.jsonl`. Their `dev.json` is a copy of `test.json` and never read: validation rows are
taken out of the training rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from latent_sweep.benchmarks import builtin
from latent_sweep.benchmarks.prompts import (
    LOST,
    Family,
    definitions,
    encode_parts,
    encode_target,
    is_cut,
    split_prompts,
)
from latent_sweep.benchmarks.schema import BenchmarkSettings, BenchmarkSpec, Split, TaskSpec
from latent_sweep.errors import DataError, MissingData
from latent_sweep.security import quoted, redact
from latent_sweep.settings import canonical_json, content_hash, local_path, read_regular
from latent_sweep.store import versions
from latent_sweep.store.files import committing

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

DATA_VARIABLE = "LATENT_SWEEP_DATA"
"""Environment variable that names the folder that contains `CL_Benchmark`."""

MAX_VALIDATION_ROWS = 500

logger = logging.getLogger(__name__)

WHOLE_PROMPT = 1 << 20
"""A limit in tokens that no prompt reaches."""


@dataclass(frozen=True)
class Row:
    """One example of a task."""

    id: str
    """The file's own id, or task, split and position where it has none."""
    input: str
    references: tuple[str, ...]
    """Every accepted answer, at least one. Scoring with `single_first` reads the first one."""

    @property
    def target(self) -> str:
        """The answer to train on: one reference, chosen by a hash of the row's id, so the same in every trial."""
        digest = hashlib.sha256(self.id.encode()).digest()
        return self.references[int.from_bytes(digest[:8], "big") % len(self.references)]


def load_rows(
    spec: BenchmarkSpec,
    task: TaskSpec,
    split: Split,
    settings: BenchmarkSettings,
    carve_validation: bool = False,
    source: str | None = None,
) -> list[Row]:
    """The rows of one split of `task`, in the order of the file, after the subsets of `settings`.

    A subset is the first n rows of one fixed permutation, so smaller subsets lie within larger ones. Validation rows
    are a share of the training subset; `carve_validation` leaves them out of `train`. Where `settings.score_on` says so
    they are what `test` gives, here and in all functions of this module, and `train` is always without them.

    Args:
        source: The `source_digest` that the rows must have; None takes whatever lies there now.

    Raises:
        DataError: The data is missing, malformed or empty, or other than `source` says; the message names the file
            and the row.
    """
    split, carve_validation = _scored(split, settings, carve_validation)
    rows = _source_rows(spec, task, split, settings, source)
    ranked = sorted(rows, key=lambda row: hashlib.sha256(f"{settings.subset_seed}/{row.id}".encode()).digest())
    kept = {row.id for row in ranked[_selection(len(rows), task, split, settings, carve_validation)]}
    return [row for row in rows if row.id in kept]


def row_count(
    spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings, carve_validation: bool = False
) -> int:
    """Count the rows that `load_rows` gives; where the data is not at hand, from the published size.

    Raises:
        DataError: The data is malformed.
        MissingData: It is not at hand, and no size was published.
    """
    split, carve_validation = _scored(split, settings, carve_validation)
    selection = _selection(_source_count(spec, task, split, settings), task, split, settings, carve_validation)
    return selection.stop - selection.start


def source_digest(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> str | None:
    """The digest of all that a split's rows are taken from; None where the data is not at hand.

    A sweep takes it once, when it is planned, and readers hold what they read against it.
    """
    split, _ = _scored(split, settings)
    if spec.layout == "builtin":
        return content_hash(_generated(task, split))
    path = _find_file(spec, task, split, settings)
    return None if path is None else _file_digest(path, _file_state(path))


def data_digest(
    spec: BenchmarkSpec,
    task: TaskSpec,
    split: Split,
    settings: BenchmarkSettings,
    carve_validation: bool = False,
    source: str | None = None,
) -> str:
    """Names exactly the rows and prompt texts that `load_rows` and `split_prompts` give.

    Args:
        source: The split's `source_digest`, where it was taken before.

    Raises:
        MissingData: The data is not at hand.
    """
    split, carve_validation = _scored(split, settings, carve_validation)
    source = source or source_digest(spec, task, split, settings)
    if source is None:
        raise MissingData(_not_at_hand(spec, task, split, settings))
    limit = settings.test_per_task if split == "test" else settings.train_per_task
    carved = split == "validation" or (split == "train" and carve_validation)
    content = {
        "source": source,
        "version": spec.version,
        "task": task.name,
        "split": split,
        "prompt": spec.prompt,
        "instruction": task.instruction,
        "limit": limit,
        "subset_seed": settings.subset_seed if limit or carved else None,
        "validation_fraction": settings.validation_fraction if carved else None,
        "drop_unlabelled": _drops_unlabelled(task, split, settings),
    }
    if (wordings := definitions(task, split, settings)) != (None,):
        content["definitions"] = wordings
    return content_hash(content)


def tokenised(
    spec: BenchmarkSpec,
    task: TaskSpec,
    split: Split,
    settings: BenchmarkSettings,
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_name: str,
    family: Family,
    max_source_length: int,
    folder: Path,
    carve_validation: bool = False,
    source: str | None = None,
) -> Dataset:
    """The rows of `load_rows` as token ids, memory-mapped from a cache below `folder`.

    Columns: `id`, `prompt_ids` (whole prompt), `input_ids` (the part of it that is the row's input), `target_ids`
    and `references` (texts). The cache is named by everything that it depends on, built by one process while others
    wait, and built again where its files do not check against their digests.

    Args:
        tokenizer_name: Names the tokenizer and its revision; part of the cache's name.
        max_source_length: Longest prompt, in tokens.
        folder: Where caches of all tasks lie.
        source: The `source_digest` that the rows must have; None takes whatever lies there now.

    Raises:
        DataError: The data is missing or malformed, or other than `source` says.
        StoreError: The cache cannot be written.
    """
    split, carve_validation = _scored(split, settings, carve_validation)
    max_target_length = settings.max_target_length or spec.max_target_length
    data = data_digest(spec, task, split, settings, carve_validation, source)
    target = folder / tokens_name(data, settings, tokenizer_name, family, max_source_length, max_target_length)
    with committing(target), _locked(target):
        if not _is_intact(target):
            rows = load_rows(spec, task, split, settings, carve_validation, source)
            encode = partial(
                encode_parts,
                tokenizer=tokenizer,
                family=family,
                max_source_length=max_source_length,
                truncation=settings.truncation,
                bos=settings.bos,
            )
            parts = split_prompts(spec, task, split, settings, (row.input for row in rows))
            prompts = [encode(part) for part in parts]
            full = [part for part, ids in zip(parts, prompts, strict=True) if sum(map(len, ids)) == max_source_length]
            if cut := sum(is_cut(part, tokenizer, family, max_source_length, settings.bos) for part in full):
                limit = (
                    f"benchmark.max_source_length = {max_source_length:,} tokens and lose {LOST[settings.truncation]}"
                )
                counts = f"{cut:,} of {len(rows):,} {split} prompts"
                logger.warning("Benchmark %s, task %s: %s are longer than %s.", spec.name, task.name, counts, limit)
            columns: dict[str, list[Any]] = {
                "id": [row.id for row in rows],
                "prompt_ids": [ids.head + ids.input + ids.cue for ids in prompts],
                "input_ids": [ids.input for ids in prompts],
                "target_ids": [encode_target(row.target, tokenizer, family, max_target_length) for row in rows],
                "references": [list(row.references) for row in rows],
            }
            _write(columns, target)
        return _open(target)


def tokens_name(
    data: str,
    settings: BenchmarkSettings,
    tokenizer_name: str,
    family: Family,
    longest_source: int,
    longest_target: int,
) -> str:
    """The name of a cache of token ids: a hash of all that they depend on.

    Args:
        data: The `data_digest` of the rows.
    """
    content = {
        "format": versions.TOKENS,
        "data": data,
        "tokenizer": tokenizer_name,
        "family": family,
        "lengths": [longest_source, longest_target],
        "truncation": settings.truncation,
        "bos": settings.bos,
    }
    return content_hash(content)


# Where data lies -----------------------------------------------------------------------------------------------------


def data_folder(spec: BenchmarkSpec, settings: BenchmarkSettings) -> Path | None:
    """The folder that holds the tasks' folders, whether or not it exists; None where nothing says where data lies."""
    if spec.layout == "folder":
        return Path(spec.folder)
    base = settings.data_dir or os.environ.get(DATA_VARIABLE)
    if not base:
        return None
    root = local_path(base)
    return (root / "CL_Benchmark" if (root / "CL_Benchmark").is_dir() else root) / spec.folder


def _file_stem(split: Split) -> str:
    return "test" if split == "test" else "train"


def _find_file(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> Path | None:
    """The file that holds a split, or None where it is not at hand."""
    root = data_folder(spec, settings)
    if root is None:
        return None
    stem = root / task.folder / _file_stem(split)
    both = stem.with_suffix(".json"), stem.with_suffix(".jsonl")
    found = [path for path in both if path.exists() and not path.is_dir()]  # reading says what is no regular file
    if len(found) == 2:
        raise DataError(f"{found[0]}: {found[1].name} lies beside it; expected only one of them. Remove the other one.")
    return found[0] if found else None


def _data_file(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> Path:
    path = _find_file(spec, task, split, settings)
    if path is None:
        raise MissingData(_not_at_hand(spec, task, split, settings))
    return path


def _not_at_hand(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> str:
    root = data_folder(spec, settings)
    if root is None:
        found, root = "no data folder is set", Path("CL_Benchmark") / spec.folder
    else:
        found = "there is no such file"
    if spec.layout == "folder":
        advice = "Put the task's rows there, or correct the task's `folder` in the benchmark's file."
    else:
        advice = (
            f"Set benchmark.data_dir, or the environment variable {DATA_VARIABLE}, to the folder that contains "
            f"CL_Benchmark; or use `benchmark: {{name: builtin}}`, which needs no data."
        )
    return f"Looked for {root / task.folder / _file_stem(split)}.json (or .jsonl): {found}. {advice}"


# Which rows there are ------------------------------------------------------------------------------------------------


def _scored(split: Split, settings: BenchmarkSettings, carve_validation: bool = False) -> tuple[Split, bool]:
    """Return what `score_on` makes of a split, and of whether validation rows are left out of it."""
    if settings.score_on == "test":
        return split, carve_validation
    return ("train", True) if split == "train" else ("validation", False)


def _source_rows(
    spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings, source: str | None = None
) -> list[Row]:
    """All rows that a split may take, in the order of the file."""
    if spec.layout == "builtin":
        pairs = _generated(task, split)
        _check_source(f"built-in task {task.name!r}, {split}", content_hash(pairs), source)
        return [Row(_row_id(task, split, i), text, (answer,)) for i, (text, answer) in enumerate(pairs)]
    rows = _read_rows(_data_file(spec, task, split, settings), task, split, _own_labels(spec, task), source)
    return [row for row in rows if _is_labelled(row)] if _drops_unlabelled(task, split, settings) else rows


def _source_count(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> int:
    """Count the rows that `_source_rows` gives, or take the published number where the file is not at hand."""
    if spec.layout == "builtin":
        return len(_generated(task, split))
    path = _find_file(spec, task, split, settings)
    if path is not None:
        counts = _count_rows(path, _file_state(path), task, split, _own_labels(spec, task))
        return counts.labelled if _drops_unlabelled(task, split, settings) else counts.all
    published = task.test_rows if split == "test" else task.train_rows
    if published is None:
        raise MissingData(_not_at_hand(spec, task, split, settings))
    return published


def _check_source(where: str, found: str, planned: str | None) -> None:
    """Check that the bytes parsed are those planned with: else a stage would bear another stage's name."""
    if planned is not None and found != planned:
        raise DataError(
            f"{where}: is not what the sweep was planned with: its digest is {found}, expected {planned}. Nothing was "
            "learned or scored from it. Put the planned content back and run the same command again, or end the sweep "
            "and start it again to plan it with what is there now."
        )


def _selection(total: int, task: TaskSpec, split: Split, settings: BenchmarkSettings, carve_validation: bool) -> slice:
    """Select the positions of the fixed permutation of `total` rows that a split takes."""
    if split == "test":
        return slice(0, min(total, settings.test_per_task or total))
    taken = min(total, settings.train_per_task or total)
    if split == "train" and not carve_validation:
        return slice(0, taken)
    held_out = min(MAX_VALIDATION_ROWS, max(1, round(taken * settings.validation_fraction)))
    if held_out == taken:
        raise DataError(f"Task {task.name!r}: 1 training row; expected 2 or more, since validation rows are held out.")
    return slice(taken - held_out, taken) if split == "validation" else slice(0, taken - held_out)


def _drops_unlabelled(task: TaskSpec, split: Split, settings: BenchmarkSettings) -> bool:
    # Only test rows: the setting is inference-only, so it must not change what is trained on or selected by.
    return settings.drop_unlabelled and split == "test" and task.metric == "accuracy"


def _is_labelled(row: Row) -> bool:
    return any(character.isalnum() for reference in row.references for character in reference)


def _generated(task: TaskSpec, split: Split) -> list[tuple[str, str]]:
    if task.name not in builtin.GENERATORS:
        known = ", ".join(builtin.GENERATORS)
        raise DataError(f"There is no built-in task {task.name!r}; layout `builtin` has {known}.")
    return builtin.generate(task.name, "test" if split == "test" else "train")


def _row_id(task: TaskSpec, split: Split, position: int) -> str:
    return f"{task.name}-{_file_stem(split)}-{position}"


# Reading files -------------------------------------------------------------------------------------------------------


class _Counts(NamedTuple):
    all: int
    labelled: int


def _file_state(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written again; part of the key of what is remembered about it."""
    state = path.stat()
    return state.st_size, state.st_mtime_ns


@cache
def _file_digest(path: Path, state: tuple[int, int]) -> str:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error


@cache
def _count_rows(
    path: Path, state: tuple[int, int], task: TaskSpec, split: Split, labels: tuple[str, ...] | None
) -> _Counts:
    rows = _read_rows(path, task, split, labels)
    return _Counts(len(rows), sum(map(_is_labelled, rows)))


def _read_rows(
    path: Path, task: TaskSpec, split: Split, labels: tuple[str, ...] | None, source: str | None = None
) -> list[Row]:
    """The checked rows of a file; at least one, with ids that differ, and no answer beside `labels`."""
    rows: list[Row] = []
    places: dict[str, str] = {}
    for position, (place, record) in enumerate(_read_records(path, source)):
        row = _check_row(f"{path}, {place}", record, _row_id(task, split, position))
        if labels is not None:
            _check_labels(f"{path}, {place}", row, labels)
        if row.id in places:
            raise DataError(f"{path}, {place}: id {row.id!r} is also that of {places[row.id]}; expected unique ids.")
        places[row.id] = place
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: found no rows; expected at least one row for split {split!r}.")
    return rows


def _read_records(path: Path, source: str | None = None) -> Iterator[tuple[str, Any]]:
    """Each record of a file with its place in it."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    if source is not None:
        _check_source(str(path), hashlib.sha256(content).hexdigest(), source)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save the file in UTF-8.") from error
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"line {number}", _parse_json(path, line, first_line=number)
        return
    content = _parse_json(path, text)
    place = ""
    if isinstance(content, _Repeating):
        raise DataError(f"{path}: {content.fault}")
    if isinstance(content, dict) and "Instances" in content:
        content, place = content["Instances"], "Instances"
    if not isinstance(content, list):
        raise DataError(f"{path}: found {_kind(content)}; expected a list of rows, or an object with `Instances`.")
    for position, record in enumerate(content):
        yield f"{place}[{position}]", record


def _parse_json(path: Path, text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}, line {line}, column {error.colno}: not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, endless nesting
        raise DataError(f"{path}: not JSON that can be read: {error}.") from error


class _Repeating(dict[str, Any]):
    """A JSON object with a key that appears twice: the first value would be lost without a word."""

    fault = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeating = _Repeating(found)
    twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    repeating.fault = f"key {twice!r:.60} appears twice; expected each key once. Correct the file."
    return repeating


def _check_row(where: str, record: Any, default_id: str) -> Row:
    if isinstance(record, _Repeating):
        raise DataError(f"{where}: {record.fault}")
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {_kind(record)}; expected an object with `input` and `output`.")
    text_key, answer_key = ("sentence", "label") if "sentence" in record else ("input", "output")
    missing = [key for key in (text_key, answer_key) if key not in record]
    if missing:
        raise DataError(f"{where}: `{'` and `'.join(missing)}` missing; found the keys {sorted(record)}.")
    text, answer, row_id = record[text_key], record[answer_key], record.get("id", default_id)
    if not isinstance(text, str):
        raise DataError(f"{where}: `{text_key}` is {_kind(text)}; expected a string.")
    references = answer if isinstance(answer, list) else [answer]
    if not references or not all(isinstance(reference, str) for reference in references):
        raise DataError(
            f"{where}: `{answer_key}` is {_kind(answer)}: {quoted(answer, 60)}; expected a string or strings."
        )
    if type(row_id) not in (str, int):
        raise DataError(f"{where}: `id` is {_kind(row_id)}; expected a string or a whole number.")
    if any(_HALF_PAIR.search(part) for part in (str(row_id), text, *references)):
        raise DataError(f"{where}: found half of a surrogate pair, which UTF-8 cannot hold; expected whole characters.")
    return Row(str(row_id), text, tuple(references))


def _own_labels(spec: BenchmarkSpec, task: TaskSpec) -> tuple[str, ...] | None:
    """Return the labels that answers must have; None for published files, whose several editions are taken as is."""
    return task.labels if spec.layout == "folder" else None


def _check_labels(where: str, row: Row, labels: tuple[str, ...]) -> None:
    unknown = [reference for reference in row.references if reference not in labels]
    if unknown and _is_labelled(row):
        known = redact(", ".join(map(repr, labels)))
        raise DataError(
            f"{where}: the answer {quoted(unknown[0], 60)} is none of the task's labels: {known:.200}. "
            "Correct the row, or `labels` in the benchmark's file."
        )


_HALF_PAIR = re.compile("[\ud800-\udfff]")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# The cache of token ids ----------------------------------------------------------------------------------------------

_DIGESTS = "sha256.json"


def _write(columns: dict[str, list[Any]], target: Path) -> None:
    """Writes columns as a dataset folder with the digests of its files; the rename at the end commits it."""
    from datasets import Dataset, Features, List, Value

    ids = List(Value("int32"))
    kinds = {"prompt_ids": ids, "input_ids": ids, "target_ids": ids, "references": List(Value("string"))}
    features = Features({"id": Value("string"), **kinds})
    partial = target.with_suffix(".partial")
    _remove(partial)
    with _no_progress_bars():
        Dataset.from_dict(columns, features=features).save_to_disk(str(partial))
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(partial.iterdir())}
    (partial / _DIGESTS).write_text(canonical_json(digests), encoding="utf-8")
    partial.rename(target)


def _is_intact(target: Path) -> bool:
    """Whether a cache folder is complete and unchanged; a damaged one is reported and set aside."""
    if not target.exists():
        return False
    try:
        digests = json.loads((target / _DIGESTS).read_text(encoding="utf-8"))
        found = {name: hashlib.sha256((target / name).read_bytes()).hexdigest() for name in digests}
        if found and found == digests:
            return True
    except (OSError, ValueError, TypeError):
        pass
    damaged = target.with_suffix(".damaged")
    logger.warning("The token cache %s is damaged; it is set aside as %s and built again.", target, damaged.name)
    _remove(damaged)
    target.rename(damaged)
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        yield


def _open(target: Path) -> Dataset:
    from datasets import load_from_disk

    return load_from_disk(str(target), keep_in_memory=False)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()
