"""What runs on the trainer's ranks before any transport: specifications, and gathering one bucket into a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from weight_sync.contracts import Bucket, TensorSpec, WeightSource, WeightSyncError
from weight_sync.digests import digest


def export_specs(backend: WeightSource, rank: int) -> tuple[TensorSpec, ...]:
    """This rank's view of the export."""
    return tuple(backend.weight_specs())


def gather_bucket(backend: WeightSource, rank: int, bucket: Bucket, open_views: Callable[[], dict[str, torch.Tensor]], digests: bool) -> dict[str, str]:
    """Gather the bucket's tensors and, on rank 0, copy each once into its place in `open_views()`. Collective.

    Returns:
        xxh3 of each gathered tensor by name on rank 0 with `digests`, else {}.
    Raises:
        WeightSyncError: a gathered tensor is not what its specification says. Also what `open_views` raises.
    """
    tensors = backend.weight_tensors([spec.name for spec in bucket.tensors])
    try:
        return _copy(bucket, tensors, open_views(), digests) if rank == 0 else {}
    finally:
        # Gathering is collective: a rank that stopped early would leave the others waiting in it for ever.
        for _ in tensors:
            pass


def skip_bucket(backend: WeightSource, bucket: Bucket) -> None:
    """Take part in gathering a bucket that nobody wants any more. Collective."""
    for _ in backend.weight_tensors([spec.name for spec in bucket.tensors]):
        pass


def _copy(bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]], places: dict[str, torch.Tensor], digests: bool) -> dict[str, str]:
    found = {}
    for (name, tensor), (expected, place) in zip(tensors, places.items(), strict=True):
        if name != expected or tensor.shape != place.shape or tensor.dtype != place.dtype:
            raise WeightSyncError(
                f"bucket {bucket.index}: the trainer gathered {name!r} {tensor.dtype}{list(tensor.shape)}, "
                f"its export announced {expected!r} {place.dtype}{list(place.shape)}"
            )
        place.copy_(tensor)
        if digests:
            found[name] = digest(tensor)
    return found
