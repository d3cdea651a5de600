"""SAPO: a smooth gate in the place of the clip.

    L_t = -(4 / tau) sigmoid(tau (r - 1)) A,   tau = gate_positive where A > 0, else gate_negative

Soft Adaptive Policy Optimization, arXiv 2511.20347. At r = 1 the slope is 1, the plain policy gradient; it decays on both
sides, and faster for negative advantages, which raise many tokens at once.
"""

from __future__ import annotations

import torch

from algorithms.config import AlgorithmConfig
from algorithms.contracts import TokenLoss, Tokens
from algorithms.ratio import ratio
from algorithms.registry import register_loss


@register_loss("sapo", by_token=True)
def sapo(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """Nothing is clipped: every token keeps some gradient."""
    ratio_N = ratio(tokens)
    temperature_N = torch.where(tokens.advantages_N > 0, torch.full_like(ratio_N, config.gate_positive), config.gate_negative)
    gate_N = 4 / temperature_N * torch.sigmoid(temperature_N * (ratio_N - 1))
    return TokenLoss(loss_N=-gate_N * tokens.advantages_N, ratio_N=ratio_N, clipped_N=torch.zeros_like(tokens.mask_N))
