"""The `[weight_sync]` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import LONGEST_S, Section


class WeightSyncConfig(Section):
    """How weights reach the engines."""

    transport: Literal["tensor", "broadcast", "p2p", "delta", "views"] = Field(
        "tensor",
        description="tensor: shared memory, same machine; broadcast: a process group (gloo or NCCL); "
        "p2p: engines read slices from each trainer rank (NIXL: RDMA or TCP); delta: changed bytes through a shared store; "
        "views: torch engines read the trainer's own float32 weights, same machine, max_staleness = 0",
    )
    store: str | None = Field(
        None, description="delta: a path that fsspec knows (folder, s3://, gs://) and that trainer and engines share; null: in the run folder"
    )
    pause: Literal["abort", "retract", "in_place"] = Field("retract", description="what becomes of running generations during an update")
    bucket_mb: float = Field(64.0, gt=0, description="size of one bucket in MiB")
    verify: Literal["first", "always", "never"] = Field("first", description="when the digest of every tensor is compared on both sides")
    timeout_s: float = Field(120.0, gt=0, le=LONGEST_S, description="deadline of each stage of an update, in seconds")
