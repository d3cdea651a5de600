"""The `broadcast` transport: trainer rank 0 sends every bucket to all engines at once through a process group of their own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weight_sync.buckets import export_bytes
from weight_sync.contracts import Bucket, FromGroup, GroupSpec, Manifest, WeightSource, WeightSyncError
from weight_sync.gather import gather_bucket, skip_bucket
from weight_sync.layout import torch_dtype, views
from weight_sync.parties import Engines, Sent, Trainer, call_one, call_trainer, causes, failures, take_as_consequences
from weight_sync.transports.broadcast import BroadcastGroup, Listener, MemberLeft, join

GRACE_S = 2.0


class BroadcastTransport:
    """The group lasts over updates and is made anew when the engines change or an update failed: a broken one cannot go on.

    Args:
        address: of trainer rank 0, as the engines reach it. Loopback keeps the group on one machine.
        backend: gloo or nccl.
    """

    def __init__(self, trainer: Trainer, engines: Engines, *, prefix: str, timeout_s: float, address: str, backend: str) -> None:
        self._trainer = trainer
        self._engines = engines
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._address = address
        self._backend = backend
        self._generation = 0
        self._engine_ids: tuple[int, ...] = ()
        self._group: str | None = None
        self._in_flight: asyncio.Task[list[Any]] | None = None
        self._received: dict[int, int] = {}  # buckets by engine, to say who is late

    async def setup(self, engine_ids: Sequence[int], manifest: Manifest) -> None:
        if self._group is not None and self._engine_ids == tuple(engine_ids):
            return
        await self.close()
        self._engine_ids = tuple(engine_ids)
        self._generation += 1
        self._group = f"{self._prefix}-{self._generation}"
        ports = await call_trainer(self._trainer, self._timeout_s, listen, self._group, self._address, self._timeout_s)
        group = GroupSpec(self._address, ports[0], 1 + len(engine_ids), self._group, self._backend, self._timeout_s)
        await self._together(
            join_group,
            (group,),
            [call_one(self._engines, engine_id, self._timeout_s, "weights_join", group, rank) for rank, engine_id in enumerate(engine_ids, 1)],
        )

    async def send(self, manifest: Manifest, digests: bool) -> Sent:
        assert self._group is not None
        self._received = dict.fromkeys(self._engine_ids, 0)
        receivers = [self._receive_all(engine_id, manifest) for engine_id in self._engine_ids]
        try:
            found = (await self._together(send_buckets, (self._group, manifest.buckets, digests), receivers))[0]
            return Sent(found, export_bytes(manifest))
        except WeightSyncError as error:
            last = min(self._received, key=lambda engine_id: self._received[engine_id])
            raise WeightSyncError(f"{error}; furthest behind was engine {last} with {self._received[last]} of {len(manifest.buckets)} buckets") from error

    async def close(self) -> None:
        if self._in_flight is not None:
            # Engines have left the group by now, so rank 0 fails at once; at worst it ends at the group's own deadline.
            await asyncio.wait([self._in_flight], timeout=self._timeout_s)
            self._in_flight = None
        if self._group is not None:
            with contextlib.suppress(WeightSyncError):  # the trainer may be what failed
                await call_trainer(self._trainer, self._timeout_s, leave, self._group)
            self._group = None

    async def _receive_all(self, engine_id: int, manifest: Manifest) -> None:
        for bucket in manifest.buckets:
            await call_one(self._engines, engine_id, self._timeout_s, "weights_receive", bucket, FromGroup())
            self._received[engine_id] += 1

    async def _together(self, fn: Any, args: tuple[Any, ...], engine_side: list[Any]) -> list[Any]:
        """Run `fn` on the ranks beside the engines' side; raises as soon as one fails, leaving the trainer's call to `close`."""
        self._in_flight = asyncio.ensure_future(call_trainer(self._trainer, self._timeout_s, fn, *args))
        engine_tasks = [asyncio.ensure_future(side) for side in engine_side]
        try:
            error = await _first_cause(engine_tasks, self._in_flight)
        finally:
            for task in engine_tasks:
                task.cancel()
        if error is not None:
            raise error
        results = self._in_flight.result()
        self._in_flight = None
        return results


async def _first_cause(engine_tasks: list[asyncio.Task[None]], trainer_task: asyncio.Task[list[Any]]) -> BaseException | None:
    """None when all succeeded. When a member dies, the others may notice before the driver does: what they raise is a consequence,
    so the engine's own failure has GRACE_S seconds to come in."""
    tasks: list[asyncio.Task[Any]] = [*engine_tasks, trainer_task]
    take_as_consequences(tasks)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    end = time.monotonic() + GRACE_S
    while errors := failures(tasks):
        roots = [error for error in errors if not any(isinstance(cause, MemberLeft) for cause in causes(error))]
        pending = [task for task in engine_tasks if not task.done()]
        if roots or not pending or time.monotonic() > end:
            return [*roots, *errors][0]
        await asyncio.wait(pending, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
    return None


_listeners: dict[str, Listener] = {}
_groups: dict[str, BroadcastGroup] = {}


def listen(backend: WeightSource, rank: int, name: str, address: str, timeout_s: float) -> int:
    """Rank 0 opens the store of group `name`; returns its port (0 on other ranks)."""
    if rank != 0:
        return 0
    _listeners[name] = Listener(address, timeout_s)
    return _listeners[name].port


def join_group(backend: WeightSource, rank: int, group: GroupSpec) -> None:
    """Rank 0 becomes the sender of `group`."""
    if rank == 0:
        _groups[group.name] = join(group, 0, _listeners[group.name])


def send_buckets(backend: WeightSource, rank: int, name: str, buckets: tuple[Bucket, ...], digests: bool) -> dict[str, str]:
    """Gather and broadcast all buckets; the next one is gathered while the present one is on its way. Collective."""
    remaining = iter(buckets)
    found: dict[str, str] = {}
    started: tuple[Bucket, dist.Work] | None = None
    try:
        for bucket in remaining:
            flat = torch.empty(bucket.numel if rank == 0 else 0, dtype=torch_dtype(bucket), device=_groups[name].device if rank == 0 else "cpu")
            found |= gather_bucket(backend, rank, bucket, lambda flat=flat, bucket=bucket: views(flat, bucket), digests)  # type: ignore[misc]
            if rank == 0:
                if started is not None:
                    _groups[name].finish(*started)
                started = bucket, _groups[name].start(bucket, flat)
        if started is not None:
            _groups[name].finish(*started)
    except BaseException as error:  # raised again below
        # Engines that still wait to receive are freed by this; their own leaving cannot free them.
        leave(backend, rank, name)
        if isinstance(error, WeightSyncError):
            # Gathering itself works, and the other ranks are in the midst of it.
            for bucket in remaining:
                skip_bucket(backend, bucket)
        raise
    return found


def leave(backend: WeightSource, rank: int, name: str) -> None:
    """Rank 0 leaves group `name` and closes its store. Idempotent."""
    group = _groups.pop(name, None)
    if group is not None:
        group.close()
    _listeners.pop(name, None)
