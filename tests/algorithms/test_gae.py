"""GAE against the sums of the paper written out."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.gae import gae, reward_at_the_end


def by_definition(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    after = np.append(values[1:], 0.0)
    delta = rewards + gamma * after - values
    return np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))])


def batch(seed: int, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    return torch.tensor(rng.standard_normal(n)), torch.tensor(rng.standard_normal(n)), torch.tensor(sequence)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 9999),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
)
def test_gae_is_the_discounted_sum_of_errors(seed, lengths, gamma, lam) -> None:
    rewards_N, values_N, sequence_N = batch(seed, lengths)
    advantages_N, returns_N = gae(rewards_N, values_N, torch.ones(len(rewards_N), dtype=torch.bool), sequence_N, gamma=gamma, lam=lam)
    cuts = np.cumsum(lengths)[:-1]
    expected = [by_definition(r, v, gamma, lam) for r, v in zip(np.split(rewards_N.numpy(), cuts), np.split(values_N.numpy(), cuts), strict=True)]
    np.testing.assert_allclose(advantages_N.numpy(), np.concatenate(expected), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(returns_N.numpy(), np.concatenate(expected) + values_N.numpy(), rtol=1e-11, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 9999), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), value=st.sampled_from([np.nan, np.inf, 7.0]))
def test_tool_tokens_between_actions_change_nothing(seed, lengths, value) -> None:
    rewards_N, values_N, sequence_N = batch(seed, lengths)
    n = len(rewards_N)
    plain, returns = gae(rewards_N, values_N, torch.ones(n, dtype=torch.bool), sequence_N, gamma=0.9, lam=0.8)
    at = np.sort(np.random.default_rng(seed).integers(0, n, 4))
    insert = lambda x, v: torch.tensor(np.insert(x.numpy(), at, v))  # noqa: E731
    mask_N = insert(torch.ones(n, dtype=torch.bool), False)
    got, got_returns = gae(insert(rewards_N, value), insert(values_N, value), mask_N, insert(sequence_N, sequence_N.numpy()[at]), gamma=0.9, lam=0.8)
    np.testing.assert_allclose(got[mask_N].numpy(), plain.numpy(), rtol=1e-12)
    np.testing.assert_allclose(got_returns[mask_N].numpy(), returns.numpy(), rtol=1e-12)
    assert not got[~mask_N].any()
    assert not got_returns[~mask_N].any()


def test_the_reward_lies_on_the_last_action_and_not_on_the_tool_token_after_it() -> None:
    mask_N = torch.tensor([True, True, False, True, False, False])
    got = reward_at_the_end(torch.tensor([3.0, 5.0, 9.0]), mask_N, torch.tensor([0, 0, 0, 1, 1, 2]))
    assert got.tolist() == [0.0, 3.0, 0.0, 5.0, 0.0, 0.0]


def test_nothing_chosen_gives_no_advantages() -> None:
    nan_N = torch.full((2,), torch.nan)
    assert gae(nan_N, nan_N, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 1]))[0].tolist() == [0.0, 0.0]
