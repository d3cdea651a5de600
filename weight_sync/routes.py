"""Who sends what to whom: from the slices that trainer ranks hold and those that engine ranks want to a list of pieces, each sent once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from weight_sync.contracts import TensorSpec, WeightSyncError
from weight_sync.slices import Range, Slice, meet


@dataclass(frozen=True)
class Route:
    """One piece of a tensor on its way: from trainer rank `source` to destination `target` (a place in `wanted`)."""

    source: int
    target: int
    piece: Slice
    nbytes: int


def plan_routes(specs: Sequence[TensorSpec], itemsize: Mapping[str, int], held: Sequence[Sequence[Slice]], wanted: Sequence[Sequence[Slice]]) -> list[Route]:
    """Every wanted slice, cut where the trainer's shards are cut; where several ranks hold a piece, it comes from the one that has the
    fewest bytes to send so far. Largest tensors are dealt out first. In the order of `specs`, then of `wanted`.

    Args:
        itemsize: bytes of an element by dtype. held: by trainer rank. wanted: by destination.
    Raises:
        WeightSyncError: shards of a tensor overlap, or do not cover what is wanted; the tensor is named.
    """
    holders: dict[str, dict[Slice, list[int]]] = {spec.name: {} for spec in specs}
    for rank, slices in enumerate(held):
        for one in slices:
            if one.name in holders and one.numel:
                holders[one.name].setdefault(one, []).append(rank)
    targets: dict[str, list[tuple[int, Slice]]] = {spec.name: [] for spec in specs}
    for target, slices in enumerate(wanted):
        for one in slices:
            targets[one.name].append((target, one))
    load = [0] * len(held)
    routes: dict[str, list[Route]] = {}
    for spec in sorted(specs, key=lambda s: -s.numel * itemsize[s.dtype]):
        _refuse_overlaps(spec.name, holders[spec.name])
        routes[spec.name] = [route for target, one in targets[spec.name] for route in _routes(target, one, itemsize[spec.dtype], holders[spec.name], load)]
    return [route for spec in specs for route in routes[spec.name]]


def _routes(target: int, wanted: Slice, itemsize: int, holders: Mapping[Slice, list[int]], load: list[int]) -> list[Route]:
    routes = []
    for shard, ranks in holders.items():
        common = meet(shard.ranges, wanted.ranges)
        if common is None:
            continue
        piece = Slice(wanted.name, common)
        source = min(ranks, key=lambda rank: (load[rank], rank))
        load[source] += piece.numel * itemsize
        routes.append(Route(source, target, piece, piece.numel * itemsize))
    covered = sum(route.piece.numel for route in routes)
    if covered != wanted.numel:
        raise WeightSyncError(f"the trainer's shards have {covered} of the {wanted.numel} elements of {wanted.name!r} that engine rank {target} holds")
    return routes


def _refuse_overlaps(name: str, shards: Iterable[Slice], dimension: int = 0) -> None:
    """Shards make a grid: in each dimension their ranges are equal or apart."""
    before: Range | None = None
    for along, group in groupby(sorted(shards, key=lambda s: s.ranges), key=lambda s: s.ranges[dimension : dimension + 1]):
        if not along:  # a scalar, or all dimensions are through: `holders` has equal ones once
            return
        if before is not None and along[0][0] < before[1]:
            raise WeightSyncError(f"the trainer's shards of {name!r} overlap in dimension {dimension}: {before} and {along[0]} must be equal or apart")
        before = along[0]
        _refuse_overlaps(name, group, dimension + 1)
