"""PPO's clipped surrogate with separate bounds and an optional dual clip.

    L_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = pi(t) / pi_old(t)

PPO (arXiv 1707.06347, eq. 7); separate bounds, "clip-higher": DAPO (arXiv 2503.14476, section 3.1); dual clip: with A < 0 the
loss is at most -c A (arXiv 1912.09729), so that one runaway ratio cannot own the batch.

Example: A = 1, r = 1.5, clip_high = 0.28: L = -1.28 and no gradient. A = -1, r = 1.5: L = 1.5 and the gradient flows.
"""

from __future__ import annotations

import torch

from algorithms.config import AlgorithmConfig
from algorithms.contracts import TokenLoss, Tokens
from algorithms.ratio import ratio
from algorithms.registry import register_loss


@register_loss("ppo_clip", by_token=True)
def ppo_clip(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """The gradient of a token is 0 exactly where the clip holds it."""
    ratio_N, advantages_N = ratio(tokens), tokens.advantages_N
    return clipped_surrogate(ratio_N, advantages_N, config)


def clipped_surrogate(ratio_N: torch.Tensor, advantages_N: torch.Tensor, config: AlgorithmConfig) -> TokenLoss:
    """The surrogate of any ratio, so that sequence-level ratios share it."""
    clipped_N = ((advantages_N > 0) & (ratio_N > 1 + config.clip_high)) | ((advantages_N < 0) & (ratio_N < 1 - config.clip_low))
    bound_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    # `where` and not `min`: at equal branches `min` would halve the gradient between the two.
    loss_N = -torch.where(clipped_N, bound_N, ratio_N) * advantages_N
    if config.clip_dual is not None:
        runaway_N = (advantages_N < 0) & (ratio_N > config.clip_dual)
        loss_N = torch.where(runaway_N, -config.clip_dual * advantages_N, loss_N)
        clipped_N = clipped_N | runaway_N
    return TokenLoss(loss_N=loss_N, ratio_N=ratio_N, clipped_N=clipped_N)
