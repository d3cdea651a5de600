"""Aggregation against arithmetic done by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.aggregate import aggregate, sequence_average
from algorithms.contracts import Counts, Tokens


def tokens_with(lengths: list[int]) -> Tokens:
    n = sum(lengths)
    zero = torch.zeros(n, dtype=torch.float64)
    sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Tokens(
        logprobs_N=zero, old_logprobs_N=zero, rollout_logprobs_N=zero, advantages_N=zero, mask_N=torch.ones(n, dtype=torch.bool),
        sequence_N=sequence_N, num_sequences=len(lengths), sequence_length_S=torch.tensor(lengths),
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 1000), max_size=4), seed=st.integers(0, 99))
def test_token_mean_of_100_tokens_of_2_and_900_of_a_half_is_065_under_any_split(cuts, seed) -> None:
    loss_N = np.random.default_rng(seed).permutation(np.repeat([2.0, 0.5], [100, 900]))
    counts = Counts(tokens=1000, sequences=10, max_tokens=100)
    pieces = [torch.tensor(p) for p in np.split(loss_N, sorted(cuts)) if len(p)]
    total = sum(float(aggregate(p, tokens_with([len(p)]), counts, "token_mean")) for p in pieces)
    assert total == pytest.approx(0.65, rel=1e-12)


def test_sequence_mean_weighs_a_short_sequence_like_a_long_one() -> None:
    loss_N = torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert float(aggregate(loss_N, tokens_with([1, 4]), Counts(tokens=5, sequences=2, max_tokens=8), "sequence_mean")) == 2.5


def test_sequence_sum_constant_divides_by_sequences_and_the_longest_response_allowed() -> None:
    loss_N = torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert float(aggregate(loss_N, tokens_with([1, 4]), Counts(tokens=5, sequences=2, max_tokens=8), "sequence_sum_constant")) == 0.5


def test_average_of_a_sequence_without_trained_tokens_is_zero() -> None:
    assert sequence_average(torch.ones(2), tokens_with([2, 0])).tolist() == [1.0, 0.0]
