"""The `delta` transport: changed bytes through a file system or an object store that trainer and engines share.

For clusters without a common network, and for steps so small that few bfloat16 weights change. Rank 0 keeps the export's bytes of the
last record in memory (one copy of the weights as they are exported, on the CPU) to compare the next with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.contracts import Bucket, FromStore, Manifest, RecordId, WeightSource, WeightSyncError
from weight_sync.digests import digest
from weight_sync.gather import gather_bucket, skip_bucket
from weight_sync.layout import nbytes, torch_dtype, views
from weight_sync.parties import Engines, Sent, Trainer, call_all, call_trainer, causes
from weight_sync.transports.delta_codec import encode
from weight_sync.transports.delta_store import BrokenChain, Entry, Record, WeightStore

logger = logging.getLogger(__name__)


class DeltaTransport:
    """One record for each update; engines that have an earlier one, or none, take what they lack.

    A record is written while the engines still generate. A new snapshot is written when the changes since the last one are as large as
    it is, so that an engine that joins never reads more than two snapshots' bytes; it makes all earlier records needless, and they go.
    """

    def __init__(self, trainer: Trainer, engines: Engines, *, url: str, timeout_s: float) -> None:
        self._trainer = trainer
        self._engines = engines
        self._url = url
        self._timeout_s = timeout_s
        self._engine_ids: tuple[int, ...] = ()
        self._writing: asyncio.Task[list[Any]] | None = None
        self._written: Written | None = None

    async def setup(self, engine_ids: Sequence[int], manifest: Manifest) -> None:
        self._engine_ids = tuple(engine_ids)
        self._written = await self._write(manifest, snapshot=False)

    async def send(self, manifest: Manifest, digests: bool) -> Sent:
        written = self._written
        assert written is not None, "setup comes first"
        try:
            await self._receive(manifest, written.record)
        except WeightSyncError as error:
            if not any(isinstance(cause, BrokenChain) for cause in causes(error)):
                raise
            logger.warning("the weights are written in full again: %s", error)
            written = await self._write(manifest, snapshot=True)
            await self._receive(manifest, written.record)
        return Sent(written.digests if digests else {}, written.nbytes)

    async def close(self) -> None:
        """Records stay: they are what an engine that joins later reads."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=self._timeout_s)
            self._writing = None

    async def _write(self, manifest: Manifest, *, snapshot: bool) -> Written:
        self._writing = asyncio.ensure_future(call_trainer(self._trainer, self._timeout_s, write_record, self._url, manifest, snapshot))
        written: Written = (await asyncio.shield(self._writing))[0]
        return written

    async def _receive(self, manifest: Manifest, record: RecordId) -> None:
        for bucket in manifest.buckets:
            await call_all(self._engines, self._engine_ids, self._timeout_s, "weights_receive", bucket, FromStore(self._url, record))


@dataclass
class _Shadow:
    """Rank 0's memory of the last record: its bytes by bucket, and how much was written since the last snapshot, manifests included."""

    record: RecordId
    manifest: tuple[Bucket, ...]
    flats: list[NDArray[np.uint8]]
    snapshot_bytes: int
    since: int = 0


@dataclass(frozen=True)
class Written:
    """A record as rank 0 wrote it: `digests` of every tensor, and the bytes that went to the store."""

    record: RecordId
    digests: dict[str, str]
    nbytes: int


_shadows: dict[str, _Shadow] = {}


def write_record(backend: WeightSource, rank: int, url: str, manifest: Manifest, snapshot: bool) -> Written | None:
    """Gather the export bucket by bucket and write the next record, in full where that is asked for or there is nothing to compare with.
    Collective; rank 0 writes and returns what it wrote."""
    if rank != 0:
        for bucket in manifest.buckets:
            skip_bucket(backend, bucket)
        return None
    # A record that is not finished leaves nothing to compare with: the next one is a snapshot.
    shadow = _shadows.pop(url, None)
    if shadow is not None and (snapshot or shadow.manifest != manifest.buckets or shadow.since >= shadow.snapshot_bytes):
        shadow = None
    entries: list[tuple[Entry, ...]] = []
    files: list[str] = []
    flats: list[NDArray[np.uint8]] = []
    remaining = iter(manifest.buckets)
    try:
        store = WeightStore(url)
        number = max(store.numbers(), default=0) + 1
        for bucket in remaining:
            flat = torch.empty(bucket.numel, dtype=torch_dtype(bucket))
            gather_bucket(backend, rank, bucket, lambda flat=flat, bucket=bucket: views(flat, bucket), digests=False)  # type: ignore[misc]
            old = None if shadow is None else shadow.flats[bucket.index]
            new: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
            written, content = _encode(bucket, flat, new, old)
            files.append(store.write_bucket(number, bucket.index, content))
            entries.append(written)
            flats.append(new)
            if shadow is not None:
                shadow.flats[bucket.index] = new  # the old bytes have served: one copy of the weights at a time
    finally:
        for bucket in remaining:  # other ranks are in the midst of gathering
            skip_bucket(backend, bucket)
    record = Record(manifest.version, None if shadow is None else shadow.record, tuple(entries), tuple(files))
    record_id, manifest_bytes = store.write_manifest(number, record)
    size = record.nbytes + manifest_bytes
    if shadow is None:
        store.remove([earlier for earlier in store.numbers() if earlier < number])
        _shadows[url] = _Shadow(record_id, manifest.buckets, flats, size)
    else:
        _shadows[url] = _Shadow(record_id, manifest.buckets, flats, shadow.snapshot_bytes, shadow.since + size)
    return Written(record_id, {e.spec.name: e.xxh3 for bucket_entries in entries for e in bucket_entries}, size)


def _encode(bucket: Bucket, flat: torch.Tensor, new: NDArray[np.uint8], old: NDArray[np.uint8] | None) -> tuple[tuple[Entry, ...], bytes]:
    entries, blobs, start = [], [], 0
    for spec, tensor in zip(bucket.tensors, views(flat, bucket).values(), strict=True):
        end = start + nbytes(Bucket(0, (spec,)))
        encoding, blob = encode(new[start:end], None if old is None else old[start:end], flat.itemsize)
        entries.append(Entry(spec, encoding, len(blob), digest(tensor)))
        blobs.append(blob)
        start = end
    return tuple(entries), b"".join(blobs)
