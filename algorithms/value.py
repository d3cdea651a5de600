"""The critic's loss: squared error to the returns, with PPO's clip around the values at the step's start.

    L_t = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

Schulman et al., PPO; the clip is that of its reference implementation ("The 37 Implementation Details of PPO", 2022, detail 9).
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.contracts import LossOutput, masked
from algorithms.ratio import as_float


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, mask_N: Tensor, total: int, clip: float = 0.2) -> LossOutput:
    """This micro-batch's share of the mean over the step's `total` tokens. Masked places may hold anything. Sums: value/clip_fraction.

    Args:
        values_N: float [N], requires grad. old_values_N, returns_N: float [N]. mask_N: bool [N].
        clip: how far a value may move before it stops learning; infinity is the plain squared error.
    """
    values_N = masked(as_float(values_N), mask_N)
    old_N, returns_N = (masked(v.to(values_N.dtype), mask_N) for v in (old_values_N, returns_N))
    error_N = (values_N - returns_N).square()
    bounded_N = (torch.clamp(values_N, old_N - clip, old_N + clip) - returns_N).square()
    held_N = bounded_N > error_N
    loss = 0.5 * masked(torch.where(held_N, bounded_N, error_N), mask_N).sum() / max(total, 1)
    return LossOutput(loss=loss, sums={"value/clip_fraction": masked(held_N.to(error_N.dtype), mask_N).sum()})


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """1 - var(returns - values) / var(returns), in float64: 1 where the values say it all, 0 where they say as much as a constant does.

    0 where the returns do not vary, or there are none.
    """
    values_N, returns_N = values_N.double(), returns_N.double()
    if len(returns_N) < 2 or returns_N.max() == returns_N.min():
        return 0.0
    return float(1 - (returns_N - values_N).var() / returns_N.var())
