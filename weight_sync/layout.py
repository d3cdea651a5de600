"""Where each tensor lies in a bucket's flat buffer. Senders and receivers both read it here."""

from __future__ import annotations

import torch

from weight_sync.contracts import Bucket, WeightSyncError


def torch_dtype(bucket: Bucket) -> torch.dtype:
    """The bucket's dtype as torch has it. Raises WeightSyncError for a name that is not a torch dtype."""
    dtype = getattr(torch, bucket.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"tensor {bucket.tensors[0].name!r} has dtype {bucket.dtype!r}, which torch {torch.__version__} does not have")
    return dtype


def nbytes(bucket: Bucket) -> int:
    """Size of the flat buffer in bytes."""
    return bucket.numel * torch_dtype(bucket).itemsize


def views(flat: torch.Tensor, bucket: Bucket) -> dict[str, torch.Tensor]:
    """The bucket's tensors as views on `flat` [numel], in order; nothing is copied."""
    tensors, start = {}, 0
    for spec in bucket.tensors:
        tensors[spec.name] = flat[start : start + spec.numel].view(spec.shape)
        start += spec.numel
    return tensors
