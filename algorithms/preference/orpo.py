"""Odds-ratio preference optimisation: imitation and preference in one, without a reference model.

    p = exp(mean log-prob of the answer's tokens);  odds = p / (1 - p)
    L = -mean log-prob(w) - weight log sigmoid(log odds(w) - log odds(l))

Hong et al., arXiv 2403.07691, eqs. 4-7.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from algorithms.ratio import as_float


def orpo(chosen_mean_P: Tensor, rejected_mean_P: Tensor, *, weight: float = 0.1) -> Tensor:
    """Losses [P]. Arguments: mean log-prob per token of each answer, [P]."""
    chosen_P, rejected_P = as_float(chosen_mean_P), as_float(rejected_mean_P)
    return -chosen_P - weight * logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))


def _log_odds(mean_P: Tensor) -> Tensor:
    """log p - log(1 - p), with p kept one rounding step below 1."""
    mean_P = mean_P.clamp(max=-torch.finfo(mean_P.dtype).eps)
    return mean_P - torch.log(-torch.expm1(mean_P))
