"""Group-relative advantages.

    A_i = (r_i - mean(r)) / scale(r)        over the known rewards r of the group of sample i

`scale` is the sample standard deviation (GRPO, arXiv 2402.03300, section 4.1.2), 1 (Dr.GRPO, arXiv 2503.20783: the division
weighs easy and hard prompts more), or the mean absolute deviation, which one outlier moves less.
There is no epsilon: a group whose rewards are all equal has advantages of exactly 0, and any other is scaled exactly, so that
doubled rewards give the same advantages.

Example: rewards 1, 0, 0, 1 -> mean 0.5, standard deviation 0.577 -> 0.866, -0.866, -0.866, 0.866.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards
from algorithms.groups import centred, group_size, group_sum, known
from algorithms.ratio import as_float
from algorithms.registry import register_advantage

Scale = Literal["std", "none", "mean_abs"]


@register_advantage("grpo")
def grpo(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """Advantages float [S]: 0 for unknown rewards and for groups whose rewards are all equal."""
    advantages_S = normalised(rewards.reward_S, known(rewards), rewards.group_S, config.scale)
    return advantages_S.to(as_float(rewards.reward_S).dtype)


def normalised(values_S: Tensor, valid_S: Tensor, group_S: Tensor, scale: Scale) -> Tensor:
    """Group-centred values over their scale, float64 [S]."""
    centred_S = centred(values_S, valid_S, group_S)
    if scale == "none":
        return centred_S
    size_S = group_size(valid_S, group_S)
    if scale == "std":
        scale_S = (group_sum(centred_S.square(), valid_S, group_S) / (size_S - 1).clamp(min=1)).sqrt()
    else:
        scale_S = group_sum(centred_S.abs(), valid_S, group_S) / size_S.clamp(min=1)
    # A scale of 0 means that every centred value is exactly 0.
    return centred_S / torch.where(scale_S > 0, scale_S, torch.ones_like(scale_S))
