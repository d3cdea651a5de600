"""Batches of rewards for the tests of estimators: sequences of given lengths, all of whose tokens are trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.contracts import Rewards, TokenAdvantages


def rewards_over(
    reward_S: torch.Tensor,
    group_S: torch.Tensor,
    length_S: torch.Tensor,
    parts: dict[str, torch.Tensor] | None = None,
    values: Sequence[float] | None = None,
) -> Rewards:
    """Each sequence's reward lies on its last token. `values`: a critic's, of every token."""
    sequence_N = torch.arange(len(reward_S)).repeat_interleave(length_S)
    reward_N = torch.zeros(len(sequence_N), dtype=reward_S.dtype)
    reward_N[length_S.cumsum(0) - 1] = reward_S
    mask_N = torch.ones(len(sequence_N), dtype=torch.bool)
    values_N = None if values is None else torch.tensor(values, dtype=reward_S.dtype)
    return Rewards(reward_S=reward_S, group_S=group_S, mask_N=mask_N, sequence_N=sequence_N, reward_N=reward_N, parts=parts or {}, values_N=values_N)


def of_sequences(found: TokenAdvantages, rewards: Rewards) -> NDArray[np.float64]:
    """The advantage of each sequence, [S], which all of its tokens have."""
    places = [np.flatnonzero(rewards.sequence_N.numpy() == s) for s in range(len(rewards.reward_S))]
    values_N = found.advantages_N.numpy()
    assert all((values_N[place] == values_N[place[0]]).all() for place in places)
    return np.array([values_N[place[0]] for place in places])
