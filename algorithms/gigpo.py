"""GiGPO: credit for each turn of an agent's trajectory, from states that several trajectories of a group came through.

    R_k = sum over later turns j of gamma^(j - k) r_j               the return from turn k on
    A_k = A_episode + omega A_step
    A_episode: the sequence's total reward, relative to its group (as GRPO)
    A_step: R_k, relative to the turns of the group that began in the same state, its anchor group

Feng et al., "Group-in-Group Policy Optimization", arXiv 2505.10978, section 4. A state that only one turn began in compares with nothing
and gives A_step = 0. Times and rewards are per turn (an action of the policy, many tokens); `spread` lays them over tokens.

Example: two trajectories go through the state s. One gets 1 in the end and the other 0; both returns from s on are compared with each
other, so the turn at s of the first has A_step > 0, whatever the rest of their ways looked like.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards, TokenAdvantages, masked
from algorithms.grpo import Scale, normalised
from algorithms.registry import register_advantage


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The K turns of the S sequences of a batch; a sequence's turns are in order, and may lie anywhere.

    Attributes:
        reward_K: float; each turn's own reward.
        sequence_K: int64, whose turn it is, 0..S-1.
        group_S: int64, the group of each sequence.
        total_S: float, each sequence's whole reward. NaN where it is unknown: the sequence then leaves every baseline and gets 0.
        states: K hashable values; the state in which each turn began. Equal values of one group are one anchor group.
    """

    reward_K: Tensor
    sequence_K: Tensor
    group_S: Tensor
    total_S: Tensor
    states: Sequence[Hashable]


def gigpo(turns: Turns, *, gamma: float = 0.95, omega: float = 1.0, scale: Scale = "std") -> Tensor:
    """Advantages of the turns, float64 [K], without gradient. `scale` is what both kinds are divided by; `none` is the paper's F_norm = 1."""
    known_S = ~torch.isnan(turns.total_S)
    known_K = known_S[turns.sequence_K]
    episode_S = normalised(turns.total_S, known_S, turns.group_S, scale)
    anchor_K = anchors(turns)
    step_K = normalised(returns(turns.reward_K, turns.sequence_K, gamma), known_K, anchor_K, scale)
    return episode_S[turns.sequence_K] + omega * step_K


@register_advantage("gigpo")
def by_states(rewards: Rewards, config: AlgorithmConfig) -> TokenAdvantages:
    """`gigpo` of the batch's turns: one advantage for all tokens of a turn.

    Raises:
        ValueError: the samples say nothing of turns, or not in which states they began.
    """
    turns = turns_in(rewards, "gigpo")
    if any(state is None for state in turns.states):
        raise ValueError("algorithm.advantages = 'gigpo' compares states, but some turns have none")
    return over_tokens(gigpo(turns, gamma=config.gamma, omega=config.turn_weight, scale=config.scale), rewards)


def turns_in(rewards: Rewards, estimator: str) -> Turns:
    """The turns of a batch, each with the rewards of its tokens. Raises ValueError where there are none."""
    places = rewards.turns
    if places is None:
        raise ValueError(f"algorithm.advantages = {estimator!r} gives credit by turns, but not all samples say what theirs are")
    inside_N = places.turn_N >= 0
    zeros_K = torch.zeros(len(places.sequence_K), dtype=rewards.reward_N.dtype)
    reward_K = zeros_K.index_add(0, places.turn_N[inside_N], rewards.reward_N[inside_N])
    return Turns(reward_K=reward_K, sequence_K=places.sequence_K, group_S=rewards.group_S, total_S=rewards.reward_S, states=places.states)


def over_tokens(advantages_K: Tensor, rewards: Rewards) -> TokenAdvantages:
    """Turns' advantages as those of their trained tokens."""
    assert rewards.turns is not None
    return TokenAdvantages(advantages_N=masked(spread(advantages_K, rewards.turns.turn_N), rewards.mask_N))


def returns(reward_K: Tensor, sequence_K: Tensor, gamma: float) -> Tensor:
    """The discounted sum of a turn's own and its sequence's later rewards, float64 [K]."""
    rewards, sequences = reward_K.detach().double().tolist(), sequence_K.tolist()
    later: dict[int, float] = {}
    out = [0.0] * len(rewards)
    for k in reversed(range(len(rewards))):
        later[sequences[k]] = out[k] = rewards[k] + gamma * later.get(sequences[k], 0.0)
    return torch.tensor(out, dtype=torch.float64, device=reward_K.device)


def anchors(turns: Turns) -> Tensor:
    """The number of each turn's anchor group, int64 [K], from 0 in the order in which they are first met."""
    numbers: dict[tuple[int, Hashable], int] = {}
    groups = turns.group_S[turns.sequence_K].tolist()
    found = [numbers.setdefault(key, len(numbers)) for key in zip(groups, turns.states, strict=True)]
    return torch.tensor(found, dtype=torch.int64, device=turns.group_S.device)


def spread(advantages_K: Tensor, turn_N: Tensor) -> Tensor:
    """Turns' advantages laid over tokens, [N]. `turn_N`: int64, the turn that each token belongs to, -1 for none (observations): these get 0."""
    padded = torch.cat([advantages_K, advantages_K.new_zeros(1)])
    return padded[turn_N]
