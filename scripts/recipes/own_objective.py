"""Objectives that are not in the package, for own_objective.toml: a loss of one value a token, and advantages of one value a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards, TokenLoss, Tokens
from algorithms.ratio import ratio


def cut(tokens: Tokens, config: AlgorithmConfig) -> TokenLoss:
    """The plain policy gradient, with advantages cut at 2."""
    advantages_N = tokens.advantages_N.clamp(-2.0, 2.0)
    never_N = torch.zeros_like(tokens.mask_N)
    return TokenLoss(loss_N=-advantages_N * tokens.logprobs_N, ratio_N=ratio(tokens).detach(), clipped_N=never_N)


def against_the_batch(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """Rewards less the batch's mean; samples without a reward get 0."""
    return (rewards.reward_S - rewards.reward_S.nanmean()).nan_to_num()
