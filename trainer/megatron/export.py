"""What leaves the trainer: full tensors under their Hugging Face names, put together on rank 0 from the ranks that hold their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.megatron.architecture import Architecture
from trainer.megatron.directory import slices
from trainer.megatron.mesh import Mesh
from trainer.megatron.names import Held, buffers, held_by, holders, shapes
from weight_sync.contracts import TensorSpec
from weight_sync.slices import Slice


class Exporter:
    """`tensors`: this rank's own, one dict a chunk. What is exported has `dtype`."""

    def __init__(self, architecture: Architecture, mesh: Mesh, tensors: Sequence[Mapping[str, Tensor]], dtype: torch.dtype):
        self._own, self._mesh, self._dtype = tensors, mesh, dtype
        self._shapes, self._holders = shapes(architecture), holders(architecture, mesh.layout)
        self._mine = held_by(architecture, mesh.layout, mesh.rank)
        self._float32 = buffers(architecture)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, shape, str(self._dtype_of(name)).removeprefix("torch.")) for name, shape in self._shapes.items()]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors on rank 0 in the order of `names`, elsewhere empty ones. Collective: every rank takes every step."""
        for name in names:
            yield name, self._gathered(name)

    def slices(self) -> list[Slice]:
        """What this rank holds; data-parallel copies hold the same."""
        return [held.block.slice for blocks in self._mine.values() for held in blocks]

    def slice(self, piece: Slice) -> Tensor:
        """`piece` of one of `slices`."""
        for held in self._mine[piece.name]:
            block = held.block.within(piece.ranges)
            if block is not None and block.there == piece.ranges:
                return self._local(replace(held, block=block))
        raise AssertionError(f"{piece} is not within a slice of this rank")

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self._float32 else self._dtype

    def _gathered(self, name: str) -> Tensor:
        """Each holding rank sends its blocks of the tensor in one message."""
        device, dtype = next(iter(self._own[0].values())).device, self._dtype_of(name)
        receives = self._mesh.rank == 0
        full = torch.empty(self._shapes[name] if receives else 0, dtype=dtype, device=device)
        for rank, group in groupby(self._holders[name], key=lambda held: held.rank):
            held = list(group)
            if rank == 0 and receives:
                for one in held:
                    full[slices(one.block.there)] = self._local(one)
            elif rank == self._mesh.rank:
                dist.send(torch.cat([self._local(one).flatten() for one in held]), 0, group=self._mesh.everyone)
            elif receives:
                message = torch.empty(sum(one.block.numel for one in held), dtype=dtype, device=device)
                dist.recv(message, rank, group=self._mesh.everyone)
                for one, flat in zip(held, message.split([one.block.numel for one in held]), strict=True):
                    place = full[slices(one.block.there)]
                    place.copy_(flat.view(place.shape))
        return full

    def _local(self, held: Held) -> Tensor:
        return self._own[held.chunk][held.tensor].detach()[slices(held.block.here)].to(self._dtype_of(held.block.name))
