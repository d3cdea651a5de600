"""TensorBoard event files under RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miles.tracking.sinks import Cell, text_table


class TensorBoardSink:
    """Scalars and text tables. After a resume TensorBoard itself drops what the dead run wrote from that step on."""

    def __init__(self, folder: Path, resume_from: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_from)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._writer.add_text(name, text_table(columns, rows), step)

    def close(self) -> None:
        self._writer.close()
