"""KL estimates and the KL's gradient against sums over every action of a small softmax policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from algorithms.contracts import Tokens
from algorithms.kl import estimate, kl_loss, penalised
from tests.algorithms.reward_batches import rewards_over

LOGITS = np.array([0.3, -1.2, 0.8, 0.1])
REFERENCE = np.array([0.2, -0.9, 0.1, 0.6])
BEHAVIOUR = np.array([0.4, -1.0, 0.5, 0.3])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def analytic_gradient() -> np.ndarray:
    """d KL(pi || ref) / d logits = pi * (log pi / ref - KL)."""
    log_pi, log_ref = log_softmax(LOGITS), log_softmax(REFERENCE)
    return np.exp(log_pi) * (log_pi - log_ref - (np.exp(log_pi) * (log_pi - log_ref)).sum())


def enumerated(logits: torch.Tensor, behaviour: np.ndarray) -> Tokens:
    """Each action once; the test weighs them by the probability that `behaviour` samples them with."""
    n = len(LOGITS)
    zeros = torch.zeros(n, dtype=torch.float64)
    old = torch.tensor(log_softmax(behaviour))
    return Tokens(
        logprobs_N=torch.log_softmax(logits, 0), old_logprobs_N=old, rollout_logprobs_N=old, advantages_N=zeros,
        mask_N=torch.ones(n, dtype=torch.bool), sequence_N=torch.arange(n), num_sequences=n, sequence_length_S=torch.ones(n, dtype=torch.int64),
        reference_logprobs_N=torch.tensor(log_softmax(REFERENCE)),
    )  # fmt: skip


def expected_gradient(behaviour: np.ndarray, estimator: str) -> np.ndarray:
    logits = torch.tensor(LOGITS, requires_grad=True)
    tokens = enumerated(logits, behaviour)
    loss_N = kl_loss(tokens, tokens.reference_logprobs_N, estimator)
    (torch.tensor(np.exp(log_softmax(behaviour))) * loss_N).sum().backward()
    return logits.grad.numpy()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clipped"])
def test_loss_gradient_is_the_kls_on_policy(estimator) -> None:
    np.testing.assert_allclose(expected_gradient(LOGITS, estimator), analytic_gradient(), atol=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clipped"])
def test_loss_gradient_is_the_kls_off_policy(estimator) -> None:
    np.testing.assert_allclose(expected_gradient(BEHAVIOUR, estimator), analytic_gradient(), atol=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_differentiating_the_estimate_would_be_wrong(estimator) -> None:
    logits = torch.tensor(LOGITS, requires_grad=True)
    tokens = enumerated(logits, LOGITS)
    (torch.tensor(np.exp(log_softmax(LOGITS))) * estimate(tokens.logprobs_N, tokens.reference_logprobs_N, estimator)).sum().backward()
    # Weighted by constants this is E[grad estimate], the quantity that naive code descends.
    assert np.abs(logits.grad.numpy() - analytic_gradient()).max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator) -> None:
    log_pi, log_ref = log_softmax(LOGITS), log_softmax(REFERENCE)
    exact = (np.exp(log_pi) * (log_pi - log_ref)).sum()
    values = estimate(torch.tensor(log_pi), torch.tensor(log_ref), estimator).numpy()
    assert (np.exp(log_pi) * values).sum() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5)])
def test_hand_worked_estimates(estimator, value) -> None:
    assert float(estimate(torch.tensor(-1.0), torch.tensor(-1.5), estimator)) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(("gap", "k3", "clipped"), [(-8.0, np.exp(8) - 9, 10.0), (8.0, np.exp(-8) + 7, np.exp(-8) + 7), (0.0, 0.0, 0.0)])
def test_the_clipped_estimate_bounds_the_token_that_the_policy_gave_up(gap, k3, clipped) -> None:
    policy, reference = torch.tensor(-9.0 + gap, dtype=torch.float64), torch.tensor(-9.0, dtype=torch.float64)
    assert [float(estimate(policy, reference, e)) for e in ("k3", "k3_clipped")] == pytest.approx([k3, clipped], rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_clipped"])
def test_descending_the_loss_alone_brings_the_policy_to_the_reference(estimator) -> None:
    logits = torch.tensor(LOGITS, requires_grad=True)
    for _ in range(400):
        behaviour = logits.detach().numpy().copy()
        tokens = enumerated(logits, behaviour)
        loss = (torch.tensor(np.exp(log_softmax(behaviour))) * kl_loss(tokens, tokens.reference_logprobs_N, estimator)).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= gradient
    np.testing.assert_allclose(log_softmax(logits.detach().numpy()), log_softmax(REFERENCE), atol=1e-3)


def test_the_penalty_in_the_reward_has_the_kls_gradient_as_a_policy_gradient() -> None:
    """E[grad log pi * penalised reward] over every action, each a sequence of one token, with rewards of 0."""
    log_pi, log_ref = log_softmax(LOGITS), log_softmax(REFERENCE)
    zeros = torch.zeros(4, dtype=torch.float64)
    rewards = penalised(rewards_over(zeros, zeros.long(), zeros.long() + 1), torch.tensor(log_pi - log_ref), 0.5)
    score = np.eye(4) - np.exp(log_pi)  # d log pi(a) / d logits
    gradient = (np.exp(log_pi)[:, None] * score * rewards.reward_S.numpy()[:, None]).sum(0)
    np.testing.assert_allclose(gradient, -0.5 * analytic_gradient(), atol=1e-14)


def test_a_penalty_leaves_an_unknown_reward_unknown() -> None:
    reward = torch.tensor([1.0, np.nan], dtype=torch.float64)
    out = penalised(rewards_over(reward, torch.zeros(2).long(), torch.ones(2).long()), torch.tensor([2.0, 3.0]), 0.1)
    np.testing.assert_allclose(out.reward_S.numpy(), [0.8, np.nan])


def test_a_penalty_lies_on_the_tokens_that_it_is_of() -> None:
    rewards = rewards_over(torch.tensor([1.0, 2.0]), torch.zeros(2).long(), torch.tensor([3, 1]))
    rewards = replace(rewards, mask_N=torch.tensor([True, False, True, True]))
    out = penalised(rewards, torch.tensor([1.0, np.nan, 2.0, -3.0]), 0.5)
    assert out.reward_N.tolist() == [-0.5, 0.0, 0.0, 3.5]
    assert out.reward_S.tolist() == [-0.5, 3.5]
