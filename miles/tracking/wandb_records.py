"""Reads the record file of an offline W&B run: how far did a run that died get?

Format: a 7-byte file header, then blocks of 32 KiB; a record is one or more chunks `<crc32: u32> <length: u16> <kind: u8>`
with kind 1 whole, 2 first, 3 middle, 4 last; a block's end that is too short for a chunk header is padding. Each record is
a protobuf `wandb_internal.Record`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_FILE_HEADER, _BLOCK = 7, 32 * 1024
_CHUNK = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def last_step(folder: Path, run_id: str) -> int:
    """The largest step that any offline run with this id under `folder` recorded, -1 when there is none."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # protobuf makes its classes when imported

    largest = -1
    for path in folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"):
        for payload in records(path):
            record = Record()
            record.ParseFromString(payload)
            if record.WhichOneof("record_type") == "history":
                largest = max(largest, record.history.step.num)
    return largest


def records(path: Path) -> Iterator[bytes]:
    """The payload of each complete record; a record that a killed process left half written ends the file."""
    data = path.read_bytes()
    offset, parts = _FILE_HEADER, []
    while offset + _CHUNK.size <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < _CHUNK.size:
            offset += left
            continue
        _, length, kind = _CHUNK.unpack_from(data, offset)
        offset += _CHUNK.size
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or offset + length > len(data):
            return
        parts.append(data[offset : offset + length])
        offset += length
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts = []
