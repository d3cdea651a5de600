"""Which rank takes which samples: neighbours in the order of their tokens, so that a prompt is computed by few ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def contiguous_parts(alone: Sequence[float], after: Sequence[float], parts: int) -> list[range]:
    """Cut a row of items into `parts` ranges (empty ones last) whose heaviest is as light as can be.

    Args:
        alone: an item's cost where its range begins with it. after: its cost behind its predecessor, with which it shares something.
    """

    def filled(bound: float) -> list[range]:
        found, start, load = [], 0, 0.0
        for i in range(len(alone)):
            cost = alone[i] if i == start else after[i]
            if i > start and load + cost > bound:
                found.append(range(start, i))
                start, cost, load = i, alone[i], 0.0
            load += cost
        return [*found, range(start, len(alone))]

    low, high = max(alone, default=0.0), sum(alone)
    best = filled(high)
    for _ in range(40):
        middle = (low + high) / 2
        trial = filled(middle)
        if len(trial) <= parts:
            best, high = trial, middle
        else:
            low = middle
    return [*best, *[range(len(alone), len(alone))] * (parts - len(best))]


def costs(lengths: Sequence[int], shared: Sequence[int], cost: Callable[[int, int], float]) -> tuple[list[float], list[float]]:
    """`alone` and `after` of `contiguous_parts`. `shared`: tokens in common with the one before. cost(start, stop): of those tokens."""
    return [cost(0, n) for n in lengths], [cost(s, n) for n, s in zip(lengths, shared, strict=True)]
