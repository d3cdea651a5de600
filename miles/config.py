"""Typed configuration from a TOML recipe and `key=value` overrides, remembering where each value came from.

This module knows no section: every package declares its own in its `config.py` by subclassing `Section`, and
`miles/run/recipe.py` composes them. Errors name the key, quote the value, say where it was written and what to change.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

T = TypeVar("T", bound="Section")

LONGEST_S = 10.0**6
"""The longest deadline that an option may be, eleven days in seconds: what waits for a process counts milliseconds in 32 bits."""


class ConfigError(ValueError):
    """A recipe or override that the user has to change."""


class Section(BaseModel):
    """Base of every configuration section: keyword-only, immutable, unknown keys refused. A value is of its option's type or refused:
    `true` is no 1, `"5"` no 5, and no number is infinite or NaN where the option does not allow it."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """A validated configuration and, for every leaf key, its origin: `default`, `recipe.toml:12` or `command line`."""

    config: T
    origins: dict[str, str]

    def leaves(self) -> Iterator[tuple[str, Any, str]]:
        """Every leaf as `(dotted key, value, origin)`, in declaration order."""
        for key, value in _leaves(self.config.model_dump(mode="json"), ""):
            yield key, value, self.origins.get(key) or _parent_origin(key, self.origins)


def load(schema: type[T], path: Path | str | None, overrides: Sequence[str] = ()) -> Resolved[T]:
    """Read `path` (TOML, may be None), apply `overrides` (`a.b=value`, later ones win) and validate against `schema`.

    An override's value is read as TOML (`3`, `1e-4`, `true`, `["a"]`) and, where that fails, as a plain string. TOML has no null:
    the string `null` stands for it, in recipes and overrides.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown (the nearest valid one is named), or a value is wrong.
    """
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        path = Path(path)
        text, tree = read_recipe(path)
        lines = _line_numbers(text)
        origins = {key: path.name for key, _ in _leaves(tree, "")} | {key: f"{path.name}:{line}" for key, line in lines.items()}
    for override in overrides:
        key, value = _parse_override(override)
        _set(tree, key, value, override)
        origins = {k: v for k, v in origins.items() if not k.startswith(key + ".")}
        for parent in [k for k in origins if key.startswith(k + ".")]:  # a list, of which one item's value is another
            origins[parent] = f"{origins[parent].removesuffix(_AND_HERE)}{_AND_HERE}"
        origins[key] = "command line"
    try:
        config = schema.model_validate(_with_nulls(tree))
    except ValidationError as error:
        raise ConfigError(_explain(error, schema, origins)) from None
    return Resolved(config, origins)


def read_recipe(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a recipe, and its tree, not validated. Raises ConfigError when it cannot be read or is not TOML."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start + 1} ({error.object[error.start]:#04x}): convert the file to UTF-8") from error
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def nearest(name: str, valid: Sequence[str]) -> str:
    """`; did you mean 'x'?` when something valid is close to `name`, else the list of valid names."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid: {', '.join(sorted(valid))}"


def describe(schema: type[Section], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every option of `schema` as `(dotted key, type, default, help)`; nested sections are walked."""
    for name, field in schema.model_fields.items():
        inner = _section_type(field.annotation)
        if inner is not None:
            yield from describe(inner, f"{prefix}{name}.")
        else:
            default = "(required)" if field.is_required() else field.get_default(call_default_factory=True)
            yield f"{prefix}{name}", _type_name(field.annotation), default, field.description or ""


def _section_type(annotation: Any) -> type[Section] | None:
    """The section itself, also where it may be left out (`Section | None`)."""
    options = get_args(annotation)
    candidate = next((option for option in options if option is not NoneType), None) if NoneType in options else annotation
    return candidate if isinstance(candidate, type) and issubclass(candidate, Section) else None


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not getattr(annotation, "__args__", None):
        return annotation.__name__
    return re.sub(r"\b(typing|pathlib|collections\.abc)\.|miles\.\w+\.config\.", "", str(annotation)).replace("Literal", "")


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, node


def _parent_origin(key: str, origins: dict[str, str]) -> str:
    """A value inside an overridden table or list item inherits the origin of the nearest parent that has one."""
    while "." in key:
        key = key.rpartition(".")[0]
        if key in origins:
            return origins[key]
    return "default"


_TABLE = re.compile(r"^\s*\[(\[?)\s*([\w.\-\"']+)\s*\]+")
_KEY = re.compile(r"^\s*([\w.\-\"']+)\s*=")


def _line_numbers(text: str) -> dict[str, int]:
    """Line of each `key =` and of each list of tables in a TOML text. For messages only, so a key inside a multi-line string does no harm."""
    table = ""
    items: Counter[str] = Counter()
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            name = match[2].replace('"', "").replace("'", "")
            table = f"{name}."
            if match[1]:  # [[name]]: the next item of a list
                lines.setdefault(name, number)
                table = f"{name}.{items[name]}."
                items[name] += 1
        elif match := _KEY.match(line):
            lines.setdefault(table + match[1].replace('"', "").replace("'", ""), number)
    return lines


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, raw = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form key=value, for example trainer.lr=1e-4")
    try:
        return key, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return key, raw


def _with_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _with_nulls(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_with_nulls(value) for value in node]
    return None if node == "null" else node


def _set(tree: Any, key: str, value: Any, override: str) -> None:
    """Set `key` in `tree`, making the sections on the way; a number names an item that a list has already."""
    *parents, last = key.split(".")
    parent = ""
    for part in parents:
        tree = tree.setdefault(part, {}) if isinstance(tree, dict) else tree[_place(tree, parent, part, override)]
        parent = part
    if isinstance(tree, dict):
        tree[last] = value
    else:
        tree[_place(tree, parent, last, override)] = value


def _place(tree: Any, name: str, part: str, override: str) -> int:
    if not isinstance(tree, list):
        raise ConfigError(f"override {override!r}: {name!r} is a value, not a section")
    if not part.isdigit() or int(part) >= len(tree):
        raise ConfigError(f"override {override!r}: {name!r} is a list of {len(tree)} in the recipe, whose items are numbered from 0; {part!r} is none of them")
    return int(part)


_AND_HERE = ", command line"

_CURES = {
    "list_type": 'Input should be a list, for example ["a", "b"]',
    "model_type": "Input should be a section with options of its own, not one value",
}
"""Of pydantic's messages, those that name its own classes or leave open how a list is written."""


def _explain(error: ValidationError, schema: type[Section], origins: dict[str, str]) -> str:
    messages = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        key = ".".join(location)
        where = origins.get(key) or _parent_origin(key, origins)
        at = f" ({where})" if where != "default" else ""
        if item["type"] == "extra_forbidden":
            messages.append(f"unknown option {key!r}{at}{_nearest_option(location, schema)}")
        elif item["type"] == "missing":
            messages.append(f"option {key!r} is missing: add it to the recipe or pass {key}=VALUE")
        elif item["type"] == "value_error" and isinstance(item["input"], (dict, Section)):
            messages.append(f"{key}{at}: {item['ctx']['error']}" if key else str(item["ctx"]["error"]))
        else:
            messages.append(f"{key} = {item['input']!r}{at}: {_CURES.get(item['type']) or item['msg'].removeprefix('Value error, ')}")
    return "\n".join(messages)


def _nearest_option(location: list[str], schema: type[Section]) -> str:
    section = schema
    for part in location[:-1]:
        if part.isdigit():
            continue  # an item of a list: its type was found by the list's name
        field = section.model_fields.get(part)
        inner = None if field is None else _section_type(field.annotation) or _item_type(field.annotation)
        if inner is None:
            return ""
        section = inner
    return nearest(".".join(location), [".".join([*location[:-1], name]) for name in section.model_fields])


def _item_type(annotation: Any) -> type[Section] | None:
    """`Item` of `list[Item]`."""
    items = get_args(annotation) if get_origin(annotation) is list else ()
    return _section_type(items[0]) if items else None
