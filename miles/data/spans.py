"""Two tokenisations of one text, aligned: the smallest spans that both write in whole tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def common_spans(ends_N: Ints, starts_Q: Ints, ends_Q: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """`(span_N, span_Q, M)`: the number of each token's span, 0..M-1 in the order of the text, or -1 behind the last common boundary.

    Example: "abcd" as a|bc|d and ab|c|d has the spans "abc" and "d": ends 1 3 4 against starts 0 2 3 and ends 2 3 4 give
    0 0 1 and 0 0 1.

    Args:
        ends_N: rising offset behind each of one side's tokens; they lie end to end from 0.
        starts_Q, ends_Q: offsets of the other side's tokens, in order; tokens that share a character all have that character's offsets, and so no
            boundary lies between them.
    """
    later_Q = np.minimum.accumulate(np.append(starts_Q[1:], np.iinfo(np.int64).max)[::-1])[::-1]
    boundaries = np.union1d([0], np.intersect1d(ends_N, ends_Q[later_Q >= ends_Q]))
    starts_N = np.concatenate([[0], ends_N[:-1]]) if len(ends_N) else ends_N
    return _numbers(boundaries, starts_N), _numbers(boundaries, starts_Q), len(boundaries) - 1


def _numbers(boundaries: Ints, starts: Ints) -> NDArray[np.int32]:
    number = np.searchsorted(boundaries, starts, side="right") - 1
    return np.where(number < len(boundaries) - 1, number, -1).astype(np.int32)


def character_offsets(text: str) -> Ints:
    """Byte offset in UTF-8 of each character and of the end, int64 [len(text) + 1]."""
    code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    width = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    return np.concatenate([[0], np.cumsum(width, dtype=np.int64)])
