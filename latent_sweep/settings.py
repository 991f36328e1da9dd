"""The base class of all settings groups, strict YAML, and how settings become identities.

Each settings class is defined next to the class it configures (`RouterSettings` in `routing/gaussian.py`). Settings are
frozen, refuse unknown keys and never coerce: a string for a number is an error. Their files are strict YAML of bounded
size, so that refusing a hostile file takes seconds and a few hundred megabytes at most.

A group's class describes the resolved settings, with every value known. Fields that a sweep file may leave to a preset
or to the paper's protocol are marked. `as_written` derives the type of a group in a file, and `filled` resolves it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from functools import cache
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from latent_sweep.errors import ConfigError
from latent_sweep.memo import memoized
from latent_sweep.security import quoted

INFERENCE_ONLY: Any = {"inference_only": True}
"""Mark of a field that training never reads, as in `Field(json_schema_extra=INFERENCE_ONLY)`. Varying it costs no
training."""

NOT_IDENTITY: Any = {"not_identity": True}
"""Mark of a field that cannot change a result, such as a path or a speed setting; no identity contains it."""

FROM_PRESET: Any = {"from_preset": True}
"""Mark of a field that a sweep file may leave out or set to null; a preset, the paper's protocol or its default
supplies the value. Marks are joined with `|`."""


LEFT_OUT_AT_DEFAULT: Any = {"left_out_at_default": True}
"""Mark of a field that identities contain only if it differs from its default."""


class Settings(BaseModel):
    """A frozen, strict group of settings. Subclasses give each field a range and one sentence with its unit."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def identity(self) -> dict[str, Any]:
        """Return every setting that can change a result, as plain JSON values."""
        return self._content(frozenset({"not_identity"}))

    def training_identity(self) -> dict[str, Any]:
        """Return every setting that training reads."""
        return self._content(frozenset({"not_identity", "inference_only"}))

    def inference_identity(self) -> dict[str, Any]:
        """Return every setting that can change a result and that training does not read."""
        return _beyond(self.identity(), self.training_identity())

    def _content(self, dropped: frozenset[str]) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in _names(type(self), dropped)}
        for name, default in _optional(type(self)).items():
            if name in kept and kept[name] == default:
                del kept[name]
        plain = self.model_dump(
            mode="json", include={name for name, value in kept.items() if not isinstance(value, Settings)}
        )
        return {
            name: value._content(dropped) if isinstance(value, Settings) else plain[name]
            for name, value in kept.items()
        }


def _marks(field: FieldInfo) -> set[str]:
    return set(field.json_schema_extra) if isinstance(field.json_schema_extra, dict) else set()


@cache
def _names(kind: type[Settings], dropped: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name, field in kind.model_fields.items() if not dropped & _marks(field))


def identity_fields(kind: type[Settings]) -> frozenset[str]:
    return frozenset(_names(kind, frozenset(NOT_IDENTITY)))


@cache
def _optional(kind: type[Settings]) -> dict[str, Any]:
    fields = kind.model_fields.items()
    return {name: field.default for name, field in fields if "left_out_at_default" in _marks(field)}


def _beyond(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    beyond = {name: value for name, value in whole.items() if name not in part}
    inner = {name: _beyond(whole[name], part[name]) for name in part if isinstance(whole[name], dict)}
    return beyond | {name: rest for name, rest in inner.items() if rest}


def canonical_json(content: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal content gives equal text on every machine."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def content_hash(content: Any, length: int = 16) -> str:
    """Return the first `length` hexadecimal digits of the SHA-256 of `content`'s canonical JSON."""
    return text_hash(canonical_json(content), length)


def text_hash(text: str, length: int = 16) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def json_object(parts: Mapping[str, str]) -> str:
    """Return the canonical JSON of a mapping whose values are canonical JSON already."""
    return f"{{{','.join([f'{encode_basestring_ascii(key)}:{parts[key]}' for key in sorted(parts)])}}}"


def json_list(parts: Iterable[str]) -> str:
    """As `json_object`, for a list."""
    return f"[{','.join(parts)}]"


# --- as written, and resolved ----------------------------------------------------------------------------------------

Group = TypeVar("Group", bound=Settings)


@cache
def as_written(kind: type[Group]) -> type[Group]:
    """Return the type of a group in a sweep file, in which `FROM_PRESET` fields default to None."""
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if "from_preset" in _marks(field):
            plain: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
            info = Field(default=None, description=field.description, json_schema_extra=field.json_schema_extra)
            fields[name] = plain | None, info
        elif (inner := group_of(field)) and (written := as_written(inner)) is not inner:
            given = field.get_default(call_default_factory=True)
            default = ... if field.is_required() else written.model_validate(given.model_dump(exclude_unset=True))
            info = Field(default, description=field.description, json_schema_extra=field.json_schema_extra)
            fields[name] = written, info
    # the same name, since error messages contain it
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, **fields) if fields else kind


@memoized(lambda written, kind, *defaults: (written, kind, repr(defaults)))
def filled(written: Settings, kind: type[Group], *defaults: Mapping[str, Any]) -> Group:
    """Resolve a group: take each value as written, else from the first of `defaults`, else the field's default.

    None in a marked field counts as left out. Defaults have inner groups as mappings.
    """
    values = {name: value for layer in reversed(defaults) for name, value in layer.items()}
    for name, field in kind.model_fields.items():
        value = getattr(written, name)
        if inner := group_of(field):
            values[name] = filled(value, inner, *(layer[name] for layer in defaults if name in layer))
        elif name in written.model_fields_set and not (value is None and "from_preset" in _marks(field)):
            values[name] = value
    return kind.model_validate(values)


def group_of(field: FieldInfo) -> type[Settings] | None:
    inner = field.annotation
    return inner if isinstance(inner, type) and issubclass(inner, Settings) else None


LONGHAND: Mapping[str, str] = {"router.features": "layer"}
"""Settings that may also be written as a mapping with this key, as in `features: {layer: 6}`."""


def shorthand(key: str, value: Any) -> Any:
    """Return the value of a mapping with this key alone, and any other value as it is."""
    return value[key] if isinstance(value, dict) and list(value) == [key] else value


def flatten(path: str, value: Any) -> dict[str, Any]:
    """Return the settings in one value of an axis, by dotted path; the axis `trial` contains whole groups."""
    if path in LONGHAND:
        value = shorthand(LONGHAND[path], value)
    if not isinstance(value, dict):
        return {path: value}
    prefix = "" if path == "trial" else f"{path}."
    return {leaf: v for key, inner in value.items() for leaf, v in flatten(f"{prefix}{key}", inner).items()}


# --- paths ----------------------------------------------------------------------------------------------------------


def local_path(text: str | Path) -> Path:
    """Return the path that a user typed, with `~` expanded; ConfigError if no file can have it."""
    try:
        path = Path(text).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"found {quoted(str(text))}; no file can have this path: {reason}") from error
    return path


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe, which can be read only once and may never end: write what it gives to a file",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_regular(path: Path, most: int = -1, offset: int = 0) -> bytes:
    """Read a regular file from `offset`, at most `most` bytes; others, such as pipes, are refused unopened.

    Raises:
        OSError: it is no regular file or cannot be read; `strerror` says why.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"expected a file, found {_KINDS.get(kind, 'something else')}", str(path))
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(most)


def _check_path(text: str) -> str:
    try:
        local_path(text).exists()
    except ConfigError as error:
        raise ValueError(str(error)) from error
    except OSError as error:
        raise ValueError(f"found {quoted(text)}; this user may not look there: {error.strerror}") from error
    return text


PathText = Annotated[str, AfterValidator(_check_path)]
"""A path, or a name that may be a path; checking whether it exists raises no error."""


# --- YAML ------------------------------------------------------------------------------------------------------------

MOST_BYTES = 1 << 20
"""Maximum size of a YAML file."""

MOST_NODES = 20_000
"""Maximum number of values in a YAML file, with anchors written out."""

DEEPEST = 100
"""Maximum nesting of a YAML file, with anchors written out."""

_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
"""3e-4, which YAML 1.1 reads as text."""

_BOOLEAN = "tag:yaml.org,2002:bool"
_TRUTH = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
"""As in YAML 1.2: `on`, `off`, `yes` and `no` are words."""

_INTEGER = "tag:yaml.org,2002:int"
_WHOLE = re.compile("^[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"), list("-+0123456789")
_FRACTION = (
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*)?\.[0-9_]+(?:[eE][-+][0-9]+)?|[-+]?[0-9][0-9_]*\.(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)
"""As in YAML 1.2: `12:30` is text, not a base-60 number."""
_OCTAL = re.compile("[-+]?0[0-9_]+$")

_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that no file name and no UTF-8 text can contain; only escapes can produce them."""


class _StrictLoader(yaml.SafeLoader):
    """Safe, bounded YAML of plain values, without duplicate keys; 3e-4 is a number."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] not in ("binary", "omap", "pairs", "set")
    }

    def __init__(self, text: str):
        super().__init__(text)
        self._nodes = 0
        self._extents: dict[int, tuple[int, int]] = {}  # (number of nodes, depth) of every finished node

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias, event = self.check_event(yaml.AliasEvent), self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        self._nodes += 1
        node = super().compose_node(parent, index)
        if not alias:
            self._extents[id(node)] = self._extent(node)
        elif id(node) not in self._extents:
            raise yaml.MarkedYAMLError(problem="an anchor that holds itself", problem_mark=mark)
        nodes, depth = self._extents[id(node)]
        if max(nodes, self._nodes) > MOST_NODES or depth > DEEPEST:
            limits = f"more than {MOST_NODES:,} values, or nested more than {DEEPEST} deep, anchors written out"
            raise yaml.MarkedYAMLError(problem=limits, problem_mark=mark)
        return node

    def _extent(self, node: Any) -> tuple[int, int]:
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in children for part in pair]
        below = [self._extents[id(child)] for child in children]
        return 1 + sum(nodes for nodes, _ in below), 1 + max((depth for _, depth in below), default=0)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (dict, list)):
                raise yaml.MarkedYAMLError(problem="a key must be plain text", problem_mark=key_node.start_mark)
            if key in seen:
                problem = f"key {key!r} appears twice; leave one of the two out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        text = super().construct_scalar(node)
        if _UNUSABLE.search(text):
            raise yaml.MarkedYAMLError(
                problem="a NUL character, or half of a surrogate pair", problem_mark=node.start_mark
            )
        return text

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        # check the length first: converting huge numbers takes a minute
        if _OCTAL.match(node.value):
            raise yaml.MarkedYAMLError(
                problem=f"found {node.value[:20]}, which YAML reads as an octal number; write it without the leading "
                "0, or in quotes if it is text",
                problem_mark=node.start_mark,
            )
        number = self.construct_yaml_int(node) if len(node.value) <= 100 else None
        if number is None or not -(2**63) <= number < 2**63:
            raise yaml.MarkedYAMLError(problem="a whole number of more than 64 bits", problem_mark=node.start_mark)
        return number


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_whole_number)
_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOLEAN, _INTEGER, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(_INTEGER, *_WHOLE)
_StrictLoader.add_implicit_resolver(_FLOAT, *_FRACTION)
_StrictLoader.add_implicit_resolver(_FLOAT, *_EXPONENT)
_StrictLoader.add_implicit_resolver(_BOOLEAN, *_TRUTH)


class _StrictDumper(yaml.SafeDumper):
    """Quotes text that `_StrictLoader` would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def analyze_scalar(self, scalar: str) -> Any:
        """Use double quotes for the line break NEL; single quotes would fold it into a space."""
        analysis = super().analyze_scalar(scalar)
        analysis.allow_single_quoted &= "\x85" not in scalar
        return analysis


_StrictDumper.add_implicit_resolver(_FLOAT, *_EXPONENT)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file; see `parse_yaml`."""
    try:
        content = read_regular(path, MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(
                f"{path}: is larger than {MOST_BYTES >> 20} MiB; expected a file of settings. Check the path"
            )
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text at byte {error.start}; save it as UTF-8") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """Return the content of YAML text; ConfigError, which begins with `source`, if it is too large or not plain."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    # in addition to YAML's own errors: impossible dates and numbers, misplaced tags, endless nesting
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, ValueError) as error:
        raise ConfigError(f"{source}: is not valid YAML: {_yaml_problem(error)}") from error


_ADVICE: tuple[tuple[str, str], ...] = (
    ("'\\t'", "found a tab; indent with spaces"),
    ("mapping values are not allowed", "found a second ':'; put the text in quotes, or a space behind a key's ':'"),
    ("but found '-'", "found a '-' among keys; write either keys or a list"),
    ("expected <block end>", "the indentation does not fit the lines above; give keys of one group the same indent"),
    ("expected ',' or", "a bracket, brace or comma is missing here or above"),
    ("undefined alias", "found '*' without its anchor '&'; put the text in quotes if it is text"),
    ("but found another document", "found a second document behind '---'; write one file for each"),
    (":merge'", "found the merge key '<<', which is not read here; write the settings out"),
    ("could not determine a constructor", "found a tag ('!...'), which is not read here; leave it out"),
)
"""Part of the parser's message, and what is wrong and what to do."""


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"unacceptable character #x{error.character:04x} at character {error.position + 1}; delete it"
    message = str(error)
    words = next((words for part, words in _ADVICE if part in message), None)
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return message
    problem = words or getattr(error, "problem", None) or message
    snippet = (mark.get_snippet(indent=4, max_length=75) or "").replace("\t", " ")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" + (f"\n{snippet}" if snippet else "")


def yaml_text(content: Any, one_line: bool = False) -> str:
    """Return plain values as YAML that `parse_yaml` reads back; `one_line` as for a single value in a sweep file."""
    text = yaml.dump(
        content, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True, default_flow_style=one_line, width=1 << 16
    )
    return text.removesuffix("\n").removesuffix("\n...") if one_line else text
