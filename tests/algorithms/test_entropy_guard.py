"""Which tokens an entropy guard holds, against loops and sorted lists, and what it does to them, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import registry
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, Covariance
from algorithms.entropy_guard import covariance
from tests.algorithms.loss_batches import Row, rows, run


def held(logprobs: list[float], advantages: list[float], share: float) -> list[int]:
    """Tokens whose gradient clip_cov takes away, on-policy."""
    step = covariance(torch.tensor(logprobs, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64), share)
    values = [np.array(v, float) for v in (logprobs, logprobs, logprobs, advantages, advantages, logprobs)]
    row = Row(*values, np.ones(len(logprobs), bool))
    counts = Counts(tokens=len(logprobs), sequences=1, max_tokens=8, covariance=step)
    _, gradients, sums = run(registry.loss(AlgorithmConfig(entropy_guard="clip_cov", guard_share=share)), [row], counts)
    taken = np.flatnonzero((gradients[0] == 0) & (row.advantages != 0)).tolist()
    assert sums["policy/clip_fraction"] == len(taken)
    return taken


def oracle(logprobs: list[float], advantages: list[float], share: float) -> set[int]:
    n = len(logprobs)
    mean, mean_a = math.fsum(logprobs) / n, math.fsum(advantages) / n
    c = [(x - mean) * (a - mean_a) for x, a in zip(logprobs, advantages, strict=True)]
    wanted = max(1, int(share * n))
    return {i for i in range(n) if c[i] > 1e-9 and sum(other > c[i] * (1 + 1e-9) for other in c) < wanted}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 40), share=st.floats(0.01, 0.9))
def test_the_top_share_by_covariance_is_held(seed, n, share) -> None:
    rng = np.random.default_rng(seed)
    logprobs, advantages = (-rng.exponential(1.0, n)).tolist(), rng.standard_normal(n).tolist()
    assert set(held(logprobs, advantages, share)) == oracle(logprobs, advantages, share)


def test_the_worked_example() -> None:
    # c = 1, 1, 0: the first two tie.
    assert held([-0.1, -2.1, -1.1], [1.0, -1.0, 0.5 - 0.5], 1 / 3) == [0, 1]


@pytest.mark.parametrize(("logprobs", "advantages"), [([-1.0, -2.0, -0.3], [0.1, 0.1, 0.1]), ([-0.7, -0.7, -0.7], [1.0, -1.0, 0.3]), ([-1.0], [2.0])])
def test_where_nothing_varies_nothing_is_held(logprobs, advantages) -> None:
    assert held(logprobs, advantages, 0.9) == []


def test_tokens_that_raise_the_entropy_are_never_held() -> None:
    # Likely tokens are pushed down and unlikely ones up: every c is negative.
    assert held([-0.1, -3.0], [-1.0, 1.0], 0.9) == []


def test_a_step_without_tokens_holds_nothing() -> None:
    assert covariance(torch.zeros(0), torch.zeros(0), 0.5).bound == math.inf


def test_kl_cov_leads_the_held_token_back_and_leaves_the_others_alone() -> None:
    old = np.log([0.5, 0.1, 0.2])
    new = old + np.log([1.2, 1.1, 0.9])
    advantages = np.array([2.0, -1.0, -1.0])
    row = Row(new, old, old, advantages, advantages, old, np.ones(3, bool))
    step = covariance(torch.tensor(old), torch.tensor(advantages), 0.34)
    counts = Counts(tokens=3, sequences=1, max_tokens=8, covariance=step)
    _, plain, _ = run(registry.loss(AlgorithmConfig()), [row], counts)
    loss, gradients, _ = run(registry.loss(AlgorithmConfig(entropy_guard="kl_cov", guard_share=0.34, guard_coef=0.5)), [row], counts)
    # d/dx of 0.5 (r - 1 - log r) is 0.5 (r - 1), on the token of ratio 1.2 alone.
    np.testing.assert_allclose((gradients[0] - plain[0]) * 3, [0.5 * 0.2, 0, 0], atol=1e-12)
    surrogate = -(1.2 * 2 + 1.1 * -1 + 0.9 * -1)
    assert loss == pytest.approx((surrogate + 0.5 * (0.2 - math.log(1.2))) / 3)


def test_the_penalty_of_kl_cov_has_the_gradient_of_the_kl_on_a_softmax() -> None:
    """Every token is held here: the expectation over the old policy is KL(pi_old || pi) and its gradient."""
    logits = torch.tensor([0.3, -0.5, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([0.1, 0.2, -0.4, 0.6], dtype=torch.float64), 0)
    new = torch.log_softmax(logits, 0)
    (truth,) = torch.autograd.grad((old.exp() * (old - new)).sum(), logits, retain_graph=True)
    x = new.detach().numpy()
    row = Row(x, old.numpy(), old.numpy(), np.zeros(4), np.zeros(4), old.numpy(), np.ones(4, bool))
    counts = Counts(tokens=1, sequences=1, max_tokens=8, covariance=Covariance(logprob_mean=0, advantage_mean=0, bound=-1))
    _, gradients, _ = run(registry.loss(AlgorithmConfig(entropy_guard="kl_cov")), [row], counts)
    (got,) = torch.autograd.grad((old.exp() * torch.tensor(gradients[0]) * new).sum(), logits)
    np.testing.assert_allclose(got.numpy(), truth.numpy(), atol=1e-12)


def test_without_the_guard_the_counts_need_no_covariance() -> None:
    (row,) = rows(0, [4])
    assert math.isfinite(run(registry.loss(AlgorithmConfig()), [row], Counts(tokens=4, sequences=1, max_tokens=8))[0])
