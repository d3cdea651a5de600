"""The folder of a run's checkpoints: their names, which are complete, and which are kept. Imports nothing heavy.

checkpoints/
  step_00000010/            complete: it was renamed into place after every byte was on disk
    complete.json           the manifest, written last
    .metadata, __0_0.distcp torch.distributed.checkpoint's files
  step_00000020.partial/    being written, or left by a process that was killed: never read, removed by the next save
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "complete.json"
PARTIAL = ".partial"
_STEP = re.compile(r"step_(\d+)")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message names folder and cause."""


@dataclass(frozen=True)
class CheckpointStore:
    """Checkpoints under `root`, one folder a step; the latest `keep` stay."""

    root: Path
    keep: int = 2

    def begin(self, step: int) -> Path:
        """The folder to give to a trainer's `save`. It exists once the checkpoint is complete."""
        self.root.mkdir(parents=True, exist_ok=True)
        return self.root / f"step_{step:08d}"

    def due(self, step: int, *, every: int, last: int) -> bool:
        """Is it time to save at `step`? At multiples of `every` (0: none) and at the `last` step, unless that checkpoint is there already."""
        return step > 0 and (step == last or (every > 0 and step % every == 0)) and self.latest_step() != step

    def complete_steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        if not self.root.is_dir():
            return []
        found = [(match, entry) for entry in self.root.iterdir() if (match := _STEP.fullmatch(entry.name))]
        return sorted(int(match[1]) for match, entry in found if (entry / MANIFEST).is_file())

    def latest_step(self) -> int | None:
        steps = self.complete_steps()
        return steps[-1] if steps else None

    def latest(self) -> Path | None:
        step = self.latest_step()
        return None if step is None else self.begin(step)

    def prune(self) -> None:
        """Remove all but the latest `keep` complete checkpoints, the oldest first."""
        for step in self.complete_steps()[: -self.keep]:
            folder = self.begin(step)
            # Without its manifest a half-removed folder no longer counts.
            (folder / MANIFEST).unlink()
            shutil.rmtree(folder)

    def remove_leftovers(self) -> None:
        """Remove what killed processes left: partial folders, and folders whose removal was cut short."""
        for entry in self.root.iterdir():
            if _STEP.fullmatch(entry.name.removesuffix(PARTIAL)) and (entry.name.endswith(PARTIAL) or not (entry / MANIFEST).is_file()):
                shutil.rmtree(entry)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError when `folder` is no complete checkpoint."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from error


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's list of names, renames included."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
