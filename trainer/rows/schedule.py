"""Optimizer steps: what one did, and its learning rate, a pure function, so that resuming needs the step's number and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import OptimizerConfig


@dataclass(frozen=True)
class Update:
    """What one optimizer step did. `grad_norm` is global and before clipping; `applied` is False when the weights did not move."""

    grad_norm: float
    lr: float
    applied: bool


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Rate of optimizer step `step` (from 0) of `total`.

    Warm-up rises on a line from 0: step s has lr * (s + 1) / warmup_steps, so the first step moves already. Then constant, or
    from lr down to lr * min_lr_ratio at the last step, on a line or half a cosine.

    Example: lr 1, warmup_steps 2, linear, total 6: 0.5, 1, 0.75, 0.5, 0.25, 0.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min((step + 1 - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    remaining = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
