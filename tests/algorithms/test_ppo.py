"""The estimator `gae`: what a critic's values make of rewards, and that it is the policy gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algorithms import registry
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, Tokens
from tests.algorithms.reward_batches import rewards_over


def estimated(rewards: list[float], lengths: list[int], values: list[float], **options: object) -> tuple[list[float], list[float]]:
    """Advantages and returns of sequences whose tokens are all trained, each a group of its own."""
    batch = rewards_over(torch.tensor(rewards, dtype=torch.float64), torch.arange(len(lengths)), torch.tensor(lengths), values=values)
    found = registry.advantage(AlgorithmConfig(advantages="gae", **options))(batch)
    assert found.returns_N is not None
    return found.advantages_N.tolist(), found.returns_N.tolist()


def test_a_group_of_one_learns_from_the_critic() -> None:
    assert estimated([1.0], [2], [0.5, 0.75], gae_lambda=1.0, whiten=False) == ([0.5, 0.25], [1.0, 1.0])


def test_a_sequence_without_a_reward_teaches_neither_policy_nor_critic() -> None:
    advantages, returns = estimated([1.0, math.nan], [1, 2], [0.25, 0.5, 9.0], whiten=False)
    assert advantages == [0.75, 0.0, 0.0]
    assert returns[0] == 1.0
    assert np.isnan(returns[1:]).all()


def test_whitening_leaves_the_returns_alone_and_the_unknown_out() -> None:
    advantages, returns = estimated([1.0, 0.0, math.nan], [2, 1, 1], [0.0, 0.5, 0.25, 7.0], gae_lambda=1.0)
    raw = np.array([1.0, 0.5, -0.25])
    np.testing.assert_allclose(advantages, [*((raw - raw.mean()) / raw.std()), 0.0], rtol=1e-14)
    assert returns[:3] == [1.0, 1.0, 0.0]


def test_constant_advantages_are_whitened_to_exactly_zero() -> None:
    assert estimated([0.1 + 0.2, 0.3, 0.3], [1, 1, 1], [0.1, 0.1, 0.1])[0] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"gae_lambda": 0.5, "whiten": False}])
def test_values_that_say_everything_leave_no_advantage(options) -> None:
    assert estimated([1.0, 0.0], [2, 2], [1.0, 1.0, 0.0, 0.0], **options)[0] == [0.0] * 4


def test_without_values_it_says_what_is_missing() -> None:
    batch = rewards_over(torch.ones(1), torch.zeros(1).long(), torch.ones(1).long())
    with pytest.raises(ValueError, match=r"add a \[critic\] section"):
        registry.advantage(AlgorithmConfig(advantages="gae"))(batch)


@pytest.mark.parametrize(("option", "value"), [("gamma", 0.9), ("gae_lambda", 0.5), ("whiten", False)])
def test_its_options_are_refused_elsewhere(option, value) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.{option} = {value} is for algorithm\.advantages = 'gae'.*'grpo' does not read it"):
        AlgorithmConfig(advantages="grpo", **{option: value})


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_with_a_right_critic_the_expected_update_is_the_policy_gradient(lam) -> None:
    """A tree of three states and two actions, all of whose paths are enumerated: autograd through the expected reward is the oracle."""
    logits_32 = torch.tensor([[0.3, -0.4], [1.1, 0.2], [-0.5, 0.9]], dtype=torch.float64, requires_grad=True)
    reward_22 = np.array([[1.0, -0.5], [0.25, 2.0]])  # of the first action and the second
    pi = logits_32.softmax(1)
    expected = sum(pi[0, a] * pi[1 + a, b] * reward_22[a, b] for a in (0, 1) for b in (0, 1))
    (truth,) = torch.autograd.grad(expected, logits_32, retain_graph=True)

    p = pi.detach().numpy()
    inner = [(p[1 + a] * reward_22[a]).sum() for a in (0, 1)]
    root = p[0] @ np.array(inner)
    got = torch.zeros_like(truth)
    for a in (0, 1):
        for b in (0, 1):
            advantages, _ = estimated([reward_22[a, b]], [2], [root, inner[a]], gae_lambda=lam, whiten=False)
            logprobs_N = torch.stack((pi[0, a].log(), pi[1 + a, b].log()))
            tokens = Tokens(
                logprobs_N=logprobs_N,
                old_logprobs_N=logprobs_N.detach(),
                rollout_logprobs_N=logprobs_N.detach(),
                advantages_N=torch.tensor(advantages, dtype=torch.float64),
                mask_N=torch.ones(2, dtype=torch.bool),
                sequence_N=torch.zeros(2, dtype=torch.int64),
                num_sequences=1,
                sequence_length_S=torch.tensor([2]),
            )
            out = registry.loss(AlgorithmConfig())(tokens, Counts(tokens=1, sequences=1, max_tokens=2))
            (gradient,) = torch.autograd.grad(out.loss, logits_32, retain_graph=True)
            got -= p[0, a] * p[1 + a, b] * gradient
    np.testing.assert_allclose(got.numpy(), truth.numpy(), atol=1e-14)
