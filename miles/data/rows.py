"""Reads rows of JSONL and parquet files, each with the place that it came from, and refuses what is not right by that place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.config import ConfigError, nearest

Row = dict[str, Any]

_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


@dataclass(frozen=True)
class Source:
    """A file and the rows of it that are wanted, as `path@[a:b]` says: Python's slice over rows, blank lines not counted."""

    path: Path
    rows: slice

    @classmethod
    def parse(cls, spec: str) -> Source:
        """Raises ConfigError: the slice is malformed, the file does not exist, or its type is unknown."""
        match = _SLICE.match(spec)
        if match is None and "@[" in spec:
            raise ConfigError(f"data path {spec!r}: the slice must be @[a:b] with whole numbers, each of which may be left out, for example @[0:1000]")
        path = Path(match["path"] if match else spec)
        if path.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"data path {spec!r}: a .jsonl or .parquet file is needed, not {path.suffix or 'a name without an ending'!r}")
        if not path.is_file():
            raise ConfigError(f"data file {str(path)!r} does not exist{_neighbours(path)}")
        return cls(path, slice(_bound(match["start"]), _bound(match["stop"])) if match else slice(None))


@dataclass
class Table:
    """All rows, where each stands (`train.jsonl:17`, `train.parquet row 17`, counted from 1), and how many lines were blank."""

    rows: list[Row] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    blank_lines: int = 0

    def column(self, name: str, option: str) -> list[Any]:
        """The values of column `name`, which `option` asked for.

        Raises:
            ConfigError: a row lacks it; the message names the first such row, their number and the nearest column.
        """
        missing = [i for i, row in enumerate(self.rows) if name not in row]
        if missing:
            columns = sorted(self.rows[missing[0]])
            raise ConfigError(
                f"{self.places[missing[0]]} has no column {name!r} ({option}){nearest(name, columns)}; "
                f"{len(missing)} of {len(self.rows)} rows lack it; this row has {', '.join(map(repr, columns)) or 'none'}"
            )
        return [row[name] for row in self.rows]

    def one_kind(self, name: str, values: Sequence[Any]) -> str | None:
        """The one JSON kind that all of `values` of column `name` have (None without rows).

        Raises:
            ConfigError: they are mixed; the message names the first row that differs and counts each kind.
        """
        kinds = [kind(value) for value in values]
        odd = next((i for i, k in enumerate(kinds) if k != kinds[0]), None)
        if odd is not None:
            counts = ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))
            raise ConfigError(f"column {name!r} is a {kinds[odd]} at {self.places[odd]}, but a {kinds[0]} at {self.places[0]} ({counts}): one kind is needed")
        return kinds[0] if kinds else None


def read(paths: Sequence[str]) -> Table:
    """All rows of `paths`, in order. Blank lines are left out and counted.

    Raises:
        ConfigError: no path, an unreadable file, a line that is not UTF-8 or not a JSON object (named by file, line and column),
            or a slice that selects nothing.
    """
    if not paths:
        raise ConfigError("no data: paths is empty; name at least one .jsonl or .parquet file")
    table = Table()
    for spec in paths:
        source = Source.parse(spec)
        before = len(table.rows)
        total = _read_parquet(source, table) if source.path.suffix == ".parquet" else _read_jsonl(source, table)
        if len(table.rows) == before:
            raise ConfigError(f"data path {spec!r} selects no rows: the file has {total}")
    return table


def kind(value: Any) -> str:
    """The JSON kind of a value, as messages name it: string, number, boolean, list, object or null."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _read_jsonl(source: Source, table: Table) -> int:
    numbered = []
    for number, line in _lines(source.path):
        if line.strip():
            numbered.append((number, line))
        else:
            table.blank_lines += 1
    for number, line in numbered[source.rows]:
        place = f"{source.path}:{number}"
        table.rows.append(_parse(line, place))
        table.places.append(place)
    return len(numbered)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines split at newlines alone: str.splitlines would also cut at characters that JSON strings may hold, such as U+2028."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n")
    if data:
        yield from enumerate(data.split(b"\n"), 1)


def _parse(line: bytes, place: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not UTF-8 at byte {error.start + 1} of the line ({line[error.start]:#04x}): convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: invalid JSON at column {error.colno}: {error.msg}; each line must be one JSON object") from None
    if b"\\u" in line:
        _refuse_half_characters(line, place)
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: each line must be one JSON object, but this is a {kind(row)}: {str(row)[:60]!r}")
    return row


def _refuse_half_characters(line: bytes, place: str) -> None:
    """JSON can spell half of a surrogate pair, which is no text: a tokenizer would raise on it later, and not say where."""
    text = json.dumps(json.loads(line), ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: \\u{ord(text[error.start]):04x} is half of a surrogate pair and no character: repair or remove it") from None


def _read_parquet(source: Source, table: Table) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        content = pyarrow.parquet.read_table(source.path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{source.path}: not a parquet file: {error}") from None
    start, stop, _ = source.rows.indices(content.num_rows)
    for offset, row in enumerate(content.slice(start, max(0, stop - start)).to_pylist()):
        table.rows.append(row)
        table.places.append(f"{source.path} row {start + offset + 1}")
    return int(content.num_rows)


def _bound(text: str) -> int | None:
    if text == "-":
        raise ConfigError("a slice bound is '-': write a whole number, for example @[-100:]")
    return int(text) if text else None


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {str(path.parent)!r}"
    files = [p.name for p in path.parent.iterdir() if p.suffix in (".jsonl", ".parquet")]
    return nearest(path.name, files) if files else ""
