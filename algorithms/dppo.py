"""DPPO: the trust region bounds a divergence and not the ratio, which lets rare tokens move and holds frequent ones.

    L_t = -M_t r A;   M_t = 0 where the update would lead further out: A > 0, r > 1, D > clip_high  or  A < 0, r < 1, D > clip_low
    dppo_tv  D = |pi(t) - pi_old(t)|
    dppo_kl  D = KL between "this token or another" under pi_old and under pi

"Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879. The bounds are divergences here: the paper
has 0.15 to 0.2 for dppo_tv and 0.05 nats for dppo_kl.

Example: a token that went from 0.001 to 0.003 has r = 3, far outside PPO's clip, and D = 0.002: it is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import TokenLoss, Tokens
from algorithms.ratio import ratio
from algorithms.registry import register_loss


@register_loss("dppo_tv", by_token=True)
def dppo_tv(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """Bounded total variation."""
    divergence_N = (tokens.logprobs_N.detach().exp() - tokens.old_logprobs_N.exp()).abs()
    return _masked_surrogate(tokens, divergence_N, config)


@register_loss("dppo_kl", by_token=True)
def dppo_kl(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """Bounded binary KL(pi_old || pi)."""
    new_N, old_N = tokens.logprobs_N.detach(), tokens.old_logprobs_N
    divergence_N = old_N.exp() * (old_N - new_N) - old_N.expm1() * (_log_rest(old_N) - _log_rest(new_N))
    return _masked_surrogate(tokens, divergence_N, config)


def _log_rest(logprobs_N: Tensor) -> Tensor:
    """log(1 - p), with p kept one rounding step below 1."""
    return torch.log(-torch.expm1(logprobs_N.clamp(max=-torch.finfo(logprobs_N.dtype).eps)))


def _masked_surrogate(tokens: Tokens, divergence_N: Tensor, config: AlgorithmConfig) -> TokenLoss:
    ratio_N, advantages_N = ratio(tokens), tokens.advantages_N
    too_high_N = (advantages_N > 0) & (ratio_N > 1) & (divergence_N > config.clip_high)
    too_low_N = (advantages_N < 0) & (ratio_N < 1) & (divergence_N > config.clip_low)
    held_N = too_high_N | too_low_N
    loss_N = -torch.where(held_N, torch.zeros_like(ratio_N), ratio_N) * advantages_N
    return TokenLoss(loss_N=loss_N, ratio_N=ratio_N, clipped_N=held_N)
