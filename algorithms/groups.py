"""Statistics of rewards over groups of any sizes. Samples without a reward (NaN) take no part and get 0."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.contracts import Rewards, masked


def known(rewards: Rewards) -> Tensor:
    """bool [S]: the samples that have a reward."""
    return ~torch.isnan(rewards.reward_S)


def group_sum(values_S: Tensor, valid_S: Tensor, group_S: Tensor) -> Tensor:
    """For each sample, the sum of `values_S` over the valid samples of its group, float64 [S]."""
    groups = int(group_S.max()) + 1 if len(group_S) else 0
    sums = torch.zeros(groups, dtype=torch.float64, device=values_S.device)
    return sums.index_add(0, group_S, masked(values_S.double(), valid_S))[group_S]


def group_size(valid_S: Tensor, group_S: Tensor) -> Tensor:
    """For each sample, the number of valid samples of its group, float64 [S]."""
    return group_sum(torch.ones_like(valid_S, dtype=torch.float64), valid_S, group_S)


def all_equal(values_S: Tensor, valid_S: Tensor, group_S: Tensor) -> Tensor:
    """bool [S]: True where the valid values of the sample's group are all equal up to rounding.

    Rounding is 16 units in the last place of the largest of them: rewards that are the same sum in another order count as
    equal, so that no division can scale their residue up into an advantage.
    """
    groups = int(group_S.max()) + 1 if len(group_S) else 0
    infinity = torch.full((groups,), torch.inf, dtype=values_S.dtype, device=values_S.device)
    values_S = masked(values_S, valid_S)
    low = infinity.scatter_reduce(0, group_S[valid_S], values_S[valid_S], "amin")
    high = (-infinity).scatter_reduce(0, group_S[valid_S], values_S[valid_S], "amax")
    largest = torch.maximum(low.abs(), high.abs())
    equal = (high <= low) | (high - low <= 16 * torch.finfo(values_S.dtype).eps * largest)
    return equal[group_S]


def centred(values_S: Tensor, valid_S: Tensor, group_S: Tensor) -> Tensor:
    """Values less their group's mean, float64 [S]; exactly 0 where invalid and where the group's values are all equal."""
    mean_S = group_sum(values_S, valid_S, group_S) / group_size(valid_S, group_S).clamp(min=1)
    return masked(values_S.double() - mean_S, valid_S & ~all_equal(values_S, valid_S, group_S))
