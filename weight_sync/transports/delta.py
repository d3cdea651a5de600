"""The engine's side of the `delta` transport: which record its weights are, and how a later one is made from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from weight_sync.contracts import Bucket, FromStore, RecordId, TensorSpec
from weight_sync.layout import torch_dtype
from weight_sync.transports.delta_codec import decode
from weight_sync.transports.delta_store import BrokenChain, Record, WeightStore

Held = Callable[[str], torch.Tensor]
"""A served tensor by its name in the checkpoint."""


class DeltaReader:
    """An engine at any earlier record, or at none, gets the bytes of the announced one, whatever lies between.

    It goes back from the announced record to the one it holds, or to a snapshot, and applies the changes in order. Each tensor of the
    result is compared with the digest in the announced manifest; where changes to held weights do not give it (they were loaded some
    other way), the snapshot is used in their place.
    """

    def __init__(self) -> None:
        self._held: RecordId | None = None
        self._incoming: RecordId | None = None
        self._store: WeightStore | None = None  # of the update that is coming in: all its buckets have one chain of manifests

    def read(self, bucket: Bucket, payload: FromStore, held: Held) -> dict[str, torch.Tensor]:
        """The bucket's tensors at the announced record.

        Raises:
            BrokenChain: a record is missing or damaged, is of other tensors, or does not give the bytes that were announced.
        """
        if self._store is None or self._store.url != payload.url:
            self._store = WeightStore(payload.url)
        self._incoming, store = payload.record, self._store
        chain = _chain(store, payload.record, self._held, bucket)
        if chain[0][1].base is not None:  # it ends at what is held
            tensors = _apply(store, chain, bucket, [_bytes(held(spec.name)) for spec in bucket.tensors])
            if not _wrong(tensors, chain[-1][1], bucket):
                return _named(tensors, bucket)
            chain = _chain(store, payload.record, None, bucket)
        tensors = _apply(store, chain, bucket, [None] * len(bucket.tensors))
        if wrong := _wrong(tensors, chain[-1][1], bucket):
            raise BrokenChain(f"record {payload.record.number} of {payload.url!r} does not give tensor {wrong[0]!r} the bytes that its manifest promises")
        return _named(tensors, bucket)

    def commit(self) -> None:
        """What was read last is what is served."""
        self._held, self._incoming, self._store = self._incoming, None, None

    def abort(self) -> None:
        self._incoming = self._store = None


def _chain(store: WeightStore, target: RecordId, held: RecordId | None, bucket: Bucket) -> list[tuple[int, Record]]:
    """Records to apply, oldest first: the first is based on `held`, or on nothing."""
    chain: list[tuple[int, Record]] = []
    record_id: RecordId | None = target
    while record_id is not None and record_id != held:
        record = store.record(record_id)
        if not record.covers(bucket):
            raise BrokenChain(f"record {record_id.number} of {store.url!r} is of other tensors than bucket {bucket.index}, {bucket.tensors[0].name!r} ...")
        chain.insert(0, (record_id.number, record))
        record_id = record.base
    if not chain:  # the announced record is the one that is held: its own changes are none
        return _chain(store, target, None, bucket)
    return chain


def _apply(store: WeightStore, chain: list[tuple[int, Record]], bucket: Bucket, tensors: list[NDArray[np.uint8]] | list[None]) -> list[NDArray[np.uint8]]:
    itemsize = torch_dtype(bucket).itemsize
    current: list[NDArray[np.uint8] | None] = list(tensors)
    for number, record in chain:
        for place, (entry, blob) in enumerate(zip(record.entries[bucket.index], store.bucket(number, record, bucket.index), strict=True)):
            try:
                current[place] = decode(entry.encoding, blob, current[place], entry.spec.numel, itemsize)
            except ValueError as error:
                raise BrokenChain(f"record {number} of {store.url!r}, tensor {entry.spec.name!r}: {error}") from error
    return [tensor for tensor in current if tensor is not None]


def _wrong(tensors: list[NDArray[np.uint8]], record: Record, bucket: Bucket) -> list[str]:
    entries = record.entries[bucket.index]
    return [entry.spec.name for entry, flat in zip(entries, tensors, strict=True) if xxhash.xxh3_64_hexdigest(flat.data) != entry.xxh3]


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _named(tensors: list[NDArray[np.uint8]], bucket: Bucket) -> dict[str, torch.Tensor]:
    return {spec.name: _tensor(flat, spec, torch_dtype(bucket)) for spec, flat in zip(bucket.tensors, tensors, strict=True)}


def _tensor(flat: NDArray[np.uint8], spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(spec.shape)
