"""The `tensor` transport's payload: a bucket's bytes in a file under /dev/shm that both sides map.

The sender copies each gathered tensor once, into the mapped file; the receiver reads that same memory. This module is what
the receiver needs; the sender's side is `tensor_transport.py`.
"""

from __future__ import annotations

import os

import torch

from weight_sync.contracts import Bucket, SharedMemory, WeightSyncError
from weight_sync.layout import nbytes, torch_dtype, views


def read_bucket(bucket: Bucket, payload: SharedMemory) -> dict[str, torch.Tensor]:
    """The bucket's tensors as views on the mapped file: no copy is made.

    The mapping is private, so a write through a view stays in this process. It outlives the file's name: the sender removes
    the file as soon as every engine has answered, and the memory is given back when the last view goes.

    Raises:
        WeightSyncError: the file is missing or has another size than the bucket.
    """
    expected = nbytes(bucket)
    try:
        found = os.stat(payload.path).st_size
    except OSError as error:
        raise WeightSyncError(f"bucket {bucket.index}: cannot open {payload.path!r}: {error.strerror}; trainer and engine must share one /dev/shm") from error
    if not expected == payload.nbytes == found:
        raise WeightSyncError(
            f"bucket {bucket.index} ({bucket.tensors[0].name!r} ...) needs {expected} bytes, but its payload says {payload.nbytes} "
            f"and {payload.path!r} has {found}"
        )
    if expected == 0:
        return views(torch.empty(0, dtype=torch_dtype(bucket)), bucket)
    return views(torch.from_file(payload.path, shared=False, size=bucket.numel, dtype=torch_dtype(bucket)), bucket)
