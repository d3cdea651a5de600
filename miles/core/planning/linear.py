"""Whole numbers behind measured sums: what a count is linear in, found from a few examples and checked against all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def whole_weights(rows: Sequence[tuple[Sequence[int], int]]) -> tuple[int, ...]:
    """Integers w with `w @ features == size` for every `(features, size)` of `rows`.

    Raises:
        ValueError: there are none.
    """
    matrix, sizes = np.array([row for row, _ in rows], np.float64), np.array([size for _, size in rows], np.float64)
    weights = np.linalg.lstsq(matrix, sizes, rcond=None)[0].round()
    if (matrix @ weights != sizes).any():
        raise ValueError(f"what autograd keeps is not linear in the tokens: {[(list(row), size) for row, size in rows]}")
    return tuple(int(w) for w in weights)
