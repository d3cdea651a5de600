"""Loads one bucket of weights inside the SGLang server, from a file that both processes map.

SGLang calls it through its custom weight loader (`load_format`). The bytes so never pass through a pickle or an HTTP body, and
no shared-memory manager process is left behind.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from weight_sync.contracts import Bucket, SharedMemory, TensorSpec

if TYPE_CHECKING:
    import torch


def describe(bucket: Bucket, payload: SharedMemory) -> str:
    """What `load_file` needs to know, as the name of an otherwise empty tensor."""
    tensors = [[t.name, list(t.shape), t.dtype] for t in bucket.tensors]
    return json.dumps({"index": bucket.index, "tensors": tensors, "path": payload.path, "nbytes": payload.nbytes})


def load_file(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load every bucket that a name describes. Whatever does not fit was refused before: an exception here ends the server."""
    from weight_sync.transports.shared_memory import read_bucket

    for description, _ in named_tensors:
        bucket, payload = parse(json.loads(description))
        model.load_weights(list(read_bucket(bucket, payload).items()))


def parse(fields: dict[str, Any]) -> tuple[Bucket, SharedMemory]:
    """What `describe` was given, from its JSON."""
    tensors = tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in fields["tensors"])
    return Bucket(fields["index"], tensors), SharedMemory(fields["path"], fields["nbytes"])
