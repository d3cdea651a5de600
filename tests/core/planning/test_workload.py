"""What a sequence is said to cost grows as its matrices and its causal attention do."""

from __future__ import annotations

import pytest

from miles.core.planning.hardware import HardwareSpec
from miles.core.planning.workload import Workload

SLOW = HardwareSpec(name="one operation a second", flops_per_s=1.0, layer_s=0.0, value_s=0.5)


def test_a_sequence_of_three_tokens_by_hand() -> None:
    """Forward and backward: 3 products of 2 operations for each of 10 weights; a head of 4 x 7 for 2 tokens; 2 + 5 products over 6 pairs; values."""
    workload = Workload(layers=1, weights=10, hidden=4, vocabulary=7, heads=2, width=3)
    assert workload.sequence_seconds(3, 2, SLOW) == pytest.approx(3 * 6 * 10 + 3 * 2 * 2 * 4 * 7 + 2 * 3 * 2 * 6 * 7 + 3 * 4 * 0.5)


def test_attention_makes_a_long_sequence_dearer_than_its_tokens_in_short_ones() -> None:
    workload = Workload(layers=4, weights=10_000, hidden=16, vocabulary=50, heads=2, width=8)
    assert workload.sequence_seconds(1000, 0, SLOW) > 1.5 * 10 * workload.sequence_seconds(100, 0, SLOW)
