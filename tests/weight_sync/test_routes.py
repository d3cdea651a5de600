"""Routes from trainer shards to engine shards: every element once, from one of its holders, loads even."""

from __future__ import annotations

import numpy as np
import pytest

from weight_sync.contracts import TensorSpec, WeightSyncError
from weight_sync.routes import Route, plan_routes
from weight_sync.slices import Ranges, Slice, rows_of, whole

SPECS = [TensorSpec("wide", (8, 64), "bfloat16"), TensorSpec("tall", (64, 8), "bfloat16"), TensorSpec("norm", (10,), "float32")]
SIZES = {"bfloat16": 2, "float32": 4}


def rows(world: int) -> list[list[Slice]]:
    """FSDP's shards; a rank may hold nothing of a tensor."""
    return [[Slice(s.name, (rows_of(s.shape[0], world, rank), *((0, size) for size in s.shape[1:]))) for s in SPECS] for rank in range(world)]


def columns(ranks: int) -> list[list[Slice]]:
    """Tensor parallelism: the wide one by columns, the tall one by rows, the norm everywhere."""
    share = 64 // ranks
    cut = [(r * share, (r + 1) * share) for r in range(ranks)]
    return [[Slice("wide", ((0, 8), at)), Slice("tall", (at, (0, 8))), whole(SPECS[2])] for at in cut]


def plan(held: list[list[Slice]], wanted: list[list[Slice]]) -> list[Route]:
    return plan_routes(SPECS, SIZES, held, wanted)


def mark(ranges: Ranges, shape: tuple[int, ...]) -> np.ndarray:
    found = np.zeros(shape, int)
    found[tuple(slice(*r) for r in ranges)] = 1
    return found


@pytest.mark.parametrize("wanted", [columns(1), columns(2), columns(2) * 2], ids=["one", "two tensor ranks", "two engines of two"])
@pytest.mark.parametrize("held", [rows(1), rows(2), rows(3), rows(4), columns(2), columns(2) * 2], ids=lambda held: f"{len(held)}")
def test_every_engine_rank_gets_each_element_it_holds_once_and_from_a_holder(held: list[list[Slice]], wanted: list[list[Slice]]) -> None:
    routes = plan(held, wanted)
    for target, slices in enumerate(wanted):
        for spec, one in zip(SPECS, slices, strict=True):
            got = sum(mark(r.piece.ranges, spec.shape) for r in routes if r.target == target and r.piece.name == spec.name)
            assert np.array_equal(got, mark(one.ranges, spec.shape))
    for route in routes:
        shape = next(s.shape for s in SPECS if s.name == route.piece.name)
        owned = sum(mark(one.ranges, shape) for one in held[route.source] if one.name == route.piece.name)
        assert (owned >= mark(route.piece.ranges, shape)).all()


def test_bytes_are_those_of_what_the_engine_ranks_hold() -> None:
    assert sum(route.nbytes for route in plan(rows(3), columns(2))) == 2 * 8 * 64 * 2 + 2 * 10 * 4


def test_copies_of_the_trainers_shards_share_the_work() -> None:
    routes = plan(columns(2) * 2, columns(2) * 4)
    load = [sum(route.nbytes for route in routes if route.source == rank) for rank in range(4)]
    assert max(load) - min(load) <= 8 * 64 * 2 // 2
    assert sum(load) == 4 * (2 * 8 * 64 * 2 + 2 * 10 * 4)


def test_what_no_rank_holds_is_named() -> None:
    held = rows(2)
    held[1] = [one for one in held[1] if one.name != "tall"]
    with pytest.raises(WeightSyncError, match="256 of the 512 elements of 'tall'"):
        plan(held, columns(1))


def test_shards_that_overlap_are_refused() -> None:
    held = rows(2)
    held[1][0] = Slice("wide", ((3, 8), (0, 64)))
    with pytest.raises(WeightSyncError, match="shards of 'wide' overlap in dimension 0"):
        plan(held, columns(1))
