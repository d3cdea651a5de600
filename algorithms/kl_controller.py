"""A KL coefficient that steers the KL to a target.

    coef <- coef (1 + 0.1 clip(kl / target - 1, -0.2, 0.2))        once a step

Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv 1909.08593, section 2.2. It stays positive, and changes by
at most 2 % a step.

Example: coefficient 0.1, target 0.02: a measured KL of 0.022 gives 0.101, one of 0.1 gives 0.102.
"""

from __future__ import annotations

GAIN = 0.1
LIMIT = 0.2


def adapted(coef: float, kl: float, target: float) -> float:
    """The next step's coefficient, from this step's and its KL (nats per token)."""
    return coef * (1 + GAIN * min(max(kl / target - 1, -LIMIT), LIMIT))
