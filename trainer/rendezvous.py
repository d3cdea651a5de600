"""How trainer ranks find each other without racing for a port: rank 0 lets the kernel choose it and never lets go of it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist


@dataclass(frozen=True)
class Meeting:
    """Where rank 0's store listens."""

    address: str
    port: int


def open_store(address: str, world: int, timeout_s: float) -> tuple[dist.TCPStore, Meeting]:
    """Rank 0: a store on a free port of `address`, this node's own. Ranks wait for each other for `timeout_s` seconds."""
    store = dist.TCPStore(address, 0, world_size=world, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, Meeting(address, store.port)


def join(meeting: Meeting, store: dist.TCPStore | None, *, rank: int, world: int, address: str, gpu: bool, timeout_s: float) -> None:
    """Initialise the default process group: gloo, and NCCL for GPU tensors. `store` is rank 0's own, None on other ranks.

    A collective that the others do not come to within `timeout_s` seconds raises. `address` is this node's; gloo is told the interface
    that has it, since by itself it may take one that other nodes cannot reach.
    """
    timeout = timedelta(seconds=timeout_s)
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if store is None:
        store = dist.TCPStore(meeting.address, meeting.port, world_size=world, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=timeout)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, or None when none of this machine's has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) and entry.address == address for entry in entries):
            return name
    return None
