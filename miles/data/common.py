"""What token sequences begin with in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


def in_order(tokens: Sequence[Tokens]) -> list[int]:
    """Indices sorted by tokens, so that neighbours share most."""
    return sorted(range(len(tokens)), key=lambda i: (tokens[i].astype(">i8").tobytes(), i))


def common_length(first: Tokens, second: Tokens) -> int:
    """Tokens that both begin with."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def first_places(tokens: Sequence[Tokens]) -> NDArray[np.int64]:
    """For each token of the sequences laid end to end, int64 [T]: the place of the one that stands for it. A token stands for those that
    follow on the same tokens in other sequences; one that nobody else has, for itself.

    Example: 5 6 8, 5 6 9 and 7 6: places 0 1 2, 0 1 5 and 6 7.
    """
    starts = np.cumsum([0, *(len(sequence) for sequence in tokens)])
    first_T = np.arange(starts[-1], dtype=np.int64)
    for before, index in itertools.pairwise(in_order(tokens)):
        # No sequence that is sorted further up has more in common with this one.
        common = common_length(tokens[before], tokens[index])
        first_T[starts[index] : starts[index] + common] = first_T[starts[before] : starts[before] + common]
    return first_T
