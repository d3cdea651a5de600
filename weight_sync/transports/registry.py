"""The one place where `weight_sync.transport` becomes an object."""

from __future__ import annotations

import hashlib
from pathlib import Path

from weight_sync.config import WeightSyncConfig
from weight_sync.parties import Engines, Trainer, Transport
from weight_sync.transports.broadcast_transport import BroadcastTransport
from weight_sync.transports.delta_transport import DeltaTransport
from weight_sync.transports.p2p_transport import P2PTransport
from weight_sync.transports.tensor_transport import TensorTransport
from weight_sync.transports.views_transport import ViewsTransport


def make_transport(config: WeightSyncConfig, trainer: Trainer, engines: Engines, *, journal: Path, address: str, backend: str) -> Transport:
    """The transport that `config` names, for the run whose journal is there; the rest is BroadcastTransport's."""
    prefix = run_prefix(journal)
    if config.transport == "tensor":
        return TensorTransport(trainer, engines, prefix=prefix, timeout_s=config.timeout_s)
    if config.transport == "views":
        return ViewsTransport(trainer, engines, prefix=prefix, timeout_s=config.timeout_s)
    if config.transport == "delta":
        url = f"{config.store.rstrip('/')}/{prefix}" if config.store else str(journal.absolute().parent / "weights")
        return DeltaTransport(trainer, engines, url=url, timeout_s=config.timeout_s)
    if config.transport == "p2p":
        return P2PTransport(trainer, engines, timeout_s=config.timeout_s, address=address)
    return BroadcastTransport(trainer, engines, prefix=prefix, timeout_s=config.timeout_s, address=address, backend=backend)


def run_prefix(journal_path: Path) -> str:
    """How this run's files and groups are called: one that is started again finds its own leftovers by it, and no other run's."""
    return "miles-weights-" + hashlib.sha256(str(journal_path.absolute()).encode()).hexdigest()[:16]
