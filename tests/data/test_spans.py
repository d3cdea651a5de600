"""Common spans of two tokenisations, against a search through all prefixes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.data.spans import character_offsets, common_spans


def spans(left: list[str], right: list[str]) -> tuple[list[int], list[int], int]:
    ends_N, ends_Q = (np.cumsum([len(piece) for piece in side], dtype=np.int64) for side in (left, right))
    found = common_spans(ends_N, ends_Q - np.array([len(piece) for piece in right], np.int64), ends_Q)
    return found[0].tolist(), found[1].tolist(), found[2]


def test_the_smallest_spans_that_both_write_in_whole_tokens() -> None:
    assert spans(["a", "bc", "d"], ["ab", "c", "d"]) == ([0, 0, 1], [0, 0, 1], 2)


def test_equal_tokenisations_have_a_span_a_token() -> None:
    assert spans(["a", "bc", "d"], ["a", "bc", "d"]) == ([0, 1, 2], [0, 1, 2], 3)


def test_what_one_side_does_not_finish_is_in_no_span() -> None:
    assert spans(["a", "bc"], ["a", "bcd"]) == ([0, -1], [0, -1], 1)


def test_no_text_has_no_spans() -> None:
    assert spans([], []) == ([], [], 0)


def test_tokens_that_share_a_character_are_never_parted() -> None:
    """The other side writes one character in three tokens, with the character's offsets each, then another."""
    found = common_spans(np.array([3, 4]), np.array([0, 0, 0, 3]), np.array([3, 3, 3, 4]))
    assert (found[0].tolist(), found[1].tolist(), found[2]) == ([0, 1], [0, 0, 0, 1], 2)


@given(st.text("ab", max_size=12), st.data())
def test_against_a_search_through_all_prefixes(text: str, data: st.DataObject) -> None:
    def cut() -> list[str]:
        places = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)))) | {0, len(text)})
        return [text[a:b] for a, b in itertools.pairwise(places) if text[a:b]]

    left, right = cut(), cut()
    span_N, span_Q, count = spans(left, right)
    prefixes = [{"".join(side[:i]) for i in range(len(side) + 1)} for side in (left, right)]
    common = sorted(len(p) for p in prefixes[0] & prefixes[1])
    assert count == len(common) - 1
    for side, found in ((left, span_N), (right, span_Q)):
        written = ["".join(t for t, s in zip(side, found, strict=True) if s == span) for span in range(count)]
        assert written == [text[a:b] for a, b in itertools.pairwise(common)]


@pytest.mark.parametrize("text", ["", "abc", "aé漢😀b", "\u0800\ud7ff\U00010000"])
def test_offsets_are_those_of_utf_8(text: str) -> None:
    assert character_offsets(text).tolist() == [len(text[:i].encode()) for i in range(len(text) + 1)]
