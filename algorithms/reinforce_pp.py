"""REINFORCE++: no critic and no group statistics but the batch's.

    reinforce_pp           A_i = (r_i - mean) / std                        mean and std over the tokens of the batch
    reinforce_pp_baseline  A_i = (b_i - mean) / std,  b_i = r_i - mean of the group

Hu et al., arXiv 2501.03262, section 3. Scaling by the batch instead of the group does not blow up groups that almost agree.
"""

from __future__ import annotations

from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards
from algorithms.groups import centred, known
from algorithms.ratio import as_float
from algorithms.registry import register_advantage
from algorithms.whiten import whiten


@register_advantage("reinforce_pp")
def reinforce_pp(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """Advantages float [S]; works with one sample per prompt."""
    advantages_S = whiten(rewards.reward_S, rewards.length_S, known(rewards))
    return advantages_S.to(as_float(rewards.reward_S).dtype)


@register_advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(rewards: Rewards, config: AlgorithmConfig) -> Tensor:
    """Advantages float [S]."""
    valid_S = known(rewards)
    advantages_S = whiten(centred(rewards.reward_S, valid_S, rewards.group_S), rewards.length_S, valid_S)
    return advantages_S.to(as_float(rewards.reward_S).dtype)
