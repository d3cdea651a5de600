"""Micro-batches of ranks: every sample once, equal counts, the token budget kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_cases import make_sample
from trainer.rows.share import share


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=12).filter(lambda x: len(x) % 2 == 0), st.integers(1, 4), st.integers(1, 64))
def test_a_pair_is_in_one_row_side_by_side(lengths: list[int], world: int, max_tokens: int) -> None:
    samples = [make_sample(0, i, 2, n) for i, n in enumerate(lengths)]
    plans = [share(samples, range(len(samples)), rank=rank, world=world, max_tokens=max_tokens, together=2) for rank in range(world)]
    rows = [micro.indices for plan in plans for micro in plan]
    assert sorted(pair for row in rows for pair in zip(row[::2], row[1::2], strict=True)) == [(i, i + 1) for i in range(0, len(lengths), 2)]
    assert len({len(plan) for plan in plans}) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 64))
def test_every_sample_is_in_one_row_of_one_rank(lengths: list[int], world: int, max_tokens: int) -> None:
    samples = [make_sample(0, i, 2, n) for i, n in enumerate(lengths)]
    plans = [share(samples, range(len(samples)), rank=rank, world=world, max_tokens=max_tokens) for rank in range(world)]
    assert sorted(i for plan in plans for micro in plan for i in micro.indices) == list(range(len(samples)))
    assert len({len(plan) for plan in plans}) == 1
    for micro in (m for plan in plans for m in plan):
        assert len(micro.packed.tokens_T) <= max_tokens or len(micro.indices) <= 1
        assert micro.indices or not micro.packed.loss_mask_N.any()
