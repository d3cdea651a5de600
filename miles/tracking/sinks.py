"""What a place for records can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Cell = str | float | int | bool | None


class Sink(Protocol):
    """One destination of records. Any method may raise; the tracker then says so once and goes on without this sink."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None: ...

    def close(self) -> None: ...


class SinkError(RuntimeError):
    """A sink cannot go on: the server is unreachable, a key is missing. The message says what to change."""


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table whose cells cannot break out of their row."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", "↵") for cell in cells) + " |"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])
