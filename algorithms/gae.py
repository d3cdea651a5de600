"""Generalised advantage estimation over the tokens that the policy chose, and the returns that the critic learns.

    delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lambda A_{t+1};   return_t = A_t + V_t

Schulman et al., arXiv 1506.02438, eqs. 11-16. Time runs over trained tokens alone: a tool's answer between two actions is part of
the next state and no step of its own, so it neither discounts nor needs a value. After the last one the value is 0.

Example: gamma = lambda = 1, values 0.5, 0.8, reward 1 at the end: A = 1 - 0.5, 1 - 0.8 = 0.5, 0.2 and both returns are 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards, TokenAdvantages, masked
from algorithms.groups import known
from algorithms.registry import register_advantage
from algorithms.whiten import whiten


@register_advantage("gae")
def ppo(rewards: Rewards, config: AlgorithmConfig) -> TokenAdvantages:
    """PPO's advantages and the returns for its critic, each token's own; a group may have any size. Whitened over the batch's trained
    tokens where `config.whiten` says so; the returns never are. A sequence of unknown reward has advantages 0 and teaches no critic.

    Raises:
        ValueError: there are no values.
    """
    if rewards.values_N is None:
        raise ValueError("algorithm.advantages = 'gae' needs a critic's values: add a [critic] section to the recipe")
    learnt_N = rewards.mask_N & known(rewards)[rewards.sequence_N]
    values_N = rewards.values_N.to(rewards.reward_N.dtype)
    advantages_N, returns_N = gae(rewards.reward_N, values_N, learnt_N, rewards.sequence_N, gamma=config.gamma, lam=config.gae_lambda)
    if config.whiten:
        advantages_N = whiten(advantages_N, torch.ones_like(rewards.sequence_N), learnt_N).to(advantages_N.dtype)
    return TokenAdvantages(advantages_N=advantages_N, returns_N=returns_N.masked_fill(~learnt_N, torch.nan))


def gae(rewards_N: Tensor, values_N: Tensor, mask_N: Tensor, sequence_N: Tensor, *, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """`(advantages_N, returns_N)`, float64 where the inputs are, else float32, without gradient; 0 at masked places.

    Args:
        rewards_N: float [N]; the reward of each token (see `reward_at_the_end`). Masked places may hold anything, as in `values_N`.
        values_N: float [N]; the critic's value of the state in which the token was chosen.
        mask_N: bool [N]. sequence_N: int64 [N]; a sequence's tokens are in order.
    """
    rewards_N, values_N = rewards_N.detach(), values_N.detach()
    chosen = mask_N.nonzero().squeeze(1)
    place = _place(sequence_N[chosen])
    sequences = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    longest = int(place.max()) + 1 if len(place) else 0
    # One column more than the longest: the state after the end, of value 0.
    reward_SL = torch.zeros(sequences, longest + 1, dtype=torch.float64, device=rewards_N.device)
    value_SL = torch.zeros_like(reward_SL)
    at = (sequence_N[chosen], place)
    reward_SL[at], value_SL[at] = rewards_N[chosen].double(), values_N[chosen].double()
    advantage_SL = torch.zeros_like(reward_SL)
    for t in reversed(range(longest)):
        delta_S = reward_SL[:, t] + gamma * value_SL[:, t + 1] - value_SL[:, t]
        advantage_SL[:, t] = delta_S + gamma * lam * advantage_SL[:, t + 1]
    dtype = torch.float64 if values_N.dtype == torch.float64 else torch.float32
    advantages_N = torch.zeros(len(mask_N), dtype=dtype, device=values_N.device)
    advantages_N[chosen] = advantage_SL[at].to(dtype)
    return advantages_N, masked(advantages_N + values_N.to(dtype), mask_N)


def reward_at_the_end(reward_S: Tensor, mask_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each sequence's reward on its last trained token, [N], 0 elsewhere; a sequence without one receives nothing."""
    rewards_N = torch.zeros(len(mask_N), dtype=reward_S.dtype, device=reward_S.device)
    chosen = mask_N.nonzero().squeeze(1)
    last_S = torch.full((len(reward_S),), -1, dtype=torch.int64, device=reward_S.device)
    last_S = last_S.scatter_reduce(0, sequence_N[chosen], chosen, "amax")
    some_S = last_S >= 0
    rewards_N[last_S[some_S]] = reward_S[some_S]
    return rewards_N


def _place(sequence_M: Tensor) -> Tensor:
    """The number of earlier entries of the same sequence, for each entry, int64 [M]."""
    order = torch.argsort(sequence_M, stable=True)
    ordered = sequence_M[order]
    start = torch.searchsorted(ordered, ordered)
    place = torch.empty_like(sequence_M)
    place[order] = torch.arange(len(sequence_M), device=sequence_M.device) - start
    return place
