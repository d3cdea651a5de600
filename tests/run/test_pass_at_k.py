"""The estimator against counting every way to draw k of n samples."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest

from miles.run.metrics import pass_at_k


def counted(n: int, c: int, k: int) -> Fraction:
    """Share of the k-subsets of n samples, the first c of them correct, that hold a correct one."""
    draws = list(combinations(range(n), k))
    return Fraction(sum(any(sample < c for sample in draw) for draw in draws), len(draws))


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_it_equals_the_count_of_all_draws(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(float(counted(n, c, k)), abs=1e-15)


def test_large_numbers_neither_overflow_nor_lose_the_small_chance():
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match=r"pass@k needs|not possible"):
        pass_at_k(n, c, k)
