"""Safetensors files of a model directory, read box by box: a rank that holds a part of a tensor reads the bytes of that part and no others.

A file is 8 bytes that tell the length of a JSON header, the header (name -> dtype, shape, offsets), and the tensors' bytes, row by row.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32}

Box = Sequence[tuple[int, int]]
"""Of each dimension, from where to where."""


class TensorFiles:
    """Open files. Their bytes are read when asked for, by `pread`: nothing is mapped, and no page is read for its neighbours.

    Attributes:
        shapes: of every tensor, by name.
    """

    def __init__(self, files: Sequence[Path]):
        self._where: dict[str, tuple[int, int, torch.dtype]] = {}  # file descriptor, offset in bytes, dtype
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._descriptors: list[int] = []
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            self._descriptors.append(descriptor)
            length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            for name, entry in json.loads(os.pread(descriptor, length, 8)).items():
                if name != "__metadata__":
                    self._where[name] = descriptor, 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]]
                    self.shapes[name] = tuple(entry["shape"])

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor in the file's own dtype, on the CPU."""
        descriptor, offset, dtype = self._where[name]
        shape = self.shapes[name]
        part = torch.empty([stop - start for start, stop in box], dtype=dtype)
        if part.numel() == 0:
            return part
        # Dimensions behind this one are wanted whole, so that it is read in runs of neighbouring bytes.
        cut = max((d for d, (start, stop) in enumerate(box) if stop - start < shape[d]), default=0)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        run = math.prod(part.shape[cut:]) * dtype.itemsize
        buffer = memoryview(part.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for number, place in enumerate(product(*(range(*box[d]) for d in range(cut)))):
            first = sum(p * strides[d] for d, p in enumerate(place)) + (box[cut][0] * strides[cut] if box else 0)
            _read_fully(descriptor, buffer[number * run : (number + 1) * run], offset + first * dtype.itemsize)
        return part

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


@contextmanager
def open_tensor_files(path: str | Path) -> Iterator[TensorFiles | None]:
    """The files that transformers would read in the directory `path`; None where there are none, or of a dtype that is not read as it stands."""
    files = None
    try:
        found = _files(Path(path))
        files = TensorFiles(found) if found else None
    except (KeyError, ValueError):  # a quantised dtype, or a broken header: transformers knows, or says what is wrong
        files = None
    try:
        yield files
    finally:
        if files is not None:
            files.close()


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        named = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / file for file in dict.fromkeys(named)]
    return []


def _read_fully(descriptor: int, buffer: memoryview, offset: int) -> None:
    """One call may give less than it was asked for: at most 2 GiB."""
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], offset + done)
        if got == 0:
            raise ValueError(f"a safetensors file ends {len(buffer) - done} bytes too early: copy it again")
        done += got
