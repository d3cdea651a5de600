"""The run in the terminal: a progress bar with the numbers that matter, or plain lines where the output is no terminal."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# What is shown, in this order, where a step has it: metric -> short label.
SHOWN = {
    "reward/mean": "reward",
    "loss/nll": "nll",
    "preference/accuracy": "accuracy",
    "preference/margin": "margin",
    "policy/entropy": "entropy",
    "policy/kl": "kl",
    "distill/kl": "kl to teacher",
    "policy/clip_fraction": "clipped",
    "optimizer/grad_norm": "grad norm",
    "length/mean": "length",
    "staleness/mean": "staleness",
    "throughput/generated_tokens_per_s": "gen tok/s",
    "throughput/trained_tokens_per_s": "train tok/s",
    "eval/pass_at_1": "eval pass@1",
    "eval/greedy": "eval greedy",
    "eval/distill_kl": "eval kl to teacher",
    "eval/preference_accuracy": "eval accuracy",
}
logger = logging.getLogger(__name__)

PHASES = "seconds/"
LINE_EVERY_S = 5.0  # between plain lines


class Live:
    """`with Live("rl", steps) as live: live.update(version, metrics)` after every step; `version` counts finished steps.

    In a terminal a bar and a small table are redrawn in place; elsewhere a line is printed at the first and last step and at
    most every LINE_EVERY_S seconds between, so that a log file stays readable. Values stay
    shown until a newer one comes. Without `redrawn` there are lines in a terminal too: several runs share it.
    """

    def __init__(self, kind: str, steps: int, stream: TextIO | None = None, *, redrawn: bool = True) -> None:
        self._kind, self._steps, self._redrawn = kind, steps, redrawn
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        self._values: dict[str, float] = {}
        self._live: RichLive | None = None
        self._closed = False
        self._last_line = -math.inf
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(f"miles {kind}", total=steps)

    def __enter__(self) -> Live:
        if self._console.is_terminal and self._redrawn:
            self._live = RichLive(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            with self._watched():
                self._live.update(self._render())
                self._live.stop()
            self._live = None

    def update(self, version: int, metrics: dict[str, float]) -> None:
        """Show a step. Whoever reads the output may leave (`| head`, a closed terminal, a full disk): that is said once, and the run goes on."""
        self._values |= metrics
        self._bar.update(self._task, completed=version)
        if self._closed:
            return
        with self._watched():
            if self._live is not None:
                self._live.update(self._render())
            elif version <= 1 or version >= self._steps or time.monotonic() - self._last_line >= LINE_EVERY_S:
                self._last_line = time.monotonic()
                print(self._line(version), file=self._stream, flush=True)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._closed = True
            # What is left in the stream's buffer would fail once more, at the exit of the process.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            logger.warning("nothing is shown from here on (%s); the run goes on, and its folder has every record", error.strerror)

    def _line(self, version: int) -> str:
        parts = [f"{label} {_number(self._values[name])}" for name, label in SHOWN.items() if name in self._values]
        return f"{self._kind} {version}/{self._steps}  " + "  ".join([*parts, self._phases()])

    def _phases(self) -> str:
        seconds = {name.removeprefix(PHASES): value for name, value in self._values.items() if name.startswith(PHASES)}
        total = seconds.pop("step", None)
        if total is None:
            return ""
        return f"{total:.2f} s (" + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005) + ")"

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 3))
        shown = [(label, _number(self._values[name])) for name, label in SHOWN.items() if name in self._values]
        for start in range(0, len(shown), 4):
            table.add_row(*[f"[dim]{label}[/dim] {value}" for label, value in shown[start : start + 4]])
        return Group(self._bar, table, f"[dim]{self._phases()}[/dim]")


def _number(value: float) -> str:
    """Four significant digits at most, large numbers whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
