"""Weights that rollout and trainer need not both hold: which tensor of the one is a view of a tensor of the other on the same device.

Both sides divide a checkpoint by tensor parallelism, of different degree and in layouts of their own (heads fused in groups, gate above up,
vocabularies padded). Where the smaller shard lies in one piece inside the larger one, it can be a view; everything else is rebuilt. Pure
arithmetic on name-and-slice maps: a tensor is blocks, each a rectangle `there` of a checkpoint's tensor and `here` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

Range = tuple[int, int]


class Block(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def there(self) -> tuple[Range, ...]: ...
    @property
    def here(self) -> tuple[Range, ...]: ...


class Part(Protocol):
    """A tensor. What no block covers is padding."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def blocks(self) -> Sequence[Block]: ...


@dataclass(frozen=True, kw_only=True)
class View:
    """One tensor of the smaller shard.

    Attributes:
        owner: the tensor of the larger shard whose rows from `start` it is; None where it must be rebuilt, `why` says for what reason.
        bytes: of the tensor.
    """

    tensor: str
    owner: str | None
    start: int
    bytes: int
    why: str = ""


def views(smaller: Mapping[str, Part], larger: Mapping[str, Part], itemsize: int) -> list[View]:
    """A row for each tensor of `smaller`. No two rows need agree: an owner may be seen through several views."""
    holders: dict[str, list[str]] = {}
    for owner, part in larger.items():
        for name in dict.fromkeys(block.name for block in part.blocks):
            holders.setdefault(name, []).append(owner)
    found = []
    for tensor, part in smaller.items():
        size = prod(part.shape) * itemsize
        why = "padding alone"
        for owner in holders.get(part.blocks[0].name, []) if part.blocks else []:
            start, why = _start(part, larger[owner])
            if start is not None:
                found.append(View(tensor=tensor, owner=owner, start=start, bytes=size))
                break
        else:
            found.append(View(tensor=tensor, owner=None, start=0, bytes=size, why=why or "the other shard has other parts of it"))
    return found


def saved_bytes(rows: Sequence[View]) -> int:
    """Of the tensors that are views."""
    return sum(row.bytes for row in rows if row.owner is not None)


def beside(device: int, engine: int, trainer: int) -> tuple[int, int]:
    """The tensor ranks of a device: of engines of degree `engine` and a trainer of degree `trainer`, one of which divides the other.

    The shards of the smaller degree lie over neighbours of the larger one, so that each contains its neighbour's. Example: engine 2, trainer
    4: devices 0 to 3 have the trainer's ranks 0 to 3 and the engines' 0, 0, 1, 1, that is engines on devices (0, 2) and (1, 3).
    """
    wide = max(engine, trainer)
    if wide % min(engine, trainer):
        raise ValueError(f"tensor-parallel degrees {engine} and {trainer}: one must divide the other, or no shard contains another")
    place = device % wide
    return place // (wide // engine), place // (wide // trainer)


def _start(part: Part, owner: Part) -> tuple[int | None, str]:
    """The row of `owner` where `part` begins, or None and why it is not there in one piece."""
    starts: set[tuple[int, ...]] = set()
    for block in part.blocks:
        offsets = list(_offsets(block, owner))
        if not offsets:
            return None, "its blocks lie apart in the other layout" if any(b.name == block.name for b in owner.blocks) else ""
        starts.add(offsets[0])
    if len(starts) > 1:
        return None, "fused parts lie in another order or at another distance"
    (start,) = starts
    if any(s or size != whole for s, size, whole in zip(start[1:], part.shape[1:], owner.shape[1:], strict=True)):
        return None, "columns of a matrix are not contiguous"
    if start[0] < 0 or start[0] + part.shape[0] > owner.shape[0]:
        return None, "padding reaches beyond the other shard"
    window = (start[0], start[0] + part.shape[0])
    there = sum(_rows(block.here[0], window) * prod(b - a for a, b in block.here[1:]) for block in owner.blocks)
    if there != sum(prod(b - a for a, b in block.here) for block in part.blocks):
        return None, "where it has padding the other shard has weights"
    return start[0], ""


def _offsets(block: Block, owner: Part) -> Iterator[tuple[int, ...]]:
    """Where the tensor of `block` would begin in `owner`, by each block of the owner that contains it."""
    for other in owner.blocks:
        if other.name == block.name and all(c <= a and b <= d for (a, b), (c, d) in zip(block.there, other.there, strict=True)):
            ranges = zip(block.there, other.there, block.here, other.here, strict=True)
            yield tuple(o_here[0] + there[0] - o_there[0] - here[0] for there, o_there, here, o_here in ranges)


def _rows(rows: Range, window: Range) -> int:
    return max(0, min(rows[1], window[1]) - max(rows[0], window[0]))
