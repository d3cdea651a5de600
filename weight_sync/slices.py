"""The words of every name-and-slice map: which part of which checkpoint tensor lies where in a tensor that somebody holds.

Trainers and engines cut and fuse the tensors of a checkpoint each in their own way (FSDP's rows, tensor and pipeline ranks, experts in one
tensor, fused projections, padded vocabularies). All of them are described here by rectangles. Pure arithmetic, without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from weight_sync.contracts import TensorSpec

Range = tuple[int, int]
"""Start and stop in one dimension."""

Ranges = tuple[Range, ...]


@dataclass(frozen=True)
class Slice:
    """The rectangle `ranges` of checkpoint tensor `name`."""

    name: str
    ranges: Ranges

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.ranges)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, shape: Sequence[int]) -> str:
        """A name for it: the tensor's own where it is the whole of `shape`, else e.g. `lm_head.weight[64:128,0:32]`."""
        if self.shape == tuple(shape):
            return self.name
        return f"{self.name}[{','.join(f'{start}:{stop}' for start, stop in self.ranges)}]"


@dataclass(frozen=True)
class Block:
    """The rectangle `there` of checkpoint tensor `name` is the rectangle `here` of a holder's tensor, one range a dimension.

    Both have the same elements in the same (row-major) order: dimensions of size 1 may differ in number, such as that of an expert
    in a tensor of all of them.
    """

    name: str
    there: Ranges
    here: Ranges

    @property
    def numel(self) -> int:
        return prod(shape_of(self.here))

    @property
    def slice(self) -> Slice:
        return Slice(self.name, self.there)

    def within(self, there: Ranges) -> Block | None:
        """The part of it in that rectangle of the checkpoint's tensor; None where they do not meet."""
        return self._clipped(there, self.here)

    def holding(self, here: Ranges) -> Block | None:
        """The part of it in that rectangle of the holder's tensor; None where they do not meet."""
        return self._clipped(self.there, here)

    def _clipped(self, there: Ranges, here: Ranges) -> Block | None:
        met_there, met_here = meet(self.there, there), meet(self.here, here)
        if met_there is None or met_here is None:
            return None
        new_there, new_here = list(met_there), list(met_here)
        for i, j in zip(_extended(self.there), _extended(self.here), strict=True):
            shift = self.here[j][0] - self.there[i][0]
            common = _overlap(new_here[j], (new_there[i][0] + shift, new_there[i][1] + shift))
            if common is None:
                return None
            new_here[j], new_there[i] = common, (common[0] - shift, common[1] - shift)
        return Block(self.name, tuple(new_there), tuple(new_here))


def whole(spec: TensorSpec) -> Slice:
    """All of a tensor."""
    return Slice(spec.name, full(spec.shape))


def full(shape: Sequence[int]) -> Ranges:
    return tuple((0, size) for size in shape)


def shape_of(ranges: Ranges) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ranges)


def meet(one: Ranges, other: Ranges) -> Ranges | None:
    """What two rectangles have in common, None where that is nothing. Raises ValueError where they differ in dimensions."""
    common = []
    for a, b in zip(one, other, strict=True):
        overlap = _overlap(a, b)
        if overlap is None:
            return None
        common.append(overlap)
    return tuple(common)


def rows_of(rows: int, ranks: int, rank: int) -> Range:
    """Which rows FSDP gives to `rank`: equal shares, the last ones shorter or empty, as `torch.chunk` cuts. 5 rows over 4 ranks: 2, 2, 1, 0."""
    share = -(-rows // ranks)
    return min(rank * share, rows), min((rank + 1) * share, rows)


def _extended(ranges: Ranges) -> Iterator[int]:
    return (index for index, (start, stop) in enumerate(ranges) if stop - start > 1)


def _overlap(a: Range, b: Range) -> Range | None:
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None
