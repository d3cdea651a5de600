"""The critic's loss by hand and against finite differences, and how much of the returns it explains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.value import explained_variance, value_loss
from tests.algorithms.loss_batches import numeric_gradient


def value_case(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    values_N = torch.tensor([value, torch.nan], dtype=torch.float64, requires_grad=True)
    other = [torch.tensor([v, torch.nan], dtype=torch.float64) for v in (old, target)]
    out = value_loss(values_N, *other, torch.tensor([True, False]), 1, clip)
    (gradient_N,) = torch.autograd.grad(out.loss, values_N)
    assert gradient_N[1] == 0
    return float(out.loss.detach()), float(gradient_N[0])


@pytest.mark.parametrize(
    ("value", "clip", "loss", "gradient"),
    [
        (0.5, math.inf, 0.125, -0.5),
        (0.1, 0.2, 0.405, -0.9),  # inside the clip
        (0.5, 0.2, 0.32, 0.0),  # left the region towards the target: held
        (-0.5, 0.2, 1.125, -1.5),  # left it the wrong way: the larger error counts
    ],
)
def test_value_loss_by_hand(value, clip, loss, gradient) -> None:
    assert value_case(value, 0.0, 1.0, clip) == pytest.approx((loss, gradient))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 9999), clip=st.sampled_from([0.05, 0.2, 1.0, math.inf]))
def test_the_gradient_of_the_value_loss_is_its_slope(seed, clip) -> None:
    rng = np.random.default_rng(seed)
    values, old, returns = rng.standard_normal((3, 9))
    mask = rng.random(9) > 0.3

    def loss(at: np.ndarray) -> float:
        """Both errors written out, over the values that count."""
        total = 0.0
        for v, o, r in zip(at[mask], old[mask], returns[mask], strict=True):
            total += max((v - r) ** 2, (min(max(v, o - clip), o + clip) - r) ** 2) / 2
        return total / 20

    values_N = torch.tensor(values, requires_grad=True)
    out = value_loss(values_N, torch.tensor(old), torch.tensor(returns), torch.tensor(mask), 20, clip)
    (gradient_N,) = torch.autograd.grad(out.loss, values_N)
    assert float(out.loss.detach()) == pytest.approx(loss(values), rel=1e-12)
    np.testing.assert_allclose(gradient_N.numpy(), numeric_gradient(loss, values), atol=1e-8)


@pytest.mark.parametrize("split", [[9], [4, 5], [1, 1, 7]])
def test_shares_of_the_value_loss_add_up(split) -> None:
    values_N, old_N, returns_N = torch.tensor(np.random.default_rng(0).standard_normal((3, 9)))
    mask_N = torch.arange(9) != 4
    parts = [value_loss(*part, 8).loss for part in zip(*(x.split(split) for x in (values_N, old_N, returns_N, mask_N)), strict=True)]
    assert float(sum(parts)) == pytest.approx(float(value_loss(values_N, old_N, returns_N, mask_N, 8).loss), rel=1e-14)


def test_explained_variance_by_hand() -> None:
    returns_N = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns_N, returns_N) == 1.0
    assert explained_variance(returns_N + 7, returns_N) == 1.0
    assert explained_variance(torch.zeros(4), returns_N) == 0.0
    assert explained_variance(-returns_N, returns_N) == pytest.approx(-3.0)
    assert explained_variance(returns_N, torch.ones(4)) == 0.0
