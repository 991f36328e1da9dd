"""Records of data files, one after the other: JSON, JSON lines, CSV, Parquet, Arrow, and folders of saved data sets.

Files of JSON lines and CSV are streamed, those of columns read a batch at a time or memory-mapped; only a list of JSON
is read whole. A cell of a CSV file is text as it stands there: `01` is no number and `NA` not nothing.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latent_sweep.data.dataset_folders import file_digest
from latent_sweep.errors import DataError, MissingData
from latent_sweep.settings import content_hash, read_regular

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")

AT_ONCE = 1000
"""Records of a file of columns that are taken into memory at a time."""


@dataclass(frozen=True)
class Records:
    """What a file holds."""

    each: Iterator[tuple[str, Any]]
    """Every record with its place, `line 3`, `[2]` or `row 3`."""
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the whole numbers in columns of class labels."""


class Repeating(dict[str, Any]):
    """A JSON object with a key that appears twice: the first value would be lost without a word."""

    fault = ""


def read_records(path: Path, columns: Collection[str] | None = None) -> Records:
    """Open a file of records.

    Args:
        columns: those that are read, of a file of columns; None reads all.

    Raises:
        DataError: it cannot be read, or is not what its name says; also while records are taken.
    """
    try:
        if path.is_dir():
            return _saved(path, columns)
        read_regular(path, 0)  # a pipe would be waited for
        kind = path.suffix.lower()
        if kind in (".parquet", ".arrow"):
            return _columnar(path, columns)
        readers = {".jsonl": _json_lines, ".csv": _separated, ".tsv": _separated, ".json": _json_list}
        if kind not in readers:
            known = ", ".join(SUFFIXES)
            raise DataError(f"{path}: expected a file of {known}, or a folder that Dataset.save_to_disk has written.")
        return Records(readers[kind](path))
    except FileNotFoundError as error:
        raise MissingData(f"Looked for {path}: there is no such file. Correct the task's `source`.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error


def files_state(paths: Collection[Path]) -> tuple[tuple[str, int, int], ...]:
    """What changes when one of these files, or a file of these folders, is written again.

    Raises:
        MissingData: one is not there.
    """
    try:
        files = [file for path in paths for file in _files(path)]
        return tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError as error:
        raise MissingData(f"Looked for {error.filename}: {error.strerror}. Correct the task's `source`.") from error


def files_digest(paths: Collection[Path]) -> str:
    """SHA-256 of a file, or of the names and digests of a folder's files, or of several of both.

    Raises:
        DataError: one cannot be read.
    """
    digests = [_digest(path) for path in paths]
    return digests[0] if len(digests) == 1 else content_hash(digests, length=64)


def _digest(path: Path) -> str:
    try:
        if path.is_dir():
            digests = {str(file.relative_to(path)): file_digest(file) for file in _files(path)}
            return content_hash(digests, length=64)
        read_regular(path, 0)
        return file_digest(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error


def _files(path: Path) -> list[Path]:
    """A file itself, or of a saved data set's folder those that are read: whoever filters it leaves caches there."""
    if not path.is_dir():
        return [path]
    with suppress(OSError, ValueError, LookupError, TypeError):
        state = json.loads((path / "state.json").read_bytes())
        return sorted({path / one["filename"] for one in state["_data_files"]} | {path / "dataset_info.json"})
    return sorted(file for file in path.rglob("*") if file.is_file())


# --- JSON ------------------------------------------------------------------------------------------------------------


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decoded(path, line, start)
            start += len(line)
            if text.strip():
                yield f"line {number}", _parse_json(path, text.removesuffix("\n"), first_line=number)


def _decoded(path: Path, content: bytes, start: int = 0) -> str:
    """Decode UTF-8, at the beginning of a file with or without the mark of its byte order."""
    try:
        return content.decode("utf-8" if start else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {start + error.start} is not UTF-8; save the file in UTF-8.") from error


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    content = read_json(path)
    place = ""
    if isinstance(content, Repeating):
        raise DataError(f"{path}: {content.fault}")
    if isinstance(content, dict) and "Instances" in content:
        content, place = content["Instances"], "Instances"
    if not isinstance(content, list):
        raise DataError(f"{path}: found {kind_of(content)}; expected a list of rows, or an object with `Instances`.")
    for position, record in enumerate(content):
        yield f"{place}[{position}]", record


def read_json(path: Path) -> Any:
    """The content of a JSON file; an object with a key twice is `Repeating`.

    Raises:
        DataError: it cannot be read, or is not JSON; the message has line and column.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    return _parse_json(path, _decoded(path, content))


def _parse_json(path: Path, text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}, line {line}, column {error.colno}: not valid JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, endless nesting
        raise DataError(f"{path}: not JSON that can be read: {_said(error)}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeating = Repeating(found)
    twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    repeating.fault = f"key {twice!r:.60} appears twice; expected each key once. Correct the file."
    return repeating


def kind_of(value: Any) -> str:
    """What messages call a value of JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# --- CSV -------------------------------------------------------------------------------------------------------------


def _separated(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row of a CSV file under the names in its first line; every cell is text.

    A column without a name, as pandas writes its index, is passed over.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the module's own limit is 128 KiB a cell
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            names = next(reader, [])
            named = [name for name in names if name]
            if not named or len(set(named)) < len(named):
                told = ", ".join(map(repr, names))
                raise DataError(f"{path}, line 1: expected a name for each column, each once; found {told:.200}.")
            for cells in reader:
                if cells and len(cells) != len(names):
                    place = f"{path}, line {reader.line_num}"
                    raise DataError(f"{place}: found {len(cells)} cells; expected {len(names)}, as in the first line.")
                if cells:
                    found = {name: cell for name, cell in zip(names, cells, strict=True) if name}
                    yield f"line {reader.line_num}", found
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not CSV that can be read: {_said(error)}.") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: is not UTF-8 near line {reader.line_num + 1}; save it in UTF-8.") from error


# --- columns ---------------------------------------------------------------------------------------------------------


def _columnar(path: Path, columns: Collection[str] | None) -> Records:
    """Open a Parquet file, or an Arrow file, which is memory-mapped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix.lower() == ".parquet":
            file = pq.ParquetFile(path)
            schema = file.schema_arrow
            batches = file.iter_batches(AT_ONCE, columns=_known(schema.names, columns))
        else:
            mapped = pa.memory_map(str(path))
            try:
                reader = pa.ipc.open_stream(mapped)  # as `datasets` writes them
                stream: Iterator[Any] = iter(reader)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(mapped)
                stream = (reader.get_batch(i) for i in range(reader.num_record_batches))
            schema = reader.schema
            batches = _pieces(stream, _known(schema.names, columns))
    except pa.ArrowException as error:
        raise DataError(f"{path}: is not a file of {path.suffix} that can be read: {_said(error)}.") from error
    return Records(_taken(path, batches, schema.names), _class_names(schema))


def _pieces(batches: Iterator[Any], columns: list[str]) -> Iterator[Any]:
    for batch in batches:
        for start in range(0, batch.num_rows, AT_ONCE):
            yield batch.select(columns).slice(start, AT_ONCE)


def _known(names: Collection[str], columns: Collection[str] | None) -> list[str]:
    """Return the columns to read; all of them where one is asked for that is not there, to be named in the error."""
    return [n for n in names if n in columns] if columns is not None and set(columns) <= set(names) else list(names)


def _taken(path: Path, batches: Iterator[Any], names: Collection[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa

    if len(set(names)) < len(names):
        raise DataError(f"{path}: two columns have the same name: {sorted(names)}; expected each name once.")
    number = 0
    try:
        for batch in batches:
            for record in _shortest(batch).to_pylist():
                number += 1
                yield f"row {number}", record
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}, after row {number}: cannot be read: {_said(error)}.") from error


def _shortest(batch: Any) -> Any:
    """Give numbers of 32 bits the digits that tell them apart: as doubles 0.1 would be 0.10000000149011612."""
    import pyarrow as pa

    for place, column in enumerate(batch.schema):
        if pa.types.is_float32(column.type):
            doubles = batch.column(place).cast(pa.string()).cast(pa.float64())
            batch = batch.set_column(place, column.name, doubles)
    return batch


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Names of class labels, which `datasets` keeps in the metadata of the files that it writes."""
    try:
        told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = told.get("info", {}).get("features", {})
        return {
            name: tuple(feature["names"])
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (ValueError, AttributeError, TypeError):
        return {}


def _said(error: Exception) -> str:
    """Return what a library says, without its full stop."""
    return str(error).strip().rstrip(".")


def _saved(path: Path, columns: Collection[str] | None) -> Records:
    """Open the folder of a saved data set; its arrow files are memory-mapped."""
    from datasets import ClassLabel, DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:  # whatever a folder that is none makes of it
        raise DataError(f"{path}: is no folder that Dataset.save_to_disk has written: {_said(error)}.") from error
    if isinstance(dataset, DatasetDict):
        known = ", ".join(str(path / name) for name in dataset)
        raise DataError(f"{path}: holds several splits; name one of them: {known}.")
    classes = {name: tuple(f.names) for name, f in dataset.features.items() if isinstance(f, ClassLabel)}
    read = dataset.select_columns(_known(dataset.column_names, columns)).with_format("arrow")
    return Records(_taken(path, read.iter(AT_ONCE), dataset.column_names), classes)
