"""The tracker: one `log` for every sink, names checked, secrets removed, no sink able to stop the training."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import time
from typing import Any

from miles.config import nearest
from miles.tracking.config import TrackingConfig
from miles.tracking.jsonl import JsonlFile
from miles.tracking.names import METRICS, TABLES
from miles.tracking.redact import redact, scrub
from miles.tracking.sinks import Cell, Sink, SinkError
from miles.tracking.tensorboard import TensorBoardSink
from miles.tracking.wandb_sink import WandbSink

METRICS_FILE = "metrics.jsonl"
TABLES_FILE = "tables.jsonl"
CONFIG_FILE = "config.json"
_log = logging.getLogger("miles.tracking")


class Tracker:
    """Writes records to metrics.jsonl and tables.jsonl in the run folder, and to TensorBoard and W&B where asked for.

    Training never ends because of a tracker. A sink that fails is named once in the log and left out from then on; the JSONL
    files keep what they could not write and try again.

    Args:
        folder: the run folder; it is made when missing.
        run_config: the resolved recipe as plain data, written to config.json and sent to W&B without its secrets.
        resume_from: the first step the resumed run will log. What the dead run recorded from this step on is cut, so the
            axis has neither gaps nor doubles. None starts anew.
    Raises:
        OSError: the run folder cannot be written at all.
    """

    def __init__(self, config: TrackingConfig, folder: Path, run_config: dict[str, Any], resume_from: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        clean = redact(run_config)
        (folder / CONFIG_FILE).write_text(json.dumps(clean, indent=2) + "\n", encoding="utf-8")
        self._sinks: dict[str, Sink] = {"JSONL": _JsonlSink(folder, resume_from)}
        if config.tensorboard:
            self._open("TensorBoard", lambda: TensorBoardSink(folder / "tensorboard", resume_from))
        if config.wandb != "disabled":
            self._open("W&B", lambda: WandbSink(config, folder, clean, resume_from))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a step. Several calls for one step are one record's worth; steps never go back.

        Raises:
            ValueError: a name is not in `miles.tracking.names.METRICS`.
        """
        for name in metrics:
            if name not in METRICS:
                raise ValueError(f"unknown metric {name!r}{nearest(name, list(METRICS))} (names are in miles/tracking/names.py)")
        values = {name: float(value) for name, value in metrics.items()}
        self._each(lambda sink: sink.log(step, values))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Record a table of this step, such as some samples.

        Raises:
            ValueError: the name is not in `miles.tracking.names.TABLES`, or a row has another length than `columns`.
        """
        if name not in TABLES:
            raise ValueError(f"unknown table {name!r}{nearest(name, list(TABLES))} (names are in miles/tracking/names.py)")
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"table {name!r}: a row has {len(row)} cells, but there are {len(columns)} columns: {', '.join(columns)}")
        clean = [[scrub(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        self._each(lambda sink: sink.table(step, name, columns, clean))

    def close(self) -> None:
        """Finish every sink. Idempotent."""
        self._each(lambda sink: sink.close())
        self._sinks = {}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._sinks[name] = make()
        except (SinkError, OSError) as error:
            self._say(name, error)

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 - a tracker must not end a training; the sink is named and left out
                self._say(name, error)
                del self._sinks[name]

    def _say(self, name: str, error: BaseException) -> None:
        _log.warning("tracking: %s failed and is left out from here on; training goes on: %s", name, scrub(str(error) or repr(error)))


class _JsonlSink:
    """metrics.jsonl and tables.jsonl. Unlike the others it stays: it says once that it cannot write, and once that it can again."""

    def __init__(self, folder: Path, resume_from: int | None) -> None:
        self._files = [JsonlFile(folder / METRICS_FILE, resume_from), JsonlFile(folder / TABLES_FILE, resume_from)]
        self._failing = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._try(lambda: self._files[0].write({"step": step, "time": round(time(), 3), **metrics}))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        record = {"step": step, "table": name, "columns": list(columns), "rows": [list(row) for row in rows]}
        self._try(lambda: self._files[1].write(record))

    def close(self) -> None:
        for file in self._files:
            self._try(file.flush)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failing:
                _log.warning("tracking: cannot write %s: %s; records are kept in memory until there is room, and training goes on", METRICS_FILE, error)
            self._failing = True
        else:
            if self._failing:
                _log.warning("tracking: %s can be written again; nothing was lost", METRICS_FILE)
            self._failing = False
