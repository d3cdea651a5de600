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

from algorithms.grpo import Scale, normalised


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The K turns of the S sequences of a batch; a sequence's turns are in order, and may lie anywhere.

    Attributes:
        reward_K: float; each turn's own reward. NaN where it is unknown: the sequence then leaves every baseline and gets 0.
        sequence_K: int64, whose turn it is, 0..S-1.
        group_S: int64, the group of each sequence.
        states: K hashable values; the state in which each turn began. Equal values of one group are one anchor group.
    """

    reward_K: Tensor
    sequence_K: Tensor
    group_S: Tensor
    states: Sequence[Hashable]


def gigpo(turns: Turns, *, gamma: float = 0.95, omega: float = 1.0, scale: Scale = "std") -> Tensor:
    """Advantages of the turns, float64 [K], without gradient. `scale` is what both kinds are divided by; `none` is the paper's F_norm = 1."""
    total_S = sequence_total(turns)
    known_S = ~torch.isnan(total_S)
    known_K = known_S[turns.sequence_K]
    episode_S = normalised(total_S, known_S, turns.group_S, scale)
    anchor_K = anchors(turns)
    step_K = normalised(returns(turns.reward_K, turns.sequence_K, gamma), known_K, anchor_K, scale)
    return episode_S[turns.sequence_K] + omega * step_K


def sequence_total(turns: Turns) -> Tensor:
    """Each sequence's sum of rewards, float64 [S]; 0 for one without turns."""
    zeros_S = torch.zeros(len(turns.group_S), dtype=torch.float64, device=turns.reward_K.device)
    return zeros_S.index_add(0, turns.sequence_K, turns.reward_K.detach().double())


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
