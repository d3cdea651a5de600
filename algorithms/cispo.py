"""CISPO: the importance weight is clipped and detached, so no token loses its gradient.

    L_t = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi(t)

MiniMax-M1, arXiv 2506.13585, eqs. 4-5. The paper bounds only from above: `clip_low = 1` does that.
"""

from __future__ import annotations

from algorithms.config import AlgorithmConfig
from algorithms.contracts import TokenLoss, Tokens
from algorithms.ratio import ratio
from algorithms.registry import register_loss


@register_loss("cispo", by_token=True)
def cispo(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """`clipped_N` marks the tokens whose weight is bounded; they are trained all the same."""
    ratio_N = ratio(tokens).detach()
    weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(loss_N=-weight_N * tokens.advantages_N * tokens.logprobs_N, ratio_N=ratio_N, clipped_N=weight_N != ratio_N)
