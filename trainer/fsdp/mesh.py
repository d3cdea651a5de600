"""How the ranks of the `fsdp` backend are laid out: replicas x shards x tensor-parallel, tensor fastest, as a DeviceMesh and its groups.

Parameters are sharded over the `shard` ranks of a replica (FSDP2), replicas hold the same shards and sum their gradients (HSDP), and the
`tensor` ranks share the heads and columns of each layer. A batch is shared out over replica x shard: tensor ranks compute the same rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank's place.

    Attributes:
        data_rank, data_world: which share of a batch is this rank's, and of how many. data_group: of the ranks that share one; None: all ranks.
        fsdp: over which parameters are sharded, one-dimensional or replicas x shards; None on a single rank.
        tensor: over which layers are divided; None where they are not.
        experts: over which the experts of a layer are divided, the ranks of `fsdp`; None where they are sharded as other parameters are.
        offload: whether a rank's part of parameters, gradients and optimizer lies in CPU memory.
    """

    rank: int
    world: int
    data_rank: int
    data_world: int
    data_group: dist.ProcessGroup | None = None
    fsdp: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    offload: bool = False

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all shares of a batch, in place. Collective."""
        if self.data_world > 1:
            dist.all_reduce(tensor, group=self.data_group)
        return tensor


def open_mesh(config: TrainerConfig, rank: int, world: int, device: torch.device) -> Mesh:
    """Collective over the default process group where there is more than one rank.

    Groups are opened once for each layout in a process: several models, such as policy and critic, are on one mesh.
    """
    replicas, tensor = config.replicas, config.tensor_parallel
    assert world % (replicas * tensor) == 0, "TrainerConfig checks it"
    shares = world // tensor
    if world == 1:
        return Mesh(rank=rank, world=world, data_rank=0, data_world=1, offload=config.offload)
    mesh, group = _device_mesh(dist.group.WORLD, device.type, (replicas, shares // replicas, tensor), config.timeout_s)
    fsdp = mesh if mesh.ndim == 1 else mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
    return Mesh(
        rank=rank,
        world=world,
        data_rank=rank // tensor,
        data_world=shares,
        data_group=group,
        fsdp=fsdp,
        tensor=mesh["tensor"] if tensor > 1 else None,
        experts=fsdp if config.expert_parallel > 1 else None,
        offload=config.offload,
    )


@functools.lru_cache
def _device_mesh(everyone: Any, device: str, sizes: tuple[int, int, int], timeout_s: float) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """The dimensions that are more than one rank long, and always `shard`; the group of the ranks that share a batch. `everyone` is the
    default group, for the cache's sake."""
    named = [(name, size) for name, size in zip(("replicate", "shard", "tensor"), sizes, strict=True) if size > 1 or name == "shard"]
    names, lengths = zip(*named, strict=True)
    if len(named) == 1:
        return init_device_mesh(device, lengths, mesh_dim_names=names), None
    override: Any = {name: (dist.get_backend(), _options(timeout_s)) for name in names}  # torch's own would be half an hour
    mesh = init_device_mesh(device, lengths, mesh_dim_names=names, backend_override=override)
    if "tensor" not in names:
        return mesh, None
    if "replicate" not in names:
        return mesh, mesh["shard"].get_group()
    replicas, shards, tensor = sizes
    ranks = torch.arange(replicas * shards * tensor).view(-1, tensor).T.tolist()
    mine, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timedelta(seconds=timeout_s))
    return mesh, mine


def _options(timeout_s: float) -> Any:
    if dist.get_backend() == "nccl":
        options: Any = dist.ProcessGroupNCCL.Options()
    else:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    return options
