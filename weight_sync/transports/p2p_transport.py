"""The `p2p` transport: every engine reads its own slices from the trainer ranks that hold them. No rank gathers a tensor.

Each rank copies the pieces that were asked of it into a buffer of its own, in the export's dtype, while the engines still generate: at most
its shard of the export. Reading from there is the engines' work, and needs nothing of the trainer's processes.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from typing import Any

import torch

from weight_sync.buckets import export_bytes
from weight_sync.contracts import Bucket, FromShards, Manifest, Read, Source, TensorSpec, WeightSource, WeightSyncError
from weight_sync.digests import digest
from weight_sync.layout import torch_dtype
from weight_sync.parties import Engines, Sent, Trainer, call_one, call_trainer, until_first_failure
from weight_sync.routes import Route, plan_routes
from weight_sync.slices import Slice, whole
from weight_sync.transports.p2p import Outbox

ALIGNMENT = 16


class P2PTransport:
    """Which piece comes from which rank is planned anew when the export or the engines change.

    Args:
        address: of trainer rank 0. Loopback keeps the transfer engine on one machine.
    """

    def __init__(self, trainer: Trainer, engines: Engines, *, timeout_s: float, address: str) -> None:
        self._trainer = trainer
        self._engines = engines
        self._timeout_s = timeout_s
        self._loopback = ipaddress.ip_address(address).is_loopback
        self._planned: tuple[Any, ...] = ()
        self._plan: Plan | None = None
        self._sources: tuple[Source, ...] = ()
        self._at_work: asyncio.Task[list[Any]] | None = None

    async def setup(self, engine_ids: Sequence[int], manifest: Manifest) -> None:
        if self._planned != (tuple(engine_ids), manifest.buckets):
            held = await call_trainer(self._trainer, self._timeout_s, held_slices)
            self._plan = Plan(manifest, held, [[whole(spec) for spec in manifest.tensors] for _ in engine_ids])
            self._planned = tuple(engine_ids), manifest.buckets
        assert self._plan is not None
        self._sources = tuple(await self._on_trainer(pack, self._plan.outgoing, self._loopback))

    async def send(self, manifest: Manifest, digests: bool) -> Sent:
        assert self._plan is not None, "setup comes first"
        engine_ids = self._planned[0]
        found: dict[str, str] = {}
        hashing = asyncio.ensure_future(self._on_trainer(digest_pieces, self._plan.outgoing)) if digests else None
        reading = [asyncio.ensure_future(self._read_all(engine_id, manifest, target)) for target, engine_id in enumerate(engine_ids)]
        try:
            await until_first_failure([*reading, *([hashing] if hashing else [])])
        finally:
            for task in reading:
                task.cancel()
        if hashing is not None:
            for of_rank in hashing.result():
                found |= of_rank
        return Sent(found, export_bytes(manifest))

    async def close(self) -> None:
        """The ranks keep their buffers for the next update."""
        if self._at_work is not None:
            await asyncio.wait([self._at_work], timeout=self._timeout_s)
            self._at_work = None
        self._planned = ()

    async def _read_all(self, engine_id: int, manifest: Manifest, target: int) -> None:
        assert self._plan is not None
        for bucket in manifest.buckets:
            payload = FromShards(self._sources, self._plan.reads[target, bucket.index], self._loopback, self._timeout_s)
            await call_one(self._engines, engine_id, self._timeout_s, "weights_receive", bucket, payload)

    async def _on_trainer(self, fn: Any, *args: Any) -> list[Any]:
        self._at_work = asyncio.ensure_future(call_trainer(self._trainer, self._timeout_s, fn, *args))
        results = await asyncio.shield(self._at_work)
        self._at_work = None
        return results


Outgoing = tuple[tuple[int, Slice, TensorSpec], ...]
"""What a rank puts into its buffer: offset in bytes, piece, and the tensor that it is a piece of."""


class Plan:
    """The routes of an update as buffers and reads.

    Attributes:
        outgoing: by trainer rank. A piece that several engines read from it is there once.
        reads: by place in `wanted` and bucket.
    """

    def __init__(self, manifest: Manifest, held: Sequence[Sequence[Slice]], wanted: Sequence[Sequence[Slice]]) -> None:
        """Raises WeightSyncError as `plan_routes`."""
        bucket_of = {spec.name: bucket for bucket in manifest.buckets for spec in bucket.tensors}
        spec_of = {spec.name: spec for spec in manifest.tensors}
        itemsize = {bucket.dtype: torch_dtype(bucket).itemsize for bucket in manifest.buckets}
        self.routes: list[Route] = plan_routes(manifest.tensors, itemsize, held, wanted)
        offsets: dict[tuple[int, Slice], int] = {}
        size = [0] * len(held)
        for route in self.routes:
            if (route.source, route.piece) not in offsets:
                offsets[route.source, route.piece] = size[route.source]
                size[route.source] += -(-route.nbytes // ALIGNMENT) * ALIGNMENT
        outgoing: list[list[tuple[int, Slice, TensorSpec]]] = [[] for _ in held]
        for (source, piece), offset in offsets.items():
            outgoing[source].append((offset, piece, spec_of[piece.name]))
        self.outgoing = tuple(map(tuple, outgoing))
        reads: dict[tuple[int, int], list[Read]] = {(target, bucket.index): [] for target in range(len(wanted)) for bucket in manifest.buckets}
        for route in self.routes:
            reads[route.target, bucket_of[route.piece.name].index].append(Read(route.source, offsets[route.source, route.piece], route.piece))
        self.reads = {key: tuple(of_bucket) for key, of_bucket in reads.items()}


_outbox: Outbox | None = None


def held_slices(backend: WeightSource, rank: int) -> tuple[Slice, ...]:
    """What this rank holds of the export."""
    try:
        return tuple(backend.weight_slices())
    except ValueError as error:
        raise WeightSyncError(str(error)) from error


def pack(backend: WeightSource, rank: int, outgoing: tuple[Outgoing, ...], loopback: bool) -> Source:
    """Copy this rank's pieces to where engines read them, in the export's dtype."""
    global _outbox
    if _outbox is None:
        _outbox = Outbox(loopback)
    mine = outgoing[rank]
    source = _outbox.reserve(max((offset + piece.numel * _dtype(spec).itemsize for offset, piece, spec in mine), default=0))
    with torch.no_grad():
        for offset, piece, spec in mine:
            _outbox.place(offset, piece, _dtype(spec)).copy_(backend.weight_slice(piece))
    return source


def digest_pieces(backend: WeightSource, rank: int, outgoing: tuple[Outgoing, ...]) -> dict[str, str]:
    """xxh3 of each of this rank's pieces, as they lie there to be read."""
    assert _outbox is not None, "pack comes first"
    return {piece.of(spec.shape): digest(_outbox.place(offset, piece, _dtype(spec))) for offset, piece, spec in outgoing[rank]}


def _dtype(spec: TensorSpec) -> torch.dtype:
    return torch_dtype(Bucket(0, (spec,)))
