"""Which tensors travel together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.buckets import export_bytes, plan
from weight_sync.contracts import TensorSpec, WeightSyncError

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
MIB = 2**20

specs = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(sorted(BYTES))), min_size=1, max_size=30).map(
    lambda items: [TensorSpec(f"t{i}", (size,), dtype) for i, (size, dtype) in enumerate(items)]
)


def float32(name: str, mib: float) -> TensorSpec:
    return TensorSpec(name, (round(mib * MIB / 4),), "float32")


def test_the_documented_example() -> None:
    tensors = [float32("a", 0.6), float32("b", 0.3), float32("c", 0.3), float32("d", 5)]
    assert [[t.name for t in b.tensors] for b in plan(1, tensors, 1).buckets] == [["a", "b"], ["c"], ["d"]]


@given(specs)
def test_every_tensor_travels_once(tensors: list[TensorSpec]) -> None:
    assert sorted(t.name for t in plan(1, tensors, 0.004).tensors) == sorted(t.name for t in tensors)


@given(specs)
def test_a_bucket_has_one_dtype(tensors: list[TensorSpec]) -> None:
    assert all(len({t.dtype for t in b.tensors}) == 1 for b in plan(1, tensors, 0.004).buckets)


@given(specs)
def test_a_bucket_of_several_fits_the_limit(tensors: list[TensorSpec]) -> None:
    sizes = [[t.shape[0] * BYTES[t.dtype] for t in b.tensors] for b in plan(1, tensors, 0.004).buckets]
    assert all(len(group) == 1 or sum(group) <= 0.004 * MIB for group in sizes)


@given(specs)
def test_order_within_a_dtype_is_kept(tensors: list[TensorSpec]) -> None:
    planned = plan(1, tensors, 0.004).tensors
    for dtype in BYTES:
        assert [t for t in planned if t.dtype == dtype] == [t for t in tensors if t.dtype == dtype]


def test_a_tensor_larger_than_a_bucket_goes_alone() -> None:
    buckets = plan(1, [float32("small", 0.1), float32("large", 3), float32("last", 0.1)], 1).buckets
    assert [[t.name for t in b.tensors] for b in buckets] == [["small"], ["large"], ["last"]]


def test_export_bytes_counts_every_dtype() -> None:
    assert export_bytes(plan(1, [TensorSpec("a", (3, 5), "float32"), TensorSpec("b", (7,), "bfloat16"), TensorSpec("c", (), "float32")], 1)) == 60 + 14 + 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "exports no tensors"),
        ([TensorSpec("twin", (1,), "float32"), TensorSpec("twin", (1,), "float32")], "'twin' twice"),
        ([TensorSpec("odd", (1,), "float31")], "'odd' has dtype 'float31'"),
    ],
    ids=["empty", "twice", "dtype"],
)
def test_an_export_that_cannot_travel_is_refused(tensors: list[TensorSpec], message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        plan(4, tensors, 1)
