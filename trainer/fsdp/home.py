"""Parameters in memory that other processes of the machine may map: engines then read the trainer's weights where they lie.

Each parameter lies there whole, as one piece, and the rows that a rank has of it are a view like any other. FSDP cuts by rows, padding last,
and tensor parallelism cuts some by rows, too. What is cut by columns stays where it is, and so does what two ranks have both, as replicas do:
each steps what it has. So does what is no parameter.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weight_sync.contracts import Home, Placed, WeightSyncError
from weight_sync.slices import Block
from weight_sync.transports.views import HEADER, counter

_ALIGNED = 64


class SharedParameters:
    """Of `model`, whose `tensors` (by the names they have in memory, parts of them on several ranks) have the checkpoint's `blocks`."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor], blocks: Mapping[str, list[Block]]):
        self._model = model
        self._whole = {name: tensor for name, tensor in tensors.items() if _can_lie_whole(tensor)}
        self._offsets: dict[str, int] = {}
        end = HEADER
        for name, tensor in self._whole.items():
            self._offsets[name] = end
            end += -(-_rows(tensor) * prod(tensor.shape[1:]) * tensor.element_size() // _ALIGNED) * _ALIGNED
        self._bytes = end
        self._placed = tuple(one for name, tensor in self._whole.items() for block in blocks[name] if (one := self._place(name, tensor, block)) is not None)
        self._count: Tensor | None = None
        self._path: str | None = None
        self._descriptor: int | None = None

    def home(self, path: str | None) -> Home:
        """See `HomedSource.weight_home`. Raises WeightSyncError where there is no room."""
        if self._path is None and path is None:
            self._descriptor = _reserved(self._bytes)
            self._path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        elif path is not None and self._count is None:
            self._path = path
            self._move(path)
        assert self._path is not None
        return Home(self._path, self._bytes, int(self._count) if self._count is not None else 0, self._placed)

    def moving(self) -> None:
        """The parameters are about to change. Rank 0 counts for all: none of them moves before the norm of all gradients is known, rank 0's too."""
        if self._count is not None and self._descriptor is not None:
            self._count.add_(1)

    def _move(self, path: str) -> None:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), self._bytes)
        padded: dict[int, Tensor] = {}
        with torch.no_grad():
            for name, tensor in self._whole.items():
                width, row = tensor.shape[1:], prod(tensor.shape[1:]) * tensor.element_size()

                def rows(first: int, count: int, tensor: Tensor = tensor, start: int = self._offsets[name], width: Any = width, row: int = row) -> Tensor:
                    # A storage of its own: who copies a storage whole, as checkpoints do, copies no other parameter and no other rank's rows.
                    return torch.frombuffer(memory, dtype=tensor.dtype, count=count * prod(width), offset=start + first * row).view(count, *width)

                if not isinstance(tensor, DTensor):
                    tensor.data = rows(0, len(tensor)).copy_(tensor)
                    continue
                own, mesh = tensor.to_local(), tensor.device_mesh
                _, (first, *_) = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
                height = _rows(tensor) // mesh.size()
                # A rank behind the last row begins anywhere; its padding lies at the end.
                place = rows(first if len(own) else _rows(tensor) - height, height)
                place[len(own) :].zero_()
                tensor._local_tensor = place[: len(own)].copy_(own)
                padded[id(tensor)] = place
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                # As FSDP's own `reset_sharded_param` after parameters were changed under it, which would move padded ones elsewhere.
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        if (found := padded.get(id(parameter.sharded_param))) is not None:
                            parameter._sharded_param_data = found.view(-1)
        self._count = counter(path)

    def _place(self, name: str, tensor: Tensor, block: Block) -> Placed | None:
        """The checkpoint's tensor as a view; None where it lies in pieces."""
        here = torch.empty(tensor.shape, device="meta")[tuple(slice(*range_) for range_ in block.here)]
        try:
            view = here.view([stop - start for start, stop in block.there])
        except RuntimeError:
            return None
        return Placed(block.name, self._offsets[name] // tensor.element_size() + int(view.storage_offset()), tuple(view.stride()))


def _reserved(size: int) -> int:
    """A file without a name of so many bytes, which are taken now: a mapping that finds a limit reached later kills the process."""
    descriptor = os.memfd_create("miles-weights")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.close(descriptor)
        raise WeightSyncError(f"weight_sync.transport = 'views' cannot reserve {size} bytes of shared memory for the weights: {error.strerror}") from error
    return descriptor


def _can_lie_whole(tensor: Tensor) -> bool:
    if not isinstance(tensor, nn.Parameter) or tensor.device.type != "cpu" or not tensor.ndim or not tensor.numel():
        return False
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    by_rows = all(getattr(placement, "dim", None) == 0 for placement, size in zip(tensor.placements, mesh.shape, strict=True) if size > 1)
    even = tensor.shape[0] % mesh.size() == 0
    return by_rows and mesh.size() == dist.get_world_size() and (even or mesh.ndim == 1)


def _rows(tensor: Tensor) -> int:
    """Of all ranks, padding among them."""
    ranks = tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1
    return -(-tensor.shape[0] // ranks) * ranks
