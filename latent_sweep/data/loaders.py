"""Rows of a task: read, checked, cut to a subset, identified by a digest, and tokenized once for all trials.

Data lies in the layout of the public continual-learning repositories, `<folder>/<task>/train.json` and `test.json`:
an object with `Instances`, or a plain list, of `{input, output}` or `{sentence, label}`; or the same objects one a
line in `train.jsonl` and `test.jsonl`. Their `dev.json` is a copy of `test.json` and never read: validation rows are
taken out of the training rows. Rows of `{prompt, answer}`, as TRACE has them, are read too, and a task whose data looks
otherwise says so in its `source` (`mapping.py`, `records.py`, `hub.py`).
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import os
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latent_sweep.data import builtin
from latent_sweep.data.chat import Chat, chat_of
from latent_sweep.data.dataset_folders import checks, is_intact, locked, write_folder
from latent_sweep.data.examples import Example, check_labels, is_labelled, to_example
from latent_sweep.data.hub import hub_split, values_digest
from latent_sweep.data.mapping import RecordReader, SourceSpec
from latent_sweep.data.prompts import (
    CUE,
    LOST,
    Family,
    cue_of,
    definitions,
    encode_parts,
    encode_target,
    is_cut,
    split_prompts,
)
from latent_sweep.data.records import files_digest, files_state, read_records
from latent_sweep.data.schema import BenchmarkSettings, BenchmarkSpec, Split, TaskSpec, target_length
from latent_sweep.data.tokenized import TokenizedExamples
from latent_sweep.errors import DataError, MissingData
from latent_sweep.memo import memo_active, memoized
from latent_sweep.settings import content_hash, local_path
from latent_sweep.storage import versions
from latent_sweep.storage.files import committing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA_VARIABLE = "LATENT_SWEEP_DATA"
"""Environment variable that names the folder that contains `CL_Benchmark`."""

MAX_VALIDATION_ROWS = 500
KEPT_BYTES = 1 << 25
"""Rows of files up to this size are kept within one look; larger data may not fit into memory."""

logger = logging.getLogger(__name__)

WHOLE_PROMPT = 1 << 20
"""A limit in tokens that no prompt reaches."""


def load_examples(
    spec: BenchmarkSpec,
    task: TaskSpec,
    split: Split,
    settings: BenchmarkSettings,
    carve_validation: bool = False,
    source: str | None = None,
) -> list[Example]:
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
    total = 0

    def ranked() -> Iterator[tuple[bytes, int, Example]]:
        nonlocal total
        for total, row in enumerate(_source_rows(spec, task, split, settings, source), start=1):
            yield hashlib.sha256(f"{settings.subset_seed}/{row.id}".encode()).digest(), total, row

    limit = _limit(split, settings)  # of data larger than memory only the subset is ever held
    permuted = sorted(ranked()) if limit is None else heapq.nsmallest(limit, ranked())
    kept = permuted[_selection(total, task, split, settings, carve_validation)]
    return [row for _, _, row in sorted(kept, key=lambda entry: entry[1])]


def count_examples(
    spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings, carve_validation: bool = False
) -> int:
    """Count the rows that `load_examples` gives; where the data is not at hand, from the published size.

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
    scored, _ = _scored(split, settings)

    def find() -> str | None:
        if spec.layout == "builtin":
            return content_hash(_generated(task, scored))
        paths = _find_files(spec, task, scored, settings)
        return None if paths is None else _known_digest(tuple(paths), files_state(paths), task.source)

    return memoized(("digest", task.name, scored, settings.data_dir), (spec,), find)


def data_digest(
    spec: BenchmarkSpec,
    task: TaskSpec,
    split: Split,
    settings: BenchmarkSettings,
    carve_validation: bool = False,
    source: str | None = None,
) -> str:
    """Names exactly the rows and prompt texts that `load_examples` and `split_prompts` give.

    Args:
        source: The split's `source_digest`, where it was taken before.

    Raises:
        MissingData: The data is not at hand.
    """
    split, carve_validation = _scored(split, settings, carve_validation)
    source = source or source_digest(spec, task, split, settings)
    if source is None:
        raise MissingData(_not_at_hand(spec, task, split, settings))
    limit = _limit(split, settings)
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
    if (cue := cue_of(spec, task)) != CUE:
        content["cue"] = cue
    longest = settings.max_target_length or spec.max_target_length
    if task.max_target_length is not None and task.max_target_length < longest:
        content["target_length"] = task.max_target_length
    if spec.rows_version is not None:
        content["own_rows"] = spec.rows_version
    if (wordings := definitions(task, split, settings)) != (None,):
        content["definitions"] = wordings
    return content_hash(content)


def tokenized(
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
) -> TokenizedExamples:
    """The rows of `load_examples` as token ids, memory-mapped from a cache below `folder`.

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
        ConfigError: `settings.chat` asks for a chat template that the tokenizer does not have.
        StoreError: The cache cannot be written.
    """
    split, carve_validation = _scored(split, settings, carve_validation)
    max_target_length = target_length(settings, task)
    data = data_digest(spec, task, split, settings, carve_validation, source)
    chat = chat_of(tokenizer) if settings.chat else None
    target = folder / token_cache_name(
        data, settings, tokenizer_name, family, max_source_length, max_target_length, chat
    )
    if checks(target):  # what is there was put there whole: nobody has to wait to read it
        return TokenizedExamples(target)
    with committing(target), locked(target):
        if not is_intact(target, "token cache"):
            rows = load_examples(spec, task, split, settings, carve_validation, source)
            encode = partial(
                encode_parts,
                tokenizer=tokenizer,
                family=family,
                max_source_length=max_source_length,
                truncation=settings.truncation,
                bos=settings.bos,
                chat=chat,
            )
            parts = split_prompts(spec, task, split, settings, (row.input for row in rows))
            prompts = [encode(part) for part in parts]
            shorter = settings.truncation == "official"  # once tokenized again
            full = [
                part
                for part, ids in zip(parts, prompts, strict=True)
                if shorter or sum(map(len, ids)) == max_source_length
            ]
            if cut := sum(is_cut(part, tokenizer, family, max_source_length, settings.bos, chat) for part in full):
                limit = (
                    f"benchmark.max_source_length = {max_source_length:,} tokens and lose {LOST[settings.truncation]}"
                )
                counts = f"{cut:,} of {len(rows):,} {split} prompts"
                logger.warning("Benchmark %s, task %s: %s are longer than %s.", spec.name, task.name, counts, limit)
            columns: dict[str, list[Any]] = {
                "id": [row.id for row in rows],
                "prompt_ids": [ids.head + ids.input + ids.cue for ids in prompts],
                "input_ids": [ids.input for ids in prompts],
                "target_ids": [encode_target(row.target, tokenizer, family, max_target_length, chat) for row in rows],
                "references": [list(row.references) for row in rows],
            }
            _write(columns, target)
    return TokenizedExamples(target)


def truncation_identity(settings: BenchmarkSettings) -> str:
    """Return what names a truncation: `official` has a version of its own."""
    if settings.truncation == "official":
        return f"official {versions.OFFICIAL_TRUNCATION}"
    return settings.truncation


def token_cache_name(
    data: str,
    settings: BenchmarkSettings,
    tokenizer_name: str,
    family: Family,
    longest_source: int,
    longest_target: int,
    chat: Chat | None,
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
        "truncation": truncation_identity(settings),
        "bos": settings.bos,
    }
    if chat is not None:
        content["chat"] = chat.digest
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


def _find_files(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> list[Path] | None:
    """The files and folders that hold a split, or None where one of them is not at hand."""
    if task.source is None:
        found = _find_file(spec, task, split, settings)
        return None if found is None else [found]
    paths = _source_paths(task.source, split)
    return paths if all(path.exists() for path in paths) else None


def _source_paths(source: SourceSpec, split: Split) -> list[Path]:
    """The files and folders that a source names for a split; a hub's is loaded where it is not on this machine."""
    if source.kind == "hub":
        return [hub_split(source, source.split.test if split == "test" else source.split.train)]
    if source.superni is not None:
        return [Path(source.superni)]
    return list(map(Path, source.test if split == "test" and not isinstance(source.test, int) else source.train))


def _not_at_hand(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> str:
    root = data_folder(spec, settings)
    if task.source is not None:
        missing = next(path for path in _source_paths(task.source, split) if not path.exists())
        return f"Looked for {missing}: there is no such file. Correct the `source` of task {task.name!r} in {root}."
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
) -> Iterator[Example]:
    """All rows that a split may take, in the order of the data, one after the other."""
    if spec.layout == "builtin":
        pairs = _generated(task, split)
        _check_source(f"built-in task {task.name!r}, {split}", content_hash(pairs), source)
        yield from (Example(_row_id(task, split, i), text, (answer,)) for i, (text, answer) in enumerate(pairs))
        return
    paths = _find_files(spec, task, split, settings)
    if paths is None:
        raise MissingData(_not_at_hand(spec, task, split, settings))
    rows = _rows(tuple(paths), task, split, _own_labels(spec, task), source)
    yield from filter(is_labelled, rows) if _drops_unlabelled(task, split, settings) else rows


def _source_count(spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings) -> int:
    """Count the rows that `_source_rows` gives, or take the published number where the data is not at hand."""
    drops = _drops_unlabelled(task, split, settings)

    def find() -> int:
        if spec.layout == "builtin":
            return len(_generated(task, split))
        paths = _find_files(spec, task, split, settings)
        if paths is not None:
            counts = _count_rows(tuple(paths), files_state(paths), task, split, _own_labels(spec, task))
            return counts.labelled if drops else counts.all
        published = task.test_rows if split == "test" else task.train_rows
        if published is None:
            raise MissingData(_not_at_hand(spec, task, split, settings))
        return published

    return memoized(("count", task.name, split, settings.data_dir, drops), (spec,), find)


def _limit(split: Split, settings: BenchmarkSettings) -> int | None:
    return settings.test_per_task if split == "test" else settings.train_per_task


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


@cache
def _known_digest(paths: tuple[Path, ...], state: tuple[tuple[str, int, int], ...], source: SourceSpec | None) -> str:
    return _digest(paths, source)


def _digest(paths: Iterable[Path], source: SourceSpec | None) -> str:
    """Digest what lies there and what is taken of it; a file that is taken as it is has its own."""
    (first, *_) = paths = list(paths)
    found = values_digest(first) if source is not None and source.kind == "hub" else files_digest(paths)
    decides = source.decides() if source is not None else {}
    return content_hash([found, decides], length=64) if decides else found


@cache
def _count_rows(
    paths: tuple[Path, ...],
    state: tuple[tuple[str, int, int], ...],
    task: TaskSpec,
    split: Split,
    labels: tuple[str, ...] | None,
) -> _Counts:
    count = labelled = 0
    for row in _rows(paths, task, split, labels):
        count, labelled = count + 1, labelled + is_labelled(row)
    return _Counts(count, labelled)


def _rows(
    paths: tuple[Path, ...], task: TaskSpec, split: Split, labels: tuple[str, ...] | None, planned: str | None = None
) -> Iterable[Example]:
    """The rows of `_read_rows`; small files are read once within `memo_scope`: a plan counts rows, then checks them."""
    state = files_state(paths)
    if not memo_active() or sum(size for _, size, _ in state) > KEPT_BYTES:
        return _read_rows(paths, task, split, labels, planned)
    if planned is not None:
        _check_source(", ".join(map(str, paths)), _known_digest(paths, state, task.source), planned)
    return memoized(("rows", state, split, labels), (task,), lambda: list(_read_rows(paths, task, split, labels)))


def _read_rows(
    paths: Iterable[Path], task: TaskSpec, split: Split, labels: tuple[str, ...] | None, planned: str | None = None
) -> Iterator[Example]:
    """Read the checked rows of files: at least one, with ids that differ, and no answer beside `labels`."""
    paths = list(paths)
    said, state = ", ".join(map(str, paths)), files_state(paths)
    if planned is not None:
        _check_source(said, _digest(paths, task.source), planned)
    places: dict[str, str] = {}
    count = 0
    for path, place, row, has_own_id in _rows_of(paths, task, split):
        if labels is not None:
            check_labels(f"{path}, {place}", row, labels)
        if has_own_id:  # ids by position differ, and of data larger than memory no list of them is kept
            here = place if len(paths) == 1 else f"{path}, {place}"
            if row.id in places:
                raise DataError(
                    f"{path}, {place}: id {row.id!r} is also that of {places[row.id]}; expected unique ids."
                )
            places[row.id] = here
        count += 1
        yield row
    if not count:
        raise DataError(_no_rows(said, task, split))
    if files_state(paths) != state:
        raise DataError(f"{said}: was written again while it was read. Run the same command again.")


def _rows_of(paths: Iterable[Path], task: TaskSpec, split: Split) -> Iterator[tuple[Path, str, Example, bool]]:
    """Yield the rows that a task takes of files, each with its place and whether it has an id of its own."""
    source, position, taken = task.source, -1, 0
    tests = source.test_instances if source is not None and source.kind == "superni" else None
    """How many records at the head of one file are the test rows; None where each split has files of its own."""
    for path in paths:
        found = read_records(path, None if source is None else source.columns())
        reader = None if source is None else RecordReader(source, found.classes)
        said = str(path)
        for place, record in found.each:
            position += 1
            if tests is not None and not place.startswith("Instances["):
                raise DataError(f"{path}: is no task file of Super-NaturalInstructions; expected one with `Instances`.")
            if tests is not None and (position < tests) != (split == "test"):
                continue
            row = to_example(f"{said}, {place}", record, _row_id(task, split, position), reader)
            if row is None:
                continue
            yield path, place, row, (reader is None or reader.recognises) and "id" in record
            taken += 1
            if source is not None and taken == source.limit:
                return


def _no_rows(said: str, task: TaskSpec, split: Split) -> str:
    found = f"{said}: found no rows; expected at least one row for split {split!r}."
    if task.source is None:
        return found
    if task.source.where:
        return f"{found} Does any fit `where` of task {task.name!r}?"
    if task.source.kind == "superni":
        return f"{found} The first {task.source.test_instances} instances are test rows, and the others training rows."
    return found


def _own_labels(spec: BenchmarkSpec, task: TaskSpec) -> tuple[str, ...] | None:
    """Return the labels that answers must have; None for published files, whose several editions are taken as is."""
    return task.labels if spec.layout == "folder" else None


# The cache of token ids ----------------------------------------------------------------------------------------------


def _write(columns: dict[str, list[Any]], target: Path) -> None:
    """Write a cache of token ids. Its name says what the rows are, and is the fingerprint: a fingerprint of its own
    would pickle the table, which fails where pyarrow is installed outside of a `site-packages` folder.
    """
    from datasets import Dataset, DatasetInfo, Features, List, Value
    from datasets.table import InMemoryTable

    ids = List(Value("int32"))
    kinds = {"prompt_ids": ids, "input_ids": ids, "target_ids": ids, "references": List(Value("string"))}
    features = Features({"id": Value("string"), **kinds})
    table = InMemoryTable.from_pydict(columns, schema=features.arrow_schema)
    write_folder(Dataset(table, DatasetInfo(features=features), fingerprint=target.name), target)
