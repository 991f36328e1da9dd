"""Explain faulty settings: translate pydantic's errors into what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from latent_sweep.security import quoted, redact

TRUTH = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
"""Common spellings of truth values, and how YAML writes them."""

Elsewhere = Callable[[str], str]
"""Returns where a setting of this name belongs; empty if unknown."""


def validation_faults(
    error: ValidationError, model: type[BaseModel], group: str = "", elsewhere: Elsewhere = lambda name: ""
) -> list[str]:
    """Return one line per faulty setting of `model`: its dotted path, what was found, what is expected, what to do.

    Args:
        group: the trial's group that `model` represents, e.g. `training`, if its values can be searched.
        elsewhere: called for keys that `model` does not have.
    """
    # each alternative of a union reports an error of its own; the shortest location has the whole value
    faults = sorted(error.errors(include_url=False), key=lambda fault: len(fault["loc"]))
    lines: dict[str, str] = {}
    for fault in faults:
        path, setting = _setting(model, fault["loc"])
        axis = group and f"{group}.{_dotted(path)}"
        lines.setdefault(_dotted(path), _explain(fault, setting, axis, elsewhere))
    return [f"{path}: {text}" for path, text in lines.items()]


def unknown_name(name: str, names: Collection[str], kind: str) -> str:
    close = close_name(name, names)
    return f"unknown {kind} {name!r}" + (f" (did you mean {close!r}?)" if close else "")


def close_name(name: str, names: Collection[str]) -> str | None:
    """Return the name that is spelled like `name`, or whose initials it is, as `lr` for `learning_rate`."""
    close = difflib.get_close_matches(name, names, n=1)
    initials = (each for each in names if "_" in each and "".join(word[:1] for word in each.split("_")) == name)
    return close[0] if close else next(initials, None)


def group_advice(content: Any, kind: type[BaseModel]) -> str:
    """Suggest the mapping to write when a group was given as a bare name, or as its first setting's text."""
    fields = kind.model_fields
    key = "name" if "name" in fields else next(iter(fields))
    takes_text = key == "name" or len(fields) == 1 or str in _alternatives(fields[key].annotation)
    fits = isinstance(content, str) and takes_text
    return f"Write {{{key}: {_written(content)}}}" if fits else ""


Location = tuple[int | str, ...]

KEY = "[key]"
"""Follows a mapping's key in pydantic's locations if the key itself is invalid."""


class _Setting(NamedTuple):
    """The class of its group, its type (None if the group has no such setting), and constraints on its values."""

    model: type[BaseModel]
    annotation: Any
    metadata: Sequence[Any]


def _setting(model: type[BaseModel], location: Location) -> tuple[Location, _Setting]:
    """Resolve a location to the setting and its path, without pydantic's names for the alternatives of a union."""
    annotation: Any = model
    metadata: Sequence[Any] = ()
    path: list[int | str] = []
    for part in location:
        annotation, metadata = _plain(annotation, metadata)
        inner = _inner_model(annotation)
        if inner is not None:
            model = inner
            field = model.model_fields.get(str(part))
            path.append(str(part))
            if field is None:
                return tuple(path), _Setting(model, None, ())
            annotation, metadata = field.annotation, field.metadata
        elif (entry := _entry(annotation, part)) is not None:
            path += [part] if part != KEY else []
            annotation, metadata = entry, ()
        else:
            break
    return tuple(path), _Setting(model, *_plain(annotation, metadata))


def _plain(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for extra in more:
            metadata = [*metadata, *(extra.metadata if isinstance(extra, FieldInfo) else [extra])]
    return annotation, metadata


def _alternatives(annotation: Any) -> list[Any]:
    return list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    kinds = (kind for kind in _alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next(kinds, None)


def _entry(annotation: Any, part: int | str) -> Any:
    alternatives = [each for each in _alternatives(annotation) if each is not NoneType]
    if len(alternatives) != 1:
        return None
    kind, arguments = _kind(alternatives[0]), get_args(_plain(alternatives[0], ())[0])
    if kind == "list" and isinstance(part, int):
        return arguments[0] if arguments else Any
    if kind == "mapping":
        return arguments[part != KEY] if arguments else Any
    return None


def _kind(annotation: Any) -> str:
    annotation, _ = _plain(annotation, ())
    origin = get_origin(annotation) or annotation
    if not isinstance(origin, type):
        return "plain"
    if issubclass(origin, (tuple, list)):
        return "list"
    return "mapping" if issubclass(origin, (Mapping, BaseModel)) else "plain"


def _dotted(location: Location) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.lstrip(".") or "the file"


def _explain(fault: Any, setting: _Setting, axis: str, elsewhere: Elsewhere) -> str:
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if setting.annotation is None and fault["type"] not in ("extra_forbidden", "invalid_key"):
        return f"found {shown(fault['input'])}; {fault['msg']}"  # a plugin's field under an alias
    if setting.annotation is None:
        name, names = str(fault["loc"][-1]), list(setting.model.model_fields)
        if name.isdigit():  # `{rate: 0,5}` parses as two keys, `rate` and `5`
            return "found a number instead of a key; write decimals with a point, as in 0.5, and lists in brackets"
        if location := _inside(name, setting.model) or elsewhere(name):
            return f"unknown key {name!r}; {location}"
        return f"{unknown_name(name, names, 'key')}; there are {', '.join(names)}"
    wanted = _joined(list(_wanted(setting.annotation, setting.metadata)))
    if fault["type"] == "missing":
        meaning = setting.model.model_fields[str(fault["loc"][-1])].description or wanted
        return f"missing; expected {wanted}. It is {' '.join(meaning.split())}"
    if fault["type"] == "finite_number":
        wanted = wanted.replace("a number", "a finite number")
    value = fault["input"]
    advice = _advice(value, setting.annotation, axis)
    return f"found {shown(value)}; expected {wanted}{f'. {advice}' if advice else ''}"


def _inside(name: str, model: type[BaseModel]) -> str:
    groups = {field: _inner_model(info.annotation) for field, info in model.model_fields.items()}
    paths = [f"{field}.{name}" for field, group in groups.items() if group is not None and name in group.model_fields]
    return f"did you mean {_joined(paths)}?" if paths else ""


def _joined(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} or {last}" if first else last


def shown(value: Any) -> str:
    words = {None: "null (no value)", True: "true", False: "false"}
    if isinstance(value, date):
        return str(value)
    return words[value] if value is None or isinstance(value, bool) else quoted(value)


# --- expected values -------------------------------------------------------------------------------------------------

WORDS: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
SEVERAL: Mapping[Any, str] = {int: "whole numbers", float: "numbers", str: "texts"}


def _wanted(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[str]:
    annotation, metadata = _plain(annotation, metadata)
    alternatives = _alternatives(annotation)
    if len(alternatives) > 1:
        for each in sorted(alternatives, key=lambda each: each is NoneType):
            yield from _wanted(each, metadata)
    elif annotation is NoneType:
        yield "null"
    elif get_origin(annotation) is Literal:
        choices = [shown(choice) if not isinstance(choice, str) else choice for choice in get_args(annotation)]
        yield choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    elif (kind := _kind(annotation)) == "list":
        (entry, *_) = get_args(annotation) or (Any,)
        yield f"a list of {_several(entry)}{_at_least(metadata)}"
    elif kind == "mapping":
        yield "a mapping"
    else:
        limits = _range(metadata) if annotation in (int, float) else _at_least(metadata)
        yield f"{WORDS.get(annotation, 'a value')}{limits}"


def _several(entry: Any) -> str:
    entry, metadata = _plain(entry, ())
    if entry in SEVERAL:
        return f"{SEVERAL[entry]}{_range(metadata)}"
    if _kind(entry) == "mapping":
        return "mappings"
    return " or ".join(_wanted(entry, metadata)).removeprefix("one of ") if get_origin(entry) is Literal else "values"


BOUNDS: Mapping[str, str] = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


def _range(metadata: Sequence[Any]) -> str:
    bounds = [
        f"{words} {getattr(each, name):g}" for name, words in BOUNDS.items() for each in metadata if hasattr(each, name)
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _at_least(metadata: Sequence[Any]) -> str:
    least = [each.min_length for each in metadata if hasattr(each, "min_length")]
    return ", not empty" if any(least) else ""


# --- advice ----------------------------------------------------------------------------------------------------------


def _advice(value: Any, annotation: Any, axis: str) -> str:
    types = [_plain(each, ())[0] for each in _alternatives(annotation)]
    lists = [each for each in types if _kind(each) == "list"]
    if (group := _inner_model(annotation)) is not None:
        return group_advice(value, group)
    if isinstance(value, (list, tuple)):
        if axis and not lists and len(value) > 1:
            return f"To try several values, list them under search.{axis}"
        return f"Write {_written(value[0])}" if len(value) == 1 and not lists and _is_plain(value[0]) else ""
    if lists and _fits(value, lists[0]):
        return f"Write [{_written(value)}]"
    if isinstance(value, str):
        return _advice_on_text(value.strip().lower(), types)
    if isinstance(value, float) and int in types and value.is_integer():
        return f"Write {value:.0f}"
    return f'Write "{_written(value)}", in quotes' if str in types and _is_plain(value) else ""


def _advice_on_text(text: str, types: Sequence[Any]) -> str:
    if bool in types and text in TRUTH:
        return f"Write {TRUTH[text]}"
    if {int, float} & set(types) and (number := _number(text)) is not None:
        return f"Write {number}, without quotes"
    return "Write null" if text == "none" and NoneType in types else ""


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, (dict, list, tuple))


def _written(value: Any) -> str:
    return redact(str(value).lower() if isinstance(value, bool) else str(value))[:80]


def _fits(value: Any, annotation: Any) -> bool:
    entry, _ = _plain((get_args(annotation) or (Any,))[0], ())
    choices = get_args(entry) if get_origin(entry) is Literal else ()
    return value in choices or entry is Any or (entry in SEVERAL and isinstance(value, entry))


def _number(text: str) -> str | None:
    plain = text.replace("_", "")
    try:
        float(plain)
    except ValueError:
        return None
    return plain if plain.lstrip("+-") not in ("nan", "inf", "infinity") else None
