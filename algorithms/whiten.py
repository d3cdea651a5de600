"""Whitening: values less their mean, over their standard deviation, in two passes and float64, so that constants give exactly 0."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.contracts import masked
from algorithms.groups import all_equal


def whiten(values_S: Tensor, weight_S: Tensor, valid_S: Tensor, noise: float = 0.0) -> Tensor:
    """(x - mean) / std over the valid values, each counted `weight_S` times, float64 [S]; 0 where invalid or all are equal.

    Of values that are constant over a sequence, weights of sequence lengths give the statistics over tokens. Values that lie
    within `noise` of each other count as equal: what is left where sums cancel must not be scaled up.
    """
    valid_S = valid_S & (weight_S > 0)
    inside = values_S[valid_S]
    if not len(inside) or inside.max() - inside.min() <= noise or bool(all_equal(values_S, valid_S, torch.zeros_like(weight_S)).all()):
        return torch.zeros(values_S.shape, dtype=torch.float64, device=values_S.device)
    values, weight = masked(values_S.double(), valid_S), masked(weight_S.double(), valid_S)
    centred = masked(values - (weight * values).sum() / weight.sum(), valid_S)
    variance = (weight * centred.square()).sum() / weight.sum()
    return centred / variance.sqrt()
