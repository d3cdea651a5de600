"""Which rank takes which samples: neighbours in the order of their tokens, so that a prompt is computed by few ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def contiguous_parts(alone: Sequence[float], after: Sequence[float], parts: int) -> list[range]:
    """Cut a row of items into `parts` ranges (empty ones last) whose heaviest is as light as can be.

    Args:
        alone: an item's cost where its range begins with it. after: its cost behind its predecessor, with which it shares something.
    """

    count = len(alone)
    if parts == 1:
        return [range(count)]
    behind = [0.0, *accumulate(after)]
    # The cost of start..stop is overhead[start] + behind[stop].
    overhead = [alone[i] - behind[i + 1] for i in range(count)]

    def cut(bound: float) -> list[range] | None:
        """The fewest ranges of at most `bound`, or None. The range that ends at a place is as long as it may be: more in it is fewer before."""
        starts, start, number = [0], 0, [0]
        for stop in range(1, count + 1):
            while start < stop and overhead[start] + behind[stop] > bound:
                start += 1
            if start == stop:
                return None
            starts.append(start)
            number.append(number[start] + 1)
        if number[count] > parts:
            return None
        found, stop = [], count
        while stop > 0:
            found.append(range(starts[stop], stop))
            stop = starts[stop]
        return found[::-1]

    low, high = 0.0, sum(alone)
    best = cut(high * (1 + 1e-9)) or []
    for _ in range(48):
        middle = (low + high) / 2
        trial = cut(middle)
        if trial is None:
            low = middle
        else:
            best, high = trial, middle
    return [*best, *[range(count, count)] * (parts - len(best))]


def costs(lengths: Sequence[int], shared: Sequence[int], cost: Callable[[int, int], float]) -> tuple[list[float], list[float]]:
    """`alone` and `after` of `contiguous_parts`. `shared`: tokens in common with the one before. cost(start, stop): of those tokens."""
    return [cost(0, n) for n in lengths], [cost(s, n) for n, s in zip(lengths, shared, strict=True)]
