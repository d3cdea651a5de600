"""The `p2p` transport's two ends of a read, through NIXL's transfer engine: RDMA where UCX finds it, else TCP.

An engine reads what it needs from the trainer's memory; nothing is ever written into an engine from outside. So an update that was given
up cannot reach what a later one has staged. Memory is host memory on both sides.

The transfer engine's ports have no password: whoever reaches them reads the trainer's outgoing weights. With a loopback address they are
open to this machine alone; otherwise UCX_NET_DEVICES says which interfaces are used, which belong to a closed network.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.contracts import Bucket, FromShards, Read, Source, WeightSyncError
from weight_sync.digests import digest
from weight_sync.layout import torch_dtype, views
from weight_sync.slices import Slice

_POLL_S = 0.0002
_PROGRESS_US = 10_000
_DRAIN_S = 2.0


class Agent:
    """This process's part of the transfer engine. It lives as long as the process does: peers hold addresses in it."""

    def __init__(self, loopback: bool) -> None:
        """Raises WeightSyncError where NIXL is not installed or finds no interface."""
        library = nixl()
        with environment({"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"} if loopback else {}):
            try:
                with _progress_waits(library.nixlBind):
                    self.nixl: Any = library.nixl_agent(f"miles-{uuid.uuid4()}", library.nixl_agent_config(backends=["UCX"], capture_telemetry=True))
            except library.nixlBind.nixlBackendError as error:
                raise WeightSyncError(f"NIXL cannot start with UCX ({error}): UCX_NET_DEVICES = {os.environ.get('UCX_NET_DEVICES', 'not set')}") from error
        self._peers: dict[str, bytes] = {}

    def peer(self, source: Source) -> str:
        """The name of that process, known to this one from here on."""
        if self._peers.get(source.name) != source.agent:
            if self._peers.pop(source.name, None):  # its memory has moved
                self.nixl.remove_remote_agent(source.name)
            self.nixl.add_remote_agent(source.agent)
            self._peers[source.name] = source.agent
        return source.name


class Outbox:
    """A trainer rank's memory that engines read: its pieces of an update, end to end. It stays where it is while it is large enough, so that
    an engine that is late with an earlier update reads bytes that it will not use, and never memory that is gone."""

    def __init__(self, loopback: bool) -> None:
        self._agent = Agent(loopback)
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._earlier: list[torch.Tensor] = []
        self._registered: Any = None
        self._description = b""

    def reserve(self, size: int) -> Source:
        """Room for `size` bytes at least; what lay there is void."""
        if size > self._flat.numel() or self._registered is None:
            if self._registered is not None:
                self._agent.nixl.deregister_memory(self._registered)
                self._earlier.append(self._flat)
            self._flat = torch.empty(max(size, 1), dtype=torch.uint8)
            self._registered = self._agent.nixl.register_memory(self._flat)
            self._description = self._agent.nixl.get_agent_metadata()
        return Source(self._agent.nixl.name, self._description, self._flat.data_ptr())

    def place(self, offset: int, piece: Slice, dtype: torch.dtype) -> torch.Tensor:
        """Where `piece` goes, or lies."""
        return self._flat[offset : offset + piece.numel * dtype.itemsize].view(dtype).view(piece.shape)


@dataclass
class Moved:
    """What a reader has moved since it was made, by the transfer engine's own telemetry."""

    bytes: int = 0
    requests: int = 0
    seconds: float = 0.0


class ShardReader:
    """An engine's end. `who` is what errors call it."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._agent: Agent | None = None
        self._busy = threading.Lock()
        self._given_up = threading.Event()
        self._abandoned: list[tuple[Any, ...]] = []
        self.moved = Moved()

    def read(self, bucket: Bucket, payload: FromShards, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Read the bucket into `flat` [its bytes]; returns its tensors by name, views on it. Pieces that do not lie in one run there take
        one more copy.

        Raises:
            WeightSyncError: a trainer rank is gone, `stop` was called, or `payload.timeout_s` is over.
        """
        with self._busy:
            self._given_up.clear()
            if self._agent is None:
                self._agent = Agent(payload.loopback)
            places = views(flat.view(torch_dtype(bucket)), bucket)
            self._read(self._agent, bucket, payload, places, flat)
        return places

    def stop(self) -> None:
        """End a read that is under way in another thread; returns when it has ended. Idempotent."""
        self._given_up.set()
        with self._busy:
            pass

    def _read(self, agent: Agent, bucket: Bucket, payload: FromShards, places: Mapping[str, torch.Tensor], flat: torch.Tensor) -> None:
        into = [places[read.piece.name][indices(read.piece)] for read in payload.reads]
        apart = torch.empty(sum(place.nbytes for place in into if not place.is_contiguous()), dtype=torch.uint8)
        landing, used = [], 0
        for place in into:
            if place.is_contiguous():
                landing.append(place)
            else:
                landing.append(apart[used : used + place.nbytes].view(place.dtype).view(place.shape))
                used += place.nbytes
        registered = [agent.nixl.register_memory(memory) for memory in (flat, apart) if memory.numel()]
        try:
            self._transfer(agent, bucket, payload, landing)
        finally:
            if self._agent is agent:
                for memory in registered:
                    agent.nixl.deregister_memory(memory)
        for place, landed in zip(into, landing, strict=True):
            if landed is not place:
                place.copy_(landed)

    def _transfer(self, agent: Agent, bucket: Bucket, payload: FromShards, landing: list[torch.Tensor]) -> None:
        """Everything from all sources at once."""
        end = time.monotonic() + payload.timeout_s
        pending: list[tuple[int, Any]] = []
        errors = nixl().nixlBind
        number = 0
        try:
            for number, source in enumerate(payload.sources):
                mine = [(read, to) for read, to in zip(payload.reads, landing, strict=True) if read.source == number and to.numel()]
                if mine:
                    pending.append((number, self._start(agent, source, mine)))
            while pending:
                number, handle = pending[0]
                state = agent.nixl.check_xfer_state(handle)
                if state == "DONE":
                    self._count(agent, handle)
                    pending.pop(0)
                    agent.nixl.release_xfer_handle(handle)
                elif state == "ERR":
                    self._abandon(agent, pending, landing)
                    raise WeightSyncError(f"{self._who}: bucket {bucket.index}: reading from trainer rank {number} failed")
                elif self._given_up.is_set():
                    self._finish(agent, pending, landing)
                    raise WeightSyncError(f"{self._who}: bucket {bucket.index}: the update was given up")
                elif time.monotonic() > end:
                    self._abandon(agent, pending, landing)
                    raise WeightSyncError(f"{self._who}: bucket {bucket.index}: trainer rank {number} gave no answer in time ({payload.timeout_s:g} s)")
                else:
                    time.sleep(_POLL_S)
        except (errors.nixlRemoteDisconnectError, errors.nixlBackendError) as error:
            self._abandon(agent, pending, landing)
            raise WeightSyncError(f"{self._who}: bucket {bucket.index}: trainer rank {number} is gone ({error})") from error

    def _finish(self, agent: Agent, pending: list[tuple[int, Any]], landing: list[torch.Tensor]) -> None:
        """Let transfers that nobody needs come to their end: peers that live are quick."""
        end = time.monotonic() + _DRAIN_S
        while pending and time.monotonic() < end:
            state = agent.nixl.check_xfer_state(pending[0][1])
            if state == "DONE":
                agent.nixl.release_xfer_handle(pending.pop(0)[1])
            elif state == "ERR":
                break
            else:
                time.sleep(_POLL_S)
        if pending:
            self._abandon(agent, pending, landing)

    def _abandon(self, agent: Agent, pending: list[tuple[int, Any]], landing: list[torch.Tensor]) -> None:
        """Go on with another agent. A transfer that has not ended may still write, and to cancel it or to close its connection corrupts UCX's
        memory now and then (NIXL 1.5.1 over TCP: one abort in four killed the process under load): so agent, transfers and memory stay as they
        are for as long as this process lives. A broken connection does not mend itself either."""
        self._abandoned.append((agent, list(pending), landing))
        self._agent = None

    def _start(self, agent: Agent, source: Source, reads: list[tuple[Read, torch.Tensor]]) -> Any:
        local = agent.nixl.get_xfer_descs([(to.data_ptr(), to.nbytes, 0) for _, to in reads], "DRAM")
        remote = agent.nixl.get_xfer_descs([(source.address + read.offset, to.nbytes, 0) for read, to in reads], "DRAM")
        handle = agent.nixl.initialize_xfer("READ", local, remote, agent.peer(source))
        agent.nixl.transfer(handle)
        return handle

    def _count(self, agent: Agent, handle: Any) -> None:
        telemetry = agent.nixl.get_xfer_telemetry(handle)
        self.moved.bytes += telemetry.totalBytes
        self.moved.requests += telemetry.descCount
        self.moved.seconds += telemetry.xferDuration / 1e6


def indices(piece: Slice) -> tuple[slice, ...]:
    """To index a tensor of the checkpoint with."""
    return tuple(slice(start, stop) for start, stop in piece.ranges)


def received(bucket: Bucket, payload: FromShards) -> dict[str, list[Slice]]:
    """The pieces of each of the bucket's tensors."""
    pieces: dict[str, list[Slice]] = {spec.name: [] for spec in bucket.tensors}
    for read in payload.reads:
        pieces[read.piece.name].append(read.piece)
    return pieces


def piece_digests(tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Sequence[Slice]]) -> dict[str, str]:
    """xxh3 of the pieces that tensors came in, and of those whole that came whole."""
    found = {}
    for name, tensor in tensors.items():
        if name not in pieces:
            found[name] = digest(tensor)
        for piece in pieces.get(name, ()):
            found[piece.of(tensor.shape)] = digest(tensor[indices(piece)])
    return found


def nixl() -> Any:
    """NIXL's Python interface. Raises WeightSyncError where it is not installed."""
    try:
        with environment({"NIXL_LOG_LEVEL": "WARN"}):  # else every start is a line on stdout
            from nixl_cu12 import _api
    except ImportError as error:
        raise WeightSyncError(f"weight_sync.transport = 'p2p' needs NIXL, which is not installed: pip install nixl-cu12 ({error})") from error
    return _api


@contextmanager
def _progress_waits(binding: Any) -> Iterator[None]:
    """The thread that serves peers waits in `poll` for them. NIXL's Python interface sets its timeout to 0, which takes a whole core for as long
    as the process lives, and has no argument for it."""
    plain = binding.nixlAgentConfig

    def set_but_wait(config: Any, name: str, value: Any) -> None:
        plain.__setattr__(config, name, _PROGRESS_US if name == "pthrDelay" else value)

    binding.nixlAgentConfig = type("WaitingConfig", (plain,), {"__setattr__": set_but_wait})
    try:
        yield
    finally:
        binding.nixlAgentConfig = plain


@contextmanager
def environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """NIXL and UCX read their settings when they start. What the operator has set stays; the rest is for this start alone."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
