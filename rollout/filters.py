"""Which groups teach something: pure functions of a finished group."""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles.data.types import Group

RELATIVE_TOLERANCE = 1e-6
"""Weighted sums of equal rewards may differ in their last bits; such a difference is no signal."""


def known_rewards(group: Group) -> list[float]:
    """Rewards of the samples that may be trained on and have one."""
    return [s.reward for s in group.trainable if s.reward is not None]


def zero_variance(group: Group) -> bool:
    """All known rewards are equal (there is at least one): every group-relative advantage is 0."""
    rewards = known_rewards(group)
    return bool(rewards) and math.isclose(min(rewards), max(rewards), rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)


def too_few_rewards(group: Group) -> bool:
    """Fewer than two rewards are known, so there is no baseline to compare with."""
    return len(known_rewards(group)) < 2


def teaches_nothing(group: Group) -> bool:
    """What dynamic sampling drops (DAPO, arXiv 2503.14476, section 3.2): equal rewards, or too few known ones."""
    return too_few_rewards(group) or zero_variance(group)


def diagnosis(filtered: Sequence[Group]) -> str:
    """Why `filtered` groups taught nothing and what to change, as one sentence for the error that ends a run.

    Example: `64 groups taught nothing: 60 with all rewards equal to 0, 3 equal to 1, 1 with fewer than two known rewards`.
    """
    unknown = sum(too_few_rewards(g) for g in filtered)
    levels = [f"{known_rewards(g)[0]:g}" for g in filtered if not too_few_rewards(g)]
    common = sorted({level: levels.count(level) for level in levels}.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count} with all rewards equal to {level}" for level, count in common[:3]]
    if others := sum(count for _, count in common[3:]):
        parts.append(f"{others} equal to other values")
    if unknown:
        parts.append(f"{unknown} with fewer than two known rewards")
    return (
        f"{len(filtered)} groups taught nothing: {', '.join(parts)}. Look at the sample table; use easier prompts where all answers are wrong and harder "
        "ones where all are right, a denser reward, or more samples per prompt"
    )
