"""Activations in 8 bits: float8 e4m3 (arXiv 2209.05433) without a scale, 1 sign, 4 exponent and 3 mantissa bits, up to 448."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0


def compress(tensor: Tensor) -> Tensor | None:
    """`tensor` in float8 e4m3; None where a value is larger than that has, or no number."""
    if not tensor.numel():
        return tensor.to(torch.float8_e4m3fn)
    low, high = torch.aminmax(tensor)
    # One wait of the host for both; NaN fails the comparison too.
    return tensor.to(torch.float8_e4m3fn) if bool((low >= -LARGEST) & (high <= LARGEST)) else None


def restore(compressed: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of each byte, exactly, in `dtype`."""
    if compressed.device.type != "cpu":
        return compressed.to(dtype)
    # torch converts one by one on CPUs. The same bits, laid into float16, are 2^-8 of the number, subnormal ones too.
    half = compressed.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_REST)
    return half.view(torch.float16).to(dtype).mul_(256)


_SIGN_AND_REST = -0x8000 | 0x3F80
