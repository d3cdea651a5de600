"""Advantage estimators: numbers worked by hand, and properties of every registered one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import registry
from algorithms.config import GROUP_RELATIVE, TURN_CREDIT, AlgorithmConfig
from algorithms.contracts import Rewards
from tests.algorithms.reward_batches import of_sequences, rewards_over

PER_TOKEN = ("gae", *TURN_CREDIT)  # they need more than rewards, and have tests of their own
NAMES = [name for name in registry.advantage_names() if name not in PER_TOKEN]
SCALED = [n for n in NAMES if n != "rloo"]
nan = math.nan
few = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def rewards_of(groups: list[list[float]], dtype: torch.dtype = torch.float64, lengths: list[int] | None = None) -> Rewards:
    flat = [r for g in groups for r in g]
    reward_S = torch.tensor(flat, dtype=dtype)
    group_S = torch.tensor([i for i, g in enumerate(groups) for _ in g], dtype=torch.int64)
    length_S = torch.tensor(lengths or [3 + i % 4 for i in range(len(flat))])
    return rewards_over(reward_S, group_S, length_S, {"a": reward_S, "b": reward_S.square() - 0.3 * reward_S})


def compute(name: str, rewards: Rewards, **options) -> np.ndarray:
    return of_sequences(registry.advantage(AlgorithmConfig(advantages=name, **options))(rewards), rewards)


def random_groups(seed: int, group_sizes: list[int]) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [list(rng.choice([0.0, 0.25, 0.5, 1.0], size)) for size in group_sizes]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("std", [math.sqrt(0.75), -math.sqrt(0.75), -math.sqrt(0.75), math.sqrt(0.75)]),
        ("none", [0.5, -0.5, -0.5, 0.5]),
        ("mean_abs", [1.0, -1.0, -1.0, 1.0]),
    ],
)
def test_grpo_by_hand(scale, expected) -> None:
    np.testing.assert_allclose(compute("grpo", rewards_of([[1.0, 0.0, 0.0, 1.0]]), scale=scale), expected, rtol=1e-15)


def test_grpo_with_groups_of_different_sizes_against_numpy() -> None:
    groups = [[1.0, 0.0, 0.5], [0.2, 0.9], [3.0, 1.0, 1.0, 0.0]]
    expected = np.concatenate([(np.array(g) - np.mean(g)) / np.std(g, ddof=1) for g in groups])
    np.testing.assert_allclose(compute("grpo", rewards_of(groups)), expected, rtol=1e-13)


def test_rloo_by_hand() -> None:
    np.testing.assert_allclose(compute("rloo", rewards_of([[1.0, 0.0, 0.0]])), [1.0, -0.5, -0.5], rtol=1e-15)


def test_reinforce_pp_counts_tokens() -> None:
    # Over 4 tokens the rewards are 1, 0, 0, 0: mean 1/4, variance 3/16.
    got = compute("reinforce_pp", rewards_of([[1.0], [0.0]], lengths=[1, 3]))
    np.testing.assert_allclose(got, np.array([0.75, -0.25]) / math.sqrt(3 / 16), rtol=1e-14)


def test_reinforce_pp_baseline_by_hand() -> None:
    # Centred: 0.5, -0.5, 0, 0; lengths equal: mean 0, variance 1/8.
    got = compute("reinforce_pp_baseline", rewards_of([[1.0, 0.0], [1.0, 1.0]], lengths=[2, 2, 2, 2]))
    np.testing.assert_allclose(got, np.array([0.5, -0.5, 0.0, 0.0]) / math.sqrt(1 / 8), rtol=1e-14)


def gdpo_rewards(a: list[float], b: list[float]) -> Rewards:
    a_S, b_S = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return rewards_over(a_S + b_S, torch.zeros(len(a), dtype=torch.int64), torch.ones(len(a), dtype=torch.int64), {"a": a_S, "b": b_S})


def test_gdpo_by_hand() -> None:
    # a normalises to +-sqrt(3)/2, b to (3, -1, -1, -1) / 2; the sum has mean 0 and is divided by its standard deviation.
    a = np.array([1.0, 1.0, 0.0, 0.0])
    b = np.array([100.0, 0.0, 0.0, 0.0])
    total = (a - 0.5) * math.sqrt(3) + np.array([1.5, -0.5, -0.5, -0.5])
    np.testing.assert_allclose(compute("gdpo", gdpo_rewards(list(a), list(b))), total / total.std(), rtol=1e-13)


def test_gdpo_weights_each_reward() -> None:
    rewards = gdpo_rewards([1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0])
    alone = compute("gdpo", rewards, part_weights={"b": 0.0})
    np.testing.assert_allclose(alone, [1.0, 1.0, -1.0, -1.0], rtol=1e-14)


def test_gdpo_tells_apart_rewards_with_the_same_sum() -> None:
    rewards = gdpo_rewards([1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0])
    got = compute("gdpo", rewards)
    assert got[0] != pytest.approx(got[1], abs=0.1)
    assert compute("grpo", rewards)[0] == pytest.approx(compute("grpo", rewards)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gdpo_of_rewards_that_cancel_is_zero_and_not_scaled_residue(dtype) -> None:
    a_S = torch.tensor([0.1, 0.7, 0.3, 0.45], dtype=dtype)
    opposite = rewards_over(0 * a_S, torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64), {"a": a_S, "b": 5.3 - 3 * a_S})
    assert not compute("gdpo", opposite).any()


def test_gdpo_refuses_a_weight_of_no_reward() -> None:
    ones = torch.ones(2, dtype=torch.int64)
    rewards = rewards_over(torch.ones(2), 0 * ones, ones, {"format": torch.ones(2)})
    with pytest.raises(ValueError, match="did you mean 'format'"):
        compute("gdpo", rewards, part_weights={"fromat": 1.0})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-8, 1e8, -3.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name, reward, dtype) -> None:
    assert not compute(name, rewards_of([[reward] * 7], dtype)).any()


@pytest.mark.parametrize("name", NAMES)
def test_rounding_residue_is_not_scaled_up(name) -> None:
    sums = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6]
    assert len(set(sums)) > 1
    assert not compute(name, rewards_of([sums])).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["std", "none", "mean_abs"])
@few
@given(seed=seeds, group_sizes=sizes)
def test_an_unknown_reward_leaves_the_baseline(name, scale, seed, group_sizes) -> None:
    groups = random_groups(seed, group_sizes)
    lengths = list(range(1, sum(group_sizes) + 1))
    without = compute(name, rewards_of(groups, lengths=lengths), scale=scale)
    at = len(groups[0])
    groups[0].append(nan)
    lengths.insert(at, 5)
    got = compute(name, rewards_of(groups, lengths=lengths), scale=scale)
    assert got[at] == 0
    np.testing.assert_allclose(np.delete(got, at), without, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_only_unknown_rewards_give_zero(name) -> None:
    assert not compute(name, rewards_of([[nan, nan], [nan]])).any()


@pytest.mark.parametrize("name", NAMES)
def test_rewards_that_failed_all_through_the_batch_and_left_no_parts_give_zero(name) -> None:
    failed = rewards_of([[nan, nan], [nan, nan]])
    assert not compute(name, replace(failed, parts={}), part_weights={"a": 2.0}).any()


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=seeds, group_sizes=sizes)
def test_order_does_not_matter(name, seed, group_sizes) -> None:
    rewards = rewards_of(random_groups(seed, group_sizes))
    order = torch.tensor(np.random.default_rng(seed).permutation(len(rewards.reward_S)))
    parts = {k: v[order] for k, v in rewards.parts.items()}
    moved = rewards_over(rewards.reward_S[order], rewards.group_S[order], rewards.length_S[order], parts)
    np.testing.assert_allclose(compute(name, moved), compute(name, rewards)[order.numpy()], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", SCALED)
@few
@given(seed=seeds, group_sizes=sizes, factor=st.sampled_from([2.0, 1e-3, 1e4]))
def test_scaled_rewards_leave_normalised_advantages_alone(name, seed, group_sizes, factor) -> None:
    groups = random_groups(seed, group_sizes)
    once = rewards_of(groups)
    times = rewards_over(once.reward_S * factor, once.group_S, once.length_S, {k: v * factor for k, v in once.parts.items()})
    np.testing.assert_allclose(compute(name, times), compute(name, once), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seed=seeds, group_sizes=sizes, shift=st.sampled_from([1.0, -7.0]))
def test_a_constant_added_to_every_reward_changes_nothing(name, seed, group_sizes, shift) -> None:
    once = rewards_of(random_groups(seed, group_sizes))
    moved = rewards_over(once.reward_S + shift, once.group_S, once.length_S, {k: v + shift for k, v in once.parts.items()})
    np.testing.assert_allclose(compute(name, moved), compute(name, once), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in GROUP_RELATIVE if name not in PER_TOKEN])
def test_a_group_of_one_teaches_a_group_relative_estimator_nothing(name) -> None:
    assert not compute(name, rewards_of([[1.0], [0.0]])).any()


@pytest.mark.parametrize("name", NAMES)
def test_no_sequences_give_no_advantages(name) -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = rewards_over(torch.zeros(0), nothing, nothing, {"a": torch.zeros(0)})
    assert compute(name, empty).shape == (0,)
