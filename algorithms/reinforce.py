"""Policy gradients without a clip.

reinforce   L_t = -A log pi(t)                 Williams, 1992: right for on-policy samples
importance  L_t = -r A,  r = pi(t) / pi_old(t)  the same gradient on-policy, reweighted off-policy
"""

from __future__ import annotations

import torch

from algorithms.config import AlgorithmConfig
from algorithms.contracts import TokenLoss, Tokens
from algorithms.ratio import ratio
from algorithms.registry import register_loss


@register_loss("reinforce", by_token=True)
def reinforce(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """No token is clipped; the ratio is reported alone."""
    ratio_N = ratio(tokens).detach()
    return TokenLoss(loss_N=-tokens.advantages_N * tokens.logprobs_N, ratio_N=ratio_N, clipped_N=torch.zeros_like(tokens.mask_N))


@register_loss("importance", by_token=True)
def importance(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """No token is clipped."""
    ratio_N = ratio(tokens)
    return TokenLoss(loss_N=-ratio_N * tokens.advantages_N, ratio_N=ratio_N, clipped_N=torch.zeros_like(tokens.mask_N))
