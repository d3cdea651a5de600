"""The steered KL coefficient, by hand and in a loop."""

from __future__ import annotations

import pytest

from algorithms.config import AlgorithmConfig
from algorithms.kl_controller import adapted


@pytest.mark.parametrize(("kl", "expected"), [(0.02, 0.1), (0.022, 0.101), (0.018, 0.099), (0.1, 0.102), (0.0, 0.098), (-1.0, 0.098)])
def test_hand_worked_steps(kl, expected) -> None:
    assert adapted(0.1, kl, 0.02) == pytest.approx(expected, rel=1e-12)


def test_a_system_whose_kl_falls_with_the_coefficient_settles_at_the_target() -> None:
    coef = 1.0
    for _ in range(600):
        coef = adapted(coef, 0.01 / coef, 0.05)
    assert 0.01 / coef == pytest.approx(0.05, rel=1e-3)


def test_a_target_without_a_coefficient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_target = 0\.1 steers kl_coef, which is 0"):
        AlgorithmConfig(kl_target=0.1)


def test_a_penalty_that_the_estimator_would_not_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_in = 'reward' changes the total reward, but advantages = 'gdpo'"):
        AlgorithmConfig(kl_in="reward", advantages="gdpo")
