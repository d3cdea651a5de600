"""GDPO: several rewards, each normalised over the group on its own, summed, then whitened over the batch.

    A_i,k = (r_i,k - mean_k) / std_k over the group;   B_i = sum over k of w_k A_i,k;   A_i = (B_i - mean) / std over the batch

NVIDIA, arXiv 2601.05242, section 3. Summing first lets different combinations of rewards collapse into one advantage: (1, 0) and
(0, 1) would be the same. The batch statistics count sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards
from algorithms.groups import known
from algorithms.grpo import normalised
from algorithms.ratio import as_float
from algorithms.registry import register_advantage
from algorithms.whiten import whiten
from miles.config import nearest


@register_advantage("gdpo")
def gdpo(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """Advantages float [S]. A sample without one of the rewards leaves that reward's baseline and has 0 from it.

    Raises:
        ValueError: there are no separate rewards, or a weight is given for a reward that does not exist.
    """
    valid_S = known(rewards)
    if not valid_S.any():
        return torch.zeros_like(as_float(rewards.reward_S))  # reward functions that failed all through the batch have left no parts
    if not rewards.parts:
        raise ValueError("algorithm.advantages = 'gdpo' normalises several rewards one by one, but there is none: name them under reward.functions")
    for name in config.part_weights:
        if name not in rewards.parts:
            raise ValueError(f"algorithm.part_weights has {name!r}, which is no reward{nearest(name, list(rewards.parts))}")
    weighted = [
        config.part_weights.get(name, 1.0) * normalised(part_S, valid_S & ~torch.isnan(part_S), rewards.group_S, "std")
        for name, part_S in rewards.parts.items()
    ]
    total_S = sum(weighted, torch.zeros_like(rewards.reward_S, dtype=torch.float64))
    # Rewards that are each other's opposites cancel up to rounding, which is float32's where the rewards are.
    noise = 1e-6 * float(sum(part_S.abs().sum() for part_S in weighted))
    return whiten(total_S, torch.ones_like(rewards.length_S), valid_S, noise).to(as_float(rewards.reward_S).dtype)
