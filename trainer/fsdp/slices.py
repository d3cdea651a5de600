"""The name-and-slice map of FSDP: which rows of which checkpoint tensors a rank has.

How the tensors of a checkpoint lie in those in memory (fused experts: many in one) is asked of transformers' own conversion, on tensors
without storage: what it returns are views, and a view says where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from weight_sync.slices import Block, Range, Slice, full, rows_of


class _Place(Tensor):
    """A tensor on the meta device whose views keep their offsets, since making one contiguous does nothing."""

    def contiguous(self, *args: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return self


def checkpoint_blocks(model: PreTrainedModel, own: str, shape: tuple[int, ...]) -> list[Block]:
    """The checkpoint's tensors in the tensor that the model calls `own`.

    Raises:
        ValueError: one of them is no rectangle of it in the same order of elements (transposed, interleaved or computed).
    """
    place = torch.Tensor._make_subclass(_Place, torch.empty(shape, device="meta"))
    return [_block(own, name, part, place) for name, part in revert_weight_conversion(model, {own: place}).items()]


def planned(tensors: Mapping[str, Tensor], blocks: Mapping[str, list[Block]], world: int, rank: int) -> list[Slice]:
    """What `rank` of `world` will hold of tensors that are not yet cut: parameters by rows, buffers whole."""
    held = []
    for own, tensor in tensors.items():
        shape = tuple(tensor.shape)
        for block in blocks[own]:
            share = local(block, shape, rows_of(shape[0], world, rank)) if isinstance(tensor, nn.Parameter) else block
            if share is not None:
                held.append(share.slice)
    return held


class RankSlices:
    """What this rank holds of `tensors` (by the names they have in memory) as the checkpoint's `blocks` of them, in `dtype`.

    A tensor that FSDP shards is cut by rows; any other is whole on every rank.
    """

    def __init__(self, tensors: Mapping[str, Tensor], blocks: Mapping[str, list[Block]], dtype: torch.dtype):
        self._tensors, self._dtype = tensors, dtype
        self._held: dict[str, tuple[str, Block]] = {}
        for own, tensor in tensors.items():
            rows = _rows(tensor)
            for block in blocks[own]:
                if (held := block if rows is None else local(block, tuple(tensor.shape), rows)) is not None:
                    self._held[block.name] = own, held

    def slices(self) -> list[Slice]:
        return [block.slice for _, block in self._held.values()]

    def tensor(self, piece: Slice) -> Tensor:
        """`piece` of a slice. Raises KeyError for one of another rank."""
        own, held = self._held[piece.name]
        block = held.within(piece.ranges)
        assert block is not None, f"{piece} does not meet {held.slice}"
        mine = self._tensors[own].detach()
        mine = mine.to_local() if isinstance(mine, DTensor) else mine
        return mine[tuple(slice(*range_) for range_ in block.here)].reshape(piece.shape).to(self._dtype)


def _rows(tensor: Tensor) -> Range | None:
    if not isinstance(tensor, DTensor):
        return None
    assert tensor.placements == (Shard(0),), "model.shard makes one mesh of all ranks"
    rows = rows_of(tensor.shape[0], tensor.device_mesh.size(), tensor.device_mesh.get_local_rank())
    assert tensor.to_local().shape[0] == rows[1] - rows[0]
    return rows


def local(block: Block, shape: tuple[int, ...], rows: Range) -> Block | None:
    """The part of `block` in those rows of its tensor, which begin at 0 in the rank's own; None for no part."""
    held = block.holding((rows, *full(shape[1:]))) if rows[0] < rows[1] else None
    if held is None:
        return None
    (start, stop), *rest = held.here
    return Block(held.name, held.there, ((start - rows[0], stop - rows[0]), *rest))


def _block(own: str, name: str, part: Tensor, place: Tensor) -> Block:
    if part.untyped_storage()._cdata != place.untyped_storage()._cdata:
        raise ValueError(f"{name} is computed from {own}, it does not lie in it: weight_sync.transport = 'p2p' cannot slice it, use 'tensor' or 'broadcast'")
    here = []
    sizes = [(size, stride) for size, stride in zip(part.shape, part.stride(), strict=True) if size > 1]
    for size, stride in zip(place.shape, place.stride(), strict=True):
        start = part.storage_offset() // stride % size
        here.append((start, start + (sizes.pop(0)[0] if sizes and size > 1 and sizes[0][1] == stride else 1)))
    if sizes:
        raise ValueError(f"{name} lies in {own} in another order: weight_sync.transport = 'p2p' cannot slice it, use 'tensor' or 'broadcast'")
    return Block(name, full(part.shape), tuple(here))
