"""Importance ratios in float32 (float64 stays float64), with a bounded exponent so that no value and no gradient is ever infinite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from algorithms.contracts import Tokens

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 = 4.9e8. Beyond it the value stays there, and the slope is the value's, as `exp`'s is."""


def as_float(values: Tensor) -> Tensor:
    """float32, unless it is float64 already."""
    return values if values.dtype == torch.float64 else values.float()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp` of the log-ratio clamped to +-MAX_LOG_RATIO, with a gradient beyond the bounds too.

    A plain clamp has slope 0 there, so the token that most needs to be unlearnt (a negative advantage, and the policy has run away
    upwards) would not be trained at all. What is to be held is the clip's to say, not the exponent's. Here the slope is the bounded
    value itself: finite, of the right sign, and no smaller than just inside of the bound.
    """
    return _BoundedExp.apply(log_ratio)


def log_ratio(tokens: Tokens) -> Tensor:
    """log(pi / pi_old) of each token, [N]; carries the gradient of the current policy."""
    return tokens.logprobs_N - tokens.old_logprobs_N


def ratio(tokens: Tokens) -> Tensor:
    """pi / pi_old of each token, [N]; carries the gradient of the current policy."""
    return bounded_exp(log_ratio(tokens))


class _BoundedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor) -> Tensor:
        value = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return gradient[0] * value
