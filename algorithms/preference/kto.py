"""Kahneman-Tversky optimisation: single answers, each marked good or bad, no pairs.

    r = log pi(y) - log ref(y);   L = lambda_D (1 - sigmoid(beta (r - z)))  for a good answer,  lambda_U (1 - sigmoid(beta (z - r)))  for a bad one

Ethayarajh et al., arXiv 2402.01306, eq. 8. z, the point of reference, is the policy's KL to the reference model, never negative and
without gradient; the paper estimates it by the mean log-ratio of answers paired with other prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.ratio import as_float


def kto(logprobs_S: Tensor, reference_S: Tensor, good_S: Tensor, kl: Tensor, *, beta: float = 0.1, good_weight: float = 1.0, bad_weight: float = 1.0) -> Tensor:
    """Losses [S].

    Args:
        logprobs_S, reference_S: log-probs of whole answers [S]. good_S: bool [S].
        kl: scalar estimate of KL(policy || reference) in nats, over the whole step.
    """
    moved_S = beta * (as_float(logprobs_S) - as_float(reference_S) - as_float(kl).detach().clamp(min=0))
    good, bad = good_weight * torch.sigmoid(-moved_S), bad_weight * torch.sigmoid(moved_S)
    return torch.where(good_S, good, bad)
