"""Rectangles of tensors: what NumPy's own indexing gives is what a clipped block says."""

from __future__ import annotations

import numpy as np
import pytest

from weight_sync.contracts import TensorSpec
from weight_sync.slices import Block, Ranges, Slice, rows_of, whole


def cut(array: np.ndarray, ranges: Ranges) -> np.ndarray:
    return array[tuple(slice(*r) for r in ranges)]


# Expert 2's half of a fused tensor [4 experts, 8, 5]: the checkpoint has it as [4, 5].
EXPERT = Block("up", ((0, 4), (0, 5)), ((2, 3), (4, 8), (0, 5)))
PLACES = np.arange(4 * 8 * 5).reshape(4, 8, 5)


@pytest.mark.parametrize("there", [((0, 4), (0, 5)), ((1, 3), (0, 5)), ((3, 4), (2, 3)), ((0, 2), (4, 9))])
def test_a_part_of_the_checkpoints_tensor_has_the_same_elements_in_the_holders(there: Ranges) -> None:
    block = EXPERT.within(there)
    assert block is not None
    found = cut(cut(PLACES, EXPERT.here).reshape(4, 5), block.there)
    assert np.array_equal(cut(PLACES, block.here).reshape(found.shape), found)
    assert found.shape == cut(np.empty((4, 5)), there).shape


@pytest.mark.parametrize("here", [((0, 4), (0, 8), (0, 5)), ((2, 4), (5, 6), (0, 5)), ((2, 3), (0, 6), (1, 3))])
def test_a_part_of_the_holders_tensor_has_the_same_elements_in_the_checkpoints(here: Ranges) -> None:
    block = EXPERT.holding(here)
    assert block is not None
    mark = np.zeros(PLACES.shape, bool)
    mark[tuple(slice(*r) for r in here)] = True
    inside = cut(mark, EXPERT.here).reshape(4, 5)
    found = np.zeros((4, 5), bool)
    found[tuple(slice(*r) for r in block.there)] = True
    assert np.array_equal(found, inside)


def test_other_rows_and_other_experts_have_no_part() -> None:
    assert EXPERT.within(((4, 6), (0, 5))) is None
    assert EXPERT.holding(((1, 2), (0, 8), (0, 5))) is None
    assert EXPERT.holding(((2, 3), (0, 4), (0, 5))) is None


@pytest.mark.parametrize(("rows", "ranks"), [(5, 4), (2, 4), (8, 2), (151936, 7), (1, 1)])
def test_rows_are_dealt_as_numpys_and_torchs_chunks(rows: int, ranks: int) -> None:
    import torch

    shares = [list(range(*rows_of(rows, ranks, rank))) for rank in range(ranks)]
    chunks = [chunk.tolist() for chunk in torch.chunk(torch.arange(rows), ranks)]
    assert shares == chunks + [[]] * (ranks - len(chunks))


def test_a_slice_is_called_as_its_tensor_where_it_is_the_whole() -> None:
    assert whole(TensorSpec("a", (2, 3), "float32")).of((2, 3)) == "a"
    assert Slice("a", ((0, 1), (0, 3))).of((2, 3)) == "a[0:1,0:3]"
    assert whole(TensorSpec("scalar", (), "float32")).numel == 1
