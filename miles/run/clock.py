"""Seconds by phase of one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """`with clock("train"): ...` adds wall-clock seconds to that phase; `metrics()` names them for the tracker."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`seconds/<phase>` of each phase, and `seconds/step` since the clock was made."""
        return {f"seconds/{name}": seconds for name, seconds in self._phases.items()} | {"seconds/step": time.perf_counter() - self._start}
