"""GRPO turn by turn: each turn's return, relative to those of the group's other trajectories from their turn of the same number on.

    A_k = (R_k - mean) / scale over the k-th turns of the group,   R_k = sum over later turns j of gamma^(j - k) r_j

The turn-level credit of Zeng et al., arXiv 2505.11821, section 4, for any number of turns. GiGPO compares turns that began in the same
state; this needs no states. Trajectories of one turn have GRPO's advantages.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards, TokenAdvantages
from algorithms.gigpo import Turns, anchors, over_tokens, returns, turns_in
from algorithms.grpo import normalised
from algorithms.registry import register_advantage


@register_advantage("turn_grpo")
def turn_grpo(rewards: Rewards, config: AlgorithmConfig) -> TokenAdvantages:
    """One advantage for each turn; 0 in sequences of unknown reward, and in a turn whose number no other trajectory of the group reached."""
    turns = turns_in(rewards, "turn_grpo")
    numbered = replace(turns, states=_numbers(turns))
    return_K = returns(turns.reward_K, turns.sequence_K, config.gamma)
    known_K = ~turns.total_S.isnan()[turns.sequence_K]
    return over_tokens(normalised(return_K, known_K, anchors(numbered), config.scale), rewards)


def _numbers(turns: Turns) -> list[int]:
    """Each turn's place in its sequence."""
    met: dict[int, int] = {}
    numbers = []
    for sequence in turns.sequence_K.tolist():
        numbers.append(met.get(sequence, 0))
        met[sequence] = numbers[-1] + 1
    return numbers
