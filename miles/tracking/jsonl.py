"""Records as lines of JSON: the sink that always works, and the one that reports read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JsonlFile:
    """An append-only file of `{"step": ..., ...}` lines, flushed line by line.

    When a write fails (disk full) the line is kept in memory and tried again with the next one, so a file never holds half a
    line in its middle and nothing is lost once there is room.

    Args:
        resume_from: lines whose step is at or after this one are cut, since the resumed run writes them again; None starts anew.
    """

    def __init__(self, path: Path, resume_from: int | None) -> None:
        self._path = path
        self._pending: list[bytes] = []
        keep = [line for line in _lines(path) if line["step"] < resume_from] if resume_from is not None and path.exists() else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(_dump(line) for line in keep), encoding="utf-8")
        os.replace(temporary, path)
        self._size = path.stat().st_size

    def write(self, record: dict[str, Any]) -> None:
        """Append one record.

        Raises:
            OSError: it could not be written; the record is kept and tried again by the next `write` or `flush`.
        """
        self._pending.append(_dump(record).encode())
        self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        payload = b"".join(self._pending)
        with self._path.open("r+b", buffering=0) as file:
            file.truncate(self._size)  # what a failed write left behind
            file.seek(self._size)
            view = memoryview(payload)
            while view:
                view = view[file.write(view) :]
        self._size += len(payload)
        self._pending.clear()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every record of a JSONL file, non-finite numbers included. A last line cut short by a killed process is left out."""
    for record in _lines(path):
        yield {key: _FLOATS.get(value, value) if isinstance(value, str) else value for key, value in record.items()}


def read_metrics(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Each metric's steps and values, in the order of steps."""
    curves: dict[str, dict[int, float]] = {}
    for record in read_records(path):
        for name, value in record.items():
            if name not in ("step", "time"):
                curves.setdefault(name, {})[record["step"]] = value
    return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in curves.items()}


_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _dump(record: dict[str, Any]) -> str:
    """Plain JSON has no NaN or infinity, and other readers refuse them: they are written as strings."""
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
