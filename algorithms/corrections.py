"""What to do about an engine that does not compute, or no longer holds, the policy that the trainer has.

The weight of a token's loss is w = pi_old / pi_rollout: trainer over engine, both before the update, detached.

    importance  w                              decoupled PPO: behaviour, proximal and current policy (arXiv 2110.00641, 2505.24298)
    truncate    min(w, high)                   truncated importance sampling, TIS (Yao et al., "Your efficient RL framework ...", 2025)
    clip        clip(w, low, high)
    mask        w where low <= w <= high, else 0   IcePop (arXiv 2510.18855), masked importance sampling

w is each token's (`token`), the product over the sequence (`sequence`, unbiased and wild) or its geometric mean (`geometric`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.aggregate import sequence_average, sequence_sum
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Tokens, masked
from algorithms.ratio import bounded_exp


def correction_weight(tokens: Tokens, config: AlgorithmConfig) -> Tensor:
    """Weights of the token losses, float [N], without gradient."""
    log_weight_N = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).detach()
    if config.correction_level == "sequence":
        log_weight_N = sequence_sum(log_weight_N, tokens)[tokens.sequence_N]
    elif config.correction_level == "geometric":
        log_weight_N = sequence_average(log_weight_N, tokens)[tokens.sequence_N]
    weight_N = bounded_exp(log_weight_N)
    if config.correction == "truncate":
        return weight_N.clamp(max=config.correction_high)
    if config.correction == "clip":
        return weight_N.clamp(config.correction_low, config.correction_high)
    if config.correction == "mask":
        return masked(weight_N, (weight_N >= config.correction_low) & (weight_N <= config.correction_high))
    return weight_N


def off_policy_sequences(tokens: Tokens, limit: float) -> Tensor:
    """bool [N]: tokens of sequences with a negative advantage that the policy has left behind. They are not trained.

    A sequence is left behind where the mean over its tokens of log(pi_old / pi) is above `limit`
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): learning what not to do from what one would not do anyway only does harm.
    """
    distance_S = sequence_average((tokens.old_logprobs_N - tokens.logprobs_N).detach(), tokens)
    return (tokens.advantages_N < 0) & (distance_S > limit)[tokens.sequence_N]


def corrected(token_loss_N: Tensor, tokens: Tokens, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The loss after correction and sequence mask, and bool [N]: the tokens that these took out."""
    dropped_N = torch.zeros_like(tokens.mask_N)
    if config.correction != "none":
        weight_N = correction_weight(tokens, config)
        dropped_N = weight_N == 0
        token_loss_N = token_loss_N * weight_N
    if config.sequence_mask is not None:
        dropped_N = dropped_N | off_policy_sequences(tokens, config.sequence_mask)
    return masked(token_loss_N, ~dropped_N), dropped_N
