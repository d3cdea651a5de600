"""The critic's loss: squared error to the returns, with PPO's clip around the values at the step's start.

    L_t = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

Schulman et al., PPO; the clip is that of its reference implementation ("The 37 Implementation Details of PPO", 2022, detail 9).
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.contracts import Counts, LossOutput, masked
from algorithms.ratio import as_float


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, mask_N: Tensor, counts: Counts, clip: float | None = 0.2) -> LossOutput:
    """Mean over the step's trained tokens. Masked places may hold anything. Sums: value/loss and value/clip_fraction.

    Args:
        values_N: float [N], requires grad. old_values_N, returns_N: float [N]. mask_N: bool [N].
        clip: how far a value may move before it stops learning; None is the plain squared error.
    """
    values_N, old_N, returns_N = (masked(as_float(v), mask_N) for v in (values_N, old_values_N, returns_N))
    error_N = (values_N - returns_N).square()
    held_N = torch.zeros_like(mask_N)
    if clip is not None:
        bounded_N = (torch.clamp(values_N, old_N - clip, old_N + clip) - returns_N).square()
        held_N = bounded_N > error_N
        error_N = torch.where(held_N, bounded_N, error_N)
    total = 0.5 * masked(error_N, mask_N).sum()
    sums = {"value/loss": total.detach(), "value/clip_fraction": masked(held_N.to(error_N.dtype), mask_N).sum()}
    return LossOutput(loss=total / max(counts.tokens, 1), sums=sums)
