"""Metrics that are computed over many samples."""

from __future__ import annotations

import math


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k from `n` samples of which `c` are correct: 1 - C(n - c, k) / C(n, k).

    It is the probability that `k` samples drawn from the `n` without replacement hold a correct one (Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code", equation 1). With n = 4, c = 1, k = 2: 1 - 3/6 = 0.5. The quotient is a
    product of ratios below 1, so no binomial coefficient overflows.

    Raises:
        ValueError: not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n, but k = {k} and n = {n}")
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct samples of {n} is not possible")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))
