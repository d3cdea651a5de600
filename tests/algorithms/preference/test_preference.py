"""Preference objectives against their formulas in plain Python floats, and what each must do at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from algorithms.preference.bradley_terry import bradley_terry
from algorithms.preference.dpo import dpo
from algorithms.preference.ipo import ipo
from algorithms.preference.kto import kto
from algorithms.preference.orpo import orpo
from algorithms.preference.simpo import simpo


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# Margin: (-10 + 11) - (-12 + 9) = 4.
PAIR = (t(-10.0), t(-12.0), t(-11.0), t(-9.0))


def test_dpo_by_hand() -> None:
    assert dpo(*PAIR, beta=0.1).item() == pytest.approx(-math.log(sigmoid(0.4)), rel=1e-12)


def test_dpo_with_wrong_labels_by_hand() -> None:
    expected = -0.9 * math.log(sigmoid(0.4)) - 0.1 * math.log(sigmoid(-0.4))
    assert dpo(*PAIR, beta=0.1, label_smoothing=0.1).item() == pytest.approx(expected, rel=1e-12)


def test_dpo_of_a_policy_that_is_the_reference_is_log_2() -> None:
    assert dpo(t(-3.0), t(-5.0), t(-3.0), t(-5.0)).item() == pytest.approx(math.log(2), rel=1e-12)


def test_ipo_by_hand() -> None:
    assert ipo(*PAIR, beta=0.1).item() == pytest.approx((4 - 5) ** 2, rel=1e-12)


def test_kto_by_hand() -> None:
    got = kto(t(-10.0, -10.0), t(-11.0, -11.0), torch.tensor([True, False]), t(0.5)[0], beta=0.2, good_weight=1.5, bad_weight=2.0)
    assert got.tolist() == pytest.approx([1.5 * (1 - sigmoid(0.2 * 0.5)), 2.0 * (1 - sigmoid(-0.2 * 0.5))], rel=1e-12)


def test_kto_point_of_reference_is_never_negative_and_has_no_gradient() -> None:
    kl = t(-3.0)[0].requires_grad_()
    loss = kto(t(-10.0).requires_grad_(), t(-10.0), torch.tensor([True]), kl)
    loss.sum().backward()
    assert loss.item() == 0.5
    assert kl.grad is None


def test_orpo_by_hand() -> None:
    odds = lambda p: p / (1 - p)  # noqa: E731
    expected = -math.log(0.6) - 0.1 * math.log(sigmoid(math.log(odds(0.6) / odds(0.2))))
    assert orpo(t(math.log(0.6)), t(math.log(0.2)), weight=0.1).item() == pytest.approx(expected, rel=1e-12)


def test_orpo_of_a_certain_answer_is_finite_with_a_finite_gradient() -> None:
    certain = torch.zeros(1, requires_grad=True)
    loss = orpo(certain, torch.tensor([-1.0]))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(certain.grad).all()


def test_simpo_by_hand() -> None:
    assert simpo(t(-0.5), t(-1.0), beta=2.0, gamma=0.6).item() == pytest.approx(-math.log(sigmoid(1.0 - 0.6)), rel=1e-12)


def test_bradley_terry_by_hand() -> None:
    got = bradley_terry(t(1.0), t(-0.5), margin_P=t(0.3), centre=0.01).item()
    assert got == pytest.approx(-math.log(sigmoid(1.2)) + 0.01 * 0.25, rel=1e-12)


@pytest.mark.parametrize("loss", [lambda c, r: dpo(c, r, 0 * c, 0 * r), lambda c, r: orpo(c, r), lambda c, r: simpo(c, r), lambda c, r: bradley_terry(c, r)])
@pytest.mark.parametrize(("chosen", "rejected"), [(-1.0, -2.0), (-150.0, -0.5), (-0.5, -150.0)])
def test_descent_raises_the_chosen_answer_and_never_the_rejected_one(loss, chosen, rejected) -> None:
    pair = [torch.tensor([v], requires_grad=True) for v in (chosen, rejected)]
    loss(*pair).sum().backward()
    assert torch.isfinite(pair[0].grad).all()
    assert pair[0].grad <= 0 <= pair[1].grad
