"""Importance ratios in float32 (float64 stays float64), with a bounded exponent so that no value is ever infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.contracts import Tokens

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 = 4.9e8. Beyond it the gradient is 0: such a token tells nothing but that the policies have parted."""


def as_float(values: Tensor) -> Tensor:
    """float32, unless it is float64 already."""
    return values if values.dtype == torch.float64 else values.float()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp` of the log-ratio clamped to +-MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def log_ratio(tokens: Tokens) -> Tensor:
    """log(pi / pi_old) of each token, [N]; carries the gradient of the current policy."""
    return tokens.logprobs_N - tokens.old_logprobs_N


def ratio(tokens: Tokens) -> Tensor:
    """pi / pi_old of each token, [N]; carries the gradient of the current policy."""
    return bounded_exp(log_ratio(tokens))
