"""The clipped surrogate against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algorithms import registry
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts
from tests.algorithms.loss_batches import Row, run


def one_token(ratio: float, advantage: float, **options) -> tuple[float, float, dict[str, float]]:
    row = Row(*(np.array([v]) for v in (math.log(ratio) - 1, -1.0, -1.0, advantage, 1.0, -1.0)), np.array([True]))
    loss, gradients, sums = run(registry.loss(AlgorithmConfig(**options)), [row], Counts(tokens=1, sequences=1, max_tokens=4))
    return loss, float(gradients[0][0]), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.28, 0.0),  # held above
        (1.2, 1.0, -1.2, -1.2),  # inside
        (0.5, 1.0, -0.5, -0.5),  # below, but the update leads back in
        (0.5, -2.0, 1.6, 0.0),  # held below
        (0.9, -2.0, 1.8, 1.8),  # inside
        (1.5, -2.0, 3.0, 3.0),  # above, but the update leads back in
    ],
)
def test_hand_worked_tokens(ratio, advantage, loss, gradient) -> None:
    got_loss, got_gradient, sums = one_token(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert sums["policy/clip_fraction"] == (1.0 if gradient == 0 else 0.0)
    assert sums["policy/ratio_mean"] == pytest.approx(ratio)


def test_dual_clip_bounds_a_runaway_ratio() -> None:
    assert one_token(50.0, -2.0, clip_dual=3.0)[:2] == pytest.approx((6.0, 0.0))


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    assert one_token(50.0, 2.0, clip_dual=3.0) == one_token(50.0, 2.0)


@pytest.mark.parametrize(("gap", "advantage"), [(100.0, 1.0), (-100.0, -1.0)])
def test_gradient_is_zero_where_the_clip_holds_an_extreme_ratio(gap, advantage) -> None:
    row = Row(*(np.array([v]) for v in (-150.0 + gap + 50, -100.0, -100.0, advantage, 1.0, -1.0)), np.array([True]))
    _, gradients, _ = run(registry.loss(AlgorithmConfig()), [row], Counts(tokens=1, sequences=1, max_tokens=4))
    assert gradients[0][0] == 0


@pytest.mark.parametrize("loss", ["ppo_clip", "importance", "gspo", "gspo_token", "dppo_tv", "dppo_kl"])
@pytest.mark.parametrize(("gap", "advantage", "size"), [(100.0, -1.0, math.exp(20)), (15.0, -1.0, math.exp(15)), (-100.0, 1.0, -math.exp(-20))])
def test_an_extreme_ratio_that_nothing_holds_is_led_back(loss, gap, advantage, size) -> None:
    """Descent lowers a bad token that has run away upwards and raises a good one that is nearly lost; the slope is bounded, not gone."""
    row = Row(*(np.array([v]) for v in (-150.0 + gap + 50, -100.0, -100.0, advantage, 1.0, -1.0)), np.array([True]))
    _, gradients, _ = run(registry.loss(AlgorithmConfig(loss=loss)), [row], Counts(tokens=1, sequences=1, max_tokens=4), torch.float32)
    assert gradients[0][0] == pytest.approx(size, rel=1e-4)


def test_loss_policy_is_reported_as_the_steps_loss_times_its_tokens() -> None:
    loss, _, sums = one_token(1.1, 1.0, aggregation="sequence_sum_constant")
    assert sums["loss/policy"] == pytest.approx(loss * 1)
