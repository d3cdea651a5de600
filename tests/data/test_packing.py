import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.data.packing import balanced_rows, microbatches, pack
from miles.data.types import Sample, Status

LENGTHS = st.lists(st.integers(1, 200), max_size=40)


def sample(prompt: list[int], response: list[int], mask: list[bool] | None = None) -> Sample:
    return Sample(
        sample_id="0/0",
        group_id="0",
        tokens=prompt + response,
        prompt_length=len(prompt),
        loss_mask=[True] * len(response) if mask is None else mask,
        logprobs=[-0.5 * t for t in response],
        weight_versions=[2] * len(response),
        status=Status.COMPLETED,
    )


def test_the_worked_example_of_the_docstring():
    packed = pack([sample([5, 6], [8, 9]), sample([7], [4])])
    assert packed.tokens_T.tolist() == [5, 6, 8, 9, 7, 4]
    assert packed.positions_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.sequence_T.tolist() == [0, 0, 0, 0, 1, 1]
    assert packed.targets_N.tolist() == [8, 9, 4]
    assert packed.target_index_N.tolist() == [1, 2, 4]
    assert packed.sequence_N.tolist() == [0, 0, 1]
    assert packed.rollout_logprobs_N.tolist() == [-4.0, -4.5, -2.0]
    assert packed.weight_versions_N.tolist() == [2, 2, 2]
    assert packed.length_S.tolist() == [4, 2]
    assert packed.response_length_S.tolist() == [2, 1]


def test_dtypes_are_those_promised():
    packed = pack([sample([1], [2])])
    for name in ("tokens_T", "positions_T", "sequence_T", "target_index_N", "targets_N", "sequence_N", "length_S"):
        assert getattr(packed, name).dtype == np.int64, name
    assert packed.loss_mask_N.dtype == np.bool_
    assert packed.rollout_logprobs_N.dtype == np.float32
    assert packed.weight_versions_N.dtype == np.int32


def test_masked_response_tokens_stay_in_the_row_with_their_mask():
    packed = pack([sample([1], [2, 3, 4], [True, False, True])])
    assert packed.loss_mask_N.tolist() == [True, False, True]
    assert packed.targets_N.tolist() == [2, 3, 4]


def test_a_sample_without_a_response_adds_tokens_and_no_target():
    packed = pack([sample([1, 2], []), sample([3], [4])])
    assert packed.tokens_T.tolist() == [1, 2, 3, 4]
    assert packed.target_index_N.tolist() == [2]
    assert packed.sequence_N.tolist() == [1]


@given(LENGTHS, st.integers(1, 6), st.integers(1, 300))
def test_balanced_rows_hold_every_index_once_within_the_bound(lengths, ranks, max_tokens):
    plans = balanced_rows(lengths, [float(n * n) for n in lengths], ranks, max_tokens)
    assert len(plans) == ranks
    assert len({len(plan) for plan in plans}) == 1
    rows = [row for plan in plans for row in plan]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(len(row) <= 1 or sum(lengths[i] for i in row) <= max_tokens for row in rows)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 300))
def test_a_balanced_row_is_empty_only_for_want_of_sequences(lengths, ranks, max_tokens):
    rows = [row for plan in balanced_rows(lengths, lengths, ranks, max_tokens) for row in plan]
    assert sum(not row for row in rows) == max(0, len(rows) - len(lengths))


@given(st.lists(st.integers(1, 64), min_size=64, max_size=128), st.integers(2, 4))
def test_rows_that_are_computed_at_one_time_differ_by_no_more_than_a_sequence(lengths, ranks):
    costs = [float(n * n) for n in lengths]
    for step in zip(*balanced_rows(lengths, costs, ranks, 256), strict=True):
        heavy, light = (f(step, key=lambda row: sum(costs[i] for i in row)) for f in (max, min))
        assert sum(costs[i] for i in heavy) - sum(costs[i] for i in light) <= max(costs)


def test_the_balance_is_of_costs_where_those_grow_faster_than_lengths():
    """One sequence of 100 beside ten of 10: equal tokens, ten times the cost."""
    lengths = [100] + [10] * 10 + [30] * 9
    plans = balanced_rows(lengths, [n * n for n in lengths], 2, 1000)
    loads = [sum(lengths[i] ** 2 for row in plan for i in row) for plan in plans]
    assert max(loads) == 10_000
    assert min(loads) == 10 * 100 + 9 * 900


def test_the_worked_example_of_balanced_rows():
    assert balanced_rows([6, 5, 4, 3, 2], [6, 5, 4, 3, 2], 2, 8) == [[[0], [2]], [[1], [3, 4]]]


@given(LENGTHS, st.integers(1, 300))
def test_microbatches_hold_every_index_once_within_the_bound(lengths, max_tokens):
    bins = microbatches(lengths, max_tokens)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    for b in bins:
        assert len(b) == 1 or sum(lengths[i] for i in b) <= max_tokens


@given(LENGTHS, st.integers(1, 300))
def test_at_most_one_microbatch_is_half_empty(lengths, max_tokens):
    loads = [sum(lengths[i] for i in b) for b in microbatches(lengths, max_tokens)]
    assert sum(2 * load <= max_tokens for load in loads) <= 1
