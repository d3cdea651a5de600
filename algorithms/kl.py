"""KL(policy || reference) per token: estimates to report, and the loss whose gradient is the KL's.

With x sampled from the policy and d = log pi(x) - log ref(x), three estimates (Schulman, "Approximating KL divergence", 2020):

    k1 = d                  unbiased, can be negative
    k2 = d^2 / 2            biased, low variance
    k3 = exp(-d) - 1 + d    unbiased, never negative
    k3_clipped = min(k3, 10)    a little low, and no token that the policy has all but given up owns the mean

Differentiating an estimate is not estimating the gradient. grad KL = E[d grad log pi(x)], because E[grad log pi] = 0; but
E[grad k1] = 0, and E[grad k3] = E[(1 - exp(-d)) grad log pi] is the gradient of the reverse divergence KL(ref || pi).
grad k2 = d grad log pi is the right one. Where the sample comes from an older policy each term is weighted by the importance
ratio pi / pi_old (as DeepSeek-V3.2, arXiv 2512.02556, section 3.1), cut at 2 to bound its variance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from algorithms.contracts import Rewards, Tokens, masked
from algorithms.ratio import MAX_LOG_RATIO, ratio

Estimator = Literal["k1", "k2", "k3", "k3_clipped"]
MAX_WEIGHT = 2.0
MAX_K3 = 10.0


def estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: Estimator) -> Tensor:
    """Estimated KL(policy || reference) of each token in nats, [N]. k3's exponent is bounded, so the value is finite.

    Example: a token of which the reference is 8 nats surer (d = -8) has k3 = e^8 - 9 = 2,972, and 10 as k3_clipped.
    """
    difference_N = logprobs_N - reference_logprobs_N
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return 0.5 * difference_N.square()
    k3_N = (-difference_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - 1 + difference_N
    return k3_N.clamp(max=MAX_K3) if estimator == "k3_clipped" else k3_N


def kl_loss(tokens: Tokens, reference_logprobs_N: Tensor, estimator: Estimator) -> Tensor:
    """[N]: its value is the estimate, its gradient that of KL(policy || reference), whichever estimate is reported."""
    weight_N = ratio(tokens).detach().clamp(max=MAX_WEIGHT)
    surrogate_N = weight_N * estimate(tokens.logprobs_N, reference_logprobs_N, "k2")
    value_N = estimate(tokens.logprobs_N, reference_logprobs_N, estimator).detach()
    return value_N + surrogate_N - surrogate_N.detach()


def penalised(rewards: Rewards, kl_N: Tensor, coef: float) -> Rewards:
    """`rewards` less `coef` times k1 of each trained token under the policy that sampled it; unknown rewards stay unknown.

    As a reward the penalty needs no gradient of its own: the policy gradient of E[-k1] is that of -KL(policy || reference).
    `kl_N`: float [N]; masked places may hold anything.
    """
    penalty_N = coef * masked(kl_N, rewards.mask_N).to(rewards.reward_S.dtype)
    reward_S = rewards.reward_S.index_add(0, rewards.sequence_N, penalty_N, alpha=-1)
    return replace(rewards, reward_S=reward_S, reward_N=rewards.reward_N - penalty_N)
