"""Entropy guards: hold the few tokens that drive the policy's entropy down.

To first order a policy-gradient step lowers the entropy by the covariance of log-prob and advantage, and a few tokens carry most of it:

    c_t = (log pi(t) - mean log pi) (A_t - mean A)          means over the step's trained tokens
    clip_cov   the step's tokens of largest c, a share `guard_share`, are not trained
    kl_cov     their loss gets  guard_coef (r - 1 - log r),  r = pi / pi_old: the estimate of KL(pi_old || pi) whose own gradient is right,
               0 where nothing has moved yet

"The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617, sections 4.2 and 4.3. Two things are
different so that a step does not depend on how it is cut into micro-batches and ranks: log pi in c is the engine's record, which everyone
has before the first forward, and clip_cov takes the largest c where the paper draws lots among those within bounds.

Example: log-probs -0.1, -2.1, -1.1 and advantages 1, -1, 0: c = 1, 1, 0. Share 1/3 holds the first two, which tie.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, Covariance, Tokens, masked
from algorithms.ratio import log_ratio, ratio

_ROUNDING = 1e-6
"""Relative slack of the bound, for ties: the loss may see the advantages in float32."""
_RESIDUE = 1e-9


def covariance(logprobs_N: Tensor, advantages_N: Tensor, share: float) -> Covariance:
    """What the loss has to know of the whole step, from its trained tokens (no masked ones), N of them.

    `share` of them, at least one, lie at the bound or above it, unless ties make them more or fewer are positive: a token whose c is not
    positive does not lower the entropy and is never held.
    """
    logprobs_N, advantages_N = logprobs_N.double(), advantages_N.double()
    if not len(logprobs_N):
        return Covariance(logprob_mean=0.0, advantage_mean=0.0, bound=math.inf)
    logprob_mean, advantage_mean = logprobs_N.mean(), advantages_N.mean()
    ordered = ((logprobs_N - logprob_mean) * (advantages_N - advantage_mean)).sort(descending=True).values
    # Equal values less their mean leave residue, which is no covariance.
    positive = ordered[ordered > _RESIDUE * logprobs_N.abs().max() * advantages_N.abs().max()]
    bound = math.inf
    if len(positive):
        number = min(max(1, int(share * len(ordered))), len(positive))
        following = float(positive[number]) if number < len(positive) else 0.0
        # Between the last that is held and the first that is not, so that rounding moves neither over the bound.
        bound = (float(positive[number - 1]) + following) / 2 * (1 - _ROUNDING)
    return Covariance(logprob_mean=float(logprob_mean), advantage_mean=float(advantage_mean), bound=bound)


def guarded(token_loss_N: Tensor, tokens: Tokens, counts: Counts, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The loss under the guard, and bool [N]: the tokens that it took out."""
    nothing_N = torch.zeros_like(tokens.mask_N)
    if config.entropy_guard == "none":
        return token_loss_N, nothing_N
    held_N = _driving(tokens, counts)
    if config.entropy_guard == "clip_cov":
        return masked(token_loss_N, ~held_N), held_N
    penalty_N = ratio(tokens) - 1 - log_ratio(tokens)
    return token_loss_N + config.guard_coef * masked(penalty_N, held_N), nothing_N


def _driving(tokens: Tokens, counts: Counts) -> Tensor:
    step = counts.covariance
    assert step is not None, "an entropy guard needs the step's covariance in its counts"
    c_N = (tokens.rollout_logprobs_N.double() - step.logprob_mean) * (tokens.advantages_N.double() - step.advantage_mean)
    return tokens.mask_N & (c_N >= step.bound)
