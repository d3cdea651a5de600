"""Properties of every objective on pairs, by the one way a trainer calls it: a new objective is held to them by having a name in the recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.contracts import LossOutput
from algorithms.preference.config import PreferenceConfig, RewardModelConfig
from algorithms.preference.objective import Pairs, preference_loss, reward_loss
from tests.algorithms.loss_batches import numeric_gradient

OBJECTIVES = get_args(PreferenceConfig.model_fields["objective"].annotation)
NAMES = [*OBJECTIVES, "reward"]
few = settings(max_examples=8, deadline=None)
seeds = st.integers(0, 2**31)
counts = st.integers(1, 6)


def pairs_of(seed: int, count: int, dtype: torch.dtype = torch.float64) -> Pairs:
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 9, (count, 2))
    policy, reference = (torch.tensor(-rng.exponential(1.0, (count, 2)) * length, dtype=dtype) for _ in range(2))
    return Pairs(logprobs_P2=policy.requires_grad_(), length_P2=torch.tensor(length), reference_P2=reference, kl=torch.tensor(0.3, dtype=torch.float64))


def loss_of(name: str, pairs: Pairs, total: int) -> LossOutput:
    if name == "reward":
        return reward_loss(pairs.logprobs_P2, RewardModelConfig(margin=0.3, centre=0.02), total)
    config = PreferenceConfig(objective=name, label_smoothing=0.1 if name == "dpo" else 0.0)
    return preference_loss(pairs if config.needs_reference else replace(pairs, reference_P2=None, kl=None), config, total)


def evaluated(name: str, pairs: Pairs, total: int) -> tuple[float, np.ndarray, dict[str, float]]:
    out = loss_of(name, pairs, total)
    (gradient,) = torch.autograd.grad(out.loss, pairs.logprobs_P2)
    return out.loss.item(), gradient.double().numpy(), {key: float(value) for key, value in out.sums.items()}


def some(pairs: Pairs, places: list[int] | slice) -> Pairs:
    assert pairs.reference_P2 is not None
    chosen = pairs.logprobs_P2.detach()[places].requires_grad_()
    return replace(pairs, logprobs_P2=chosen, length_P2=pairs.length_P2[places], reference_P2=pairs.reference_P2[places])


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=seeds, count=counts)
def test_order_of_pairs_does_not_matter(name, seed, count) -> None:
    pairs = pairs_of(seed, count)
    order = list(np.random.default_rng(seed).permutation(count))
    loss, gradient, sums = evaluated(name, pairs, count)
    other_loss, other_gradient, other_sums = evaluated(name, some(pairs, order), count)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(other_gradient, gradient[order], rtol=1e-12)
    assert other_sums == pytest.approx(sums, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=seeds, count=counts, cut=st.integers(0, 6))
def test_microbatches_and_rows_without_a_pair_add_up(name, seed, count, cut) -> None:
    pairs = pairs_of(seed, count)
    loss, gradient, sums = evaluated(name, pairs, count)
    parts = [evaluated(name, some(pairs, where), count) for where in (slice(0, cut), slice(cut, None))]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), gradient, rtol=1e-12)
    assert {key: sum(part[2][key] for part in parts) for key in sums} == pytest.approx(sums, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(name, seed) -> None:
    pairs = pairs_of(seed, 4)
    _, gradient, _ = evaluated(name, pairs, 4)

    def value(flat: np.ndarray) -> float:
        return loss_of(name, replace(pairs, logprobs_P2=torch.tensor(flat.reshape(4, 2))), 4).loss.item()

    numeric = numeric_gradient(value, pairs.logprobs_P2.detach().numpy().flatten())
    np.testing.assert_allclose(gradient.flatten(), numeric, atol=1e-6 * max(1.0, np.abs(numeric).max()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("side", [0, 1])
def test_finite_at_extreme_log_ratios_in_float32(name, gap, side) -> None:
    policy = torch.full((2, 2), -150.0)
    policy[:, side] += gap if gap > 0 else 0.0
    reference = policy.clone()
    reference[:, side] -= gap
    reference.clamp_(max=-1e-3)
    pairs = Pairs(logprobs_P2=policy.requires_grad_(), length_P2=torch.ones(2, 2, dtype=torch.int64), reference_P2=reference, kl=torch.tensor(100.0))
    loss, gradient, sums = evaluated(name, pairs, 2)
    assert np.isfinite([loss, *gradient.flatten(), *sums.values()]).all()


@pytest.mark.parametrize("name", NAMES)
def test_twice_the_pairs_twice_counted_change_nothing(name) -> None:
    pairs = pairs_of(1, 3)
    loss, gradient, _ = evaluated(name, pairs, 3)
    doubled_loss, doubled, _ = evaluated(name, some(pairs, [0, 1, 2, 0, 1, 2]), 6)
    assert doubled_loss == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(doubled[:3] + doubled[3:], gradient, rtol=1e-12)


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if PreferenceConfig(objective=n).needs_reference])
def test_what_policy_and_reference_both_gain_changes_nothing(name) -> None:
    pairs = pairs_of(2, 4)
    assert pairs.reference_P2 is not None
    shift = torch.tensor([[3.0, -2.0]], dtype=torch.float64)
    moved = replace(pairs, logprobs_P2=(pairs.logprobs_P2.detach() + shift).requires_grad_(), reference_P2=pairs.reference_P2 + shift)
    assert evaluated(name, moved, 4)[0] == pytest.approx(evaluated(name, pairs, 4)[0], rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_one_step_down_the_gradient_widens_the_margin(name) -> None:
    pairs = pairs_of(3, 5)
    _, gradient, sums = evaluated(name, pairs, 5)
    # ipo alone may pull a margin back, to 1 / (2 beta): here all of them are below.
    stepped = replace(pairs, logprobs_P2=(pairs.logprobs_P2.detach() - 1e-3 * torch.tensor(gradient)).requires_grad_())
    assert evaluated(name, stepped, 5)[2]["preference/margin"] > sums["preference/margin"]


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_inputs_are_computed_in_float32(name) -> None:
    assert loss_of(name, pairs_of(4, 3, torch.bfloat16), 3).loss.dtype in (torch.float32, torch.float64)
