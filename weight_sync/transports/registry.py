"""The one place where `weight_sync.transport` becomes an object."""

from __future__ import annotations

from weight_sync.config import WeightSyncConfig
from weight_sync.parties import Engines, Trainer, Transport
from weight_sync.transports.broadcast_transport import BroadcastTransport
from weight_sync.transports.tensor_transport import TensorTransport


def make_transport(config: WeightSyncConfig, trainer: Trainer, engines: Engines, *, prefix: str, address: str, backend: str) -> Transport:
    """The transport that `config` names. `prefix` is this run's own, for file and group names; the rest is BroadcastTransport's."""
    if config.transport == "tensor":
        return TensorTransport(trainer, engines, prefix=prefix, timeout_s=config.timeout_s)
    return BroadcastTransport(trainer, engines, prefix=prefix, timeout_s=config.timeout_s, address=address, backend=backend)
