"""What sequences begin with in common, against sets of prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.data.common import first_places


def test_the_worked_example_of_the_docstring() -> None:
    assert first_places([np.array(tokens) for tokens in ([5, 6, 8], [5, 6, 9], [7, 6])]).tolist() == [0, 1, 2, 0, 1, 5, 6, 7]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_one_token_stands_for_all_that_follow_on_the_same_tokens_and_for_no_others(sequences: list[list[int]]) -> None:
    prefixes = [tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))]
    first = first_places([np.array(sequence) for sequence in sequences]).tolist()
    assert [prefixes[place] for place in first] == prefixes
    assert len(set(first)) == len(set(prefixes))
    assert all(first[place] == place for place in first)
