"""RLOO: each sample's baseline is the mean of the others of its group.

    A_i = r_i - mean of r_j over j != i   =   n / (n - 1) * (r_i - mean(r))

Ahmadian et al., "Back to Basics", arXiv 2402.14740, section 3.2. The baseline does not depend on the sample it is for, so the
policy gradient stays unbiased.

Example: rewards 1, 0, 0 -> 1 - 0, 0 - 0.5, 0 - 0.5 = 1, -0.5, -0.5.
"""

from __future__ import annotations

from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards
from algorithms.groups import centred, group_size, known
from algorithms.ratio import as_float
from algorithms.registry import register_advantage


@register_advantage("rloo")
def rloo(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """Advantages float [S]. A sample that is alone in its group has 0."""
    valid_S = known(rewards)
    size_S = group_size(valid_S, rewards.group_S)
    advantages_S = centred(rewards.reward_S, valid_S, rewards.group_S) * size_S / (size_S - 1).clamp(min=1)
    return advantages_S.to(as_float(rewards.reward_S).dtype)
