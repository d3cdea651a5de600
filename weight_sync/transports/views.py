"""The `views` transport's payload: weights that lie in memory once, the trainer's, and that engines read there.

What an optimizer step changes, every engine sees at once. So it is for synchronous on-policy training alone, and it is watched: the first
word of the memory counts the steps, before their first byte is written, and an engine that finds another count than its version began with
answers nothing more.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from weight_sync.contracts import Bucket, InPlace, WeightSyncError
from weight_sync.layout import torch_dtype
from weight_sync.transports.shared_memory import read_bucket

HEADER = 64
"""Bytes before the first tensor; the first eight are the count, an int64."""


def counter(path: str) -> Tensor:
    """The count, int64 [1], in the shared memory itself."""
    return torch.from_file(path, shared=True, size=1, dtype=torch.int64)


def read_in_place(bucket: Bucket, payload: InPlace) -> dict[str, Tensor]:
    """The bucket's tensors, views on the trainer's memory but for those that were copied.

    Raises:
        WeightSyncError: the memory is not there, or has changed since the payload was made.
    """
    try:
        found = os.stat(payload.path).st_size
    except OSError as error:
        raise WeightSyncError(f"bucket {bucket.index}: cannot open {payload.path!r}: {error.strerror}; trainer and engine must be on one machine") from error
    if found != payload.nbytes:
        raise WeightSyncError(f"bucket {bucket.index}: {payload.path!r} has {found} bytes, its payload says {payload.nbytes}")
    check_unmoved(counter(payload.path), payload.moves)
    dtype, shapes = torch_dtype(bucket), {spec.name: spec.shape for spec in bucket.tensors}
    flat = torch.from_file(payload.path, shared=True, size=payload.nbytes // dtype.itemsize, dtype=dtype)
    tensors = {one.name: flat.as_strided(shapes[one.name], one.stride, one.offset) for one in payload.placed}
    return tensors | (read_bucket(*payload.rest) if payload.rest is not None else {})


def check_unmoved(count: Tensor, moves: int) -> None:
    """Raises WeightSyncError where the trainer has changed its weights, or is about to."""
    if (now := int(count)) != moves:
        raise WeightSyncError(
            f"the trainer's weights have moved ({now} updates, this engine's version began after {moves}) while the engine serves them: "
            "weight_sync.transport = 'views' is for steps that wait for every answer"
        )
