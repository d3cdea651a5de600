"""Plans which tensors travel together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weight_sync.contracts import Bucket, Manifest, TensorSpec, WeightSyncError
from weight_sync.layout import nbytes


def plan(version: int, specs: Sequence[TensorSpec], bucket_mb: float) -> Manifest:
    """The manifest of one update: every tensor once, in buckets of one dtype and at most `bucket_mb` MiB.

    Equal arguments give equal plans: dtypes in the order they first appear, tensors in the order of `specs`. A tensor larger
    than a bucket goes alone. With `bucket_mb = 1`, float32 tensors of 0.6, 0.3, 0.3 and 5 MiB make buckets
    [0.6, 0.3], [0.3] and [5].

    Raises:
        WeightSyncError: there are no tensors, a name comes twice, or torch has no such dtype.
    """
    if not specs:
        raise WeightSyncError(f"version {version}: the trainer exports no tensors")
    _refuse_duplicates(version, specs)
    groups = [group for dtype in dict.fromkeys(s.dtype for s in specs) for group in _fill([s for s in specs if s.dtype == dtype], bucket_mb)]
    return Manifest(version, tuple(Bucket(index, tuple(group)) for index, group in enumerate(groups)))


def export_bytes(manifest: Manifest) -> int:
    """Bytes of all buckets."""
    return sum(nbytes(bucket) for bucket in manifest.buckets)


def _fill(specs: Sequence[TensorSpec], bucket_mb: float) -> Iterator[list[TensorSpec]]:
    limit = bucket_mb * 2**20
    group: list[TensorSpec] = []
    used = 0
    for spec in specs:
        size = nbytes(Bucket(0, (spec,)))
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(spec)
        used += size
    yield group


def _refuse_duplicates(version: int, specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise WeightSyncError(f"version {version}: the trainer exports tensor {spec.name!r} twice; tied tensors come once, under one name")
        seen.add(spec.name)
