import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.data.packing import microbatches, pack, partition
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


@given(LENGTHS, st.integers(1, 6))
def test_partition_gives_every_index_to_one_part(lengths, parts):
    shares = partition(lengths, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))


@given(LENGTHS.filter(bool), st.integers(1, 6))
def test_partition_spread_is_at_most_the_longest_sequence(lengths, parts):
    loads = [sum(lengths[i] for i in share) for share in partition(lengths, parts)]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS, st.integers(1, 6))
def test_partition_leaves_a_part_empty_only_for_want_of_sequences(lengths, parts):
    empty = sum(not share for share in partition(lengths, parts))
    assert empty == max(0, parts - len(lengths))


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
