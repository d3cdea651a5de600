"""The driver's record of which version the engines serve. An update counts from the moment its line is on disk.

JSON lines, one per event, each synced before it is relied on. A line that a crash tore is dropped when the journal is opened:
its update never counted, since no engine was told to commit before the line was whole.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from weight_sync.contracts import WeightSyncError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One event.

    Attributes:
        kind: `publish`: the engines serve `version` from here on. `rewind`: the trainer went back to `version` (a checkpoint).
        fingerprint: one digest of every tensor's bytes, or "" where none was computed.
        engines: the engines that were told. time_s: seconds since 1970.
    """

    version: int
    kind: Literal["publish", "rewind"]
    fingerprint: str = ""
    bytes: int = 0
    tensors: int = 0
    engines: tuple[int, ...] = ()
    time_s: float = field(default_factory=time.time)


class Journal:
    """Append-only. `last` is the newest entry, None before the first."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal.

        Raises:
            WeightSyncError: it cannot be read, or a line other than the last is damaged.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (lives as long as the journal)
            _sync_folder(path.parent)
        except OSError as error:
            raise WeightSyncError(f"cannot open the weight journal {str(path)!r}: {error.strerror}") from error
        self.last = self._read_and_mend()

    def append(self, entry: Entry) -> None:
        """Write `entry`; it is on disk when this returns, and not in the journal when this raises.

        Raises:
            WeightSyncError: the disk refuses (full, read-only).
        """
        size = os.fstat(self._file.fileno()).st_size
        line = json.dumps(asdict(entry), sort_keys=True).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(None, f"only {written} of {len(line)} bytes were written")
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(size)
            raise WeightSyncError(f"cannot write version {entry.version} to the weight journal {str(self.path)!r}: {error.strerror}") from error
        self.last = entry

    def close(self) -> None:
        self._file.close()

    def _read_and_mend(self) -> Entry | None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
            os.fsync(self._file.fileno())
        entries = [self._parse(number, line) for number, line in enumerate(content[:whole].splitlines(), 1)]
        return entries[-1] if entries else None

    def _parse(self, number: int, line: bytes) -> Entry:
        try:
            record = json.loads(line)
            return Entry(**{**record, "engines": tuple(record["engines"])})
        except (ValueError, TypeError, KeyError) as error:
            raise WeightSyncError(
                f"{self.path}:{number} is not an entry of a weight journal ({error}): the file was changed or the disk is damaged. "
                "Move it away only if no engine of this run is alive"
            ) from error


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
