"""The `broadcast` transport's process group: trainer rank 0 sends, every engine rank receives.

The group stands beside the trainer's default process group and needs none: it is a bare gloo or NCCL group on a store of
its own. Its key prefixes are those of SGLang's `init_weights_update_group` (group name, group name with a slash, device), so a
server may be a member; every bucket is broadcast as raw bytes, which is SGLang's `flattened_bucket` load format.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weight_sync.contracts import Bucket, GroupSpec, WeightSyncError
from weight_sync.layout import nbytes, torch_dtype, views


class MemberLeft(WeightSyncError):
    """The group broke: often the consequence of another failure, which says more."""


class Listener:
    """Rank 0's store. The kernel chooses the port and the socket is never released in between, so no other process can take it.

    `address` is bound as given: loopback stays loopback.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._socket = socket.create_server((address, 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        # The store takes the descriptor over and closes it: detach, so that Python does not close it a second time.
        self.store = dist.TCPStore(
            address, self.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), master_listen_fd=self._socket.detach()
        )


class BroadcastGroup:
    """A member of the group. `send` on rank 0 and `receive` on the others are called in step, one pair for each bucket."""

    def __init__(self, backend: Any, group: GroupSpec, store: dist.Store) -> None:
        self._backend = backend  # ProcessGroupGloo or ProcessGroupNCCL, None once closed; torch's stubs know neither's broadcast
        self._group = group
        self._store = store  # rank 0's store serves the others: it must live as long as the group
        self._device = torch.device("cuda", torch.cuda.current_device()) if group.backend == "nccl" else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Where buffers of this group live: the CPU (gloo) or this process's GPU (nccl)."""
        return self._device

    def send(self, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast the bucket's `tensors`, in its order; blocks until they are on their way.

        Raises:
            MemberLeft: a member is gone, or the deadline passed.
        """
        flat = torch.empty(bucket.numel, dtype=torch_dtype(bucket), device=self._device)
        for place, tensor in zip(views(flat, bucket).values(), tensors, strict=True):
            place.copy_(tensor)
        self.finish(bucket, self.start(bucket, flat))

    def start(self, bucket: Bucket, flat: torch.Tensor) -> dist.Work:
        """Begin to send a buffer [bucket.numel] already filled; it must not change until `finish`."""
        return self._broadcast(bucket, flat.view(torch.uint8))

    def finish(self, bucket: Bucket, work: dist.Work) -> None:
        """Wait for what `start` began. Raises MemberLeft as `send` does."""
        try:
            work.wait(timedelta(seconds=self._group.timeout_s))
        except RuntimeError as error:
            raise self._lost(bucket, error) from error

    def receive(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The bucket's tensors by name, views on one new buffer.

        Raises:
            MemberLeft: the sender is gone, or the deadline passed.
        """
        flat = torch.empty(nbytes(bucket), dtype=torch.uint8, device=self._device)
        self.finish(bucket, self._broadcast(bucket, flat))
        return views(flat.view(torch_dtype(bucket)), bucket)

    def close(self) -> None:
        """Leave the group. Connections are cut, so a member that waits for this one fails at once. Idempotent.

        Gloo lets an operation of this member that is under way end first: rank 0, which knows that nothing more will come, leaves first.
        """
        if self._backend is not None:
            self._backend.abort()
            self._backend = None

    def _broadcast(self, bucket: Bucket, flat: torch.Tensor) -> dist.Work:
        if self._backend is None:
            raise WeightSyncError(f"group {self._group.name!r}, bucket {bucket.index}: this member has left the group")
        try:
            return self._backend.broadcast(flat, 0)
        except RuntimeError as error:
            raise self._lost(bucket, error) from error

    def _lost(self, bucket: Bucket, error: RuntimeError) -> MemberLeft:
        return MemberLeft(f"group {self._group.name!r}, bucket {bucket.index}: a member left or {self._group.timeout_s:g} s passed: {error}")


class Membership:
    """An engine's place in at most one group at a time. `who` is what errors call it."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._group: BroadcastGroup | None = None

    def join(self, group: GroupSpec, rank: int) -> None:
        """Become member `rank` of `group`, and leave the one before. Raises WeightSyncError as `join` does."""
        self.leave()
        self._group = join(group, rank)

    def leave(self) -> None:
        """Also frees a thread that waits in `receive`. Idempotent."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def receive(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """See `BroadcastGroup.receive`."""
        if self._group is None:
            raise WeightSyncError(f"{self._who}: bucket {bucket.index} comes by broadcast, but weights_join was not called")
        return self._group.receive(bucket)


def join(group: GroupSpec, rank: int, listener: Listener | None = None) -> BroadcastGroup:
    """Become member `rank` of `group`; blocks until all are there. Rank 0 passes the `Listener` whose port is in `group`.

    Raises:
        WeightSyncError: not every member came within `group.timeout_s`, or the address cannot be reached.
    """
    timeout = timedelta(seconds=group.timeout_s)
    try:
        if listener is None:
            store: dist.Store = dist.TCPStore(group.address, group.port, is_master=False, wait_for_workers=False, timeout=timeout)
        else:
            store = listener.store
        prefixed = dist.PrefixStore(group.name + "/", dist.PrefixStore(group.name, store))
        return BroadcastGroup(_backend(group, rank, prefixed, timeout), group, store)
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"rank {rank} could not join group {group.name!r} of {group.world_size} at {group.address}:{group.port} within {group.timeout_s:g} s: {error}"
        ) from error


def _backend(group: GroupSpec, rank: int, store: dist.Store, timeout: timedelta) -> Any:
    if group.backend == "gloo":
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        # Left to itself, gloo listens where the host name resolves to, which other machines often cannot reach.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_local_address(group))]
        return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, group.world_size, gloo)
    if group.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, group.world_size, nccl)
    raise WeightSyncError(f"group {group.name!r} has backend {group.backend!r}; valid: gloo, nccl")


def _local_address(group: GroupSpec) -> str:
    """The address of this machine on the way to rank 0. A connected UDP socket finds it; nothing is sent."""
    family = socket.getaddrinfo(group.address, group.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((group.address, group.port))
        return str(probe.getsockname()[0])
