"""DAPO's soft overlong punishment: a reward for length that falls from 0 to -1 instead of a cliff at the limit.

    R(l) = 0  for l <= from;   (from - l) / (to - from)  between;   -1  for l >= to

arXiv 2503.14476, eq. 13, where `to` is L_max and `to - from` is L_cache.

Example: [768, 1024]: 700 tokens -> 0, 896 -> -0.5, 1024 -> -1.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from algorithms.contracts import Rewards
from algorithms.ratio import as_float


def overlong_penalty(length_S: Tensor, start: int, end: int) -> Tensor:
    """The length's reward, float64 [S], in -1..0."""
    return -((length_S.double() - start) / (end - start)).clamp(0.0, 1.0)


def with_overlong_penalty(rewards: Rewards, bounds: tuple[int, int]) -> Rewards:
    """`rewards` with the penalty added; as a part of its own, too, for estimators that normalise parts."""
    penalty_S = overlong_penalty(rewards.length_S, *bounds).to(as_float(rewards.reward_S).dtype)
    parts = {**rewards.parts, "overlong": penalty_S} if rewards.parts else {}
    return replace(rewards, reward_S=rewards.reward_S + penalty_S, parts=parts)
