"""Token losses -> one scalar, by global counts, so that micro-batch losses of one step add up to the step's loss.

    token_mean             sum over tokens / tokens                              DAPO (arXiv 2503.14476, eq. 8)
    sequence_mean          sum over sequences of (mean over tokens) / sequences  GRPO (arXiv 2402.03300, eq. 3)
    sequence_sum_constant  sum over tokens / (sequences * max_tokens)            Dr.GRPO (arXiv 2503.20783, section 3.2)

Example: 100 tokens of loss 2.0 and 900 of loss 0.5 give (200 + 450) / 1000 = 0.65 with token_mean, however they are split.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algorithms.contracts import Counts, Tokens, masked

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum_constant"]


def aggregate(loss_N: Tensor, tokens: Tokens, counts: Counts, how: Aggregation) -> Tensor:
    """This micro-batch's share of the step's loss: a scalar, 0 when nothing is trained.

    Args:
        loss_N: float [N]; masked places may hold anything.
        counts: of the whole step. All zero means an empty step, whose loss is 0.
    """
    loss_N = masked(loss_N, tokens.mask_N)
    sequences = max(counts.sequences, 1)
    if how == "token_mean":
        return loss_N.sum() / max(counts.tokens, 1)
    if how == "sequence_mean":
        length_N = tokens.sequence_length_S.clamp(min=1)[tokens.sequence_N]
        return (loss_N / length_N).sum() / sequences
    return loss_N.sum() / (sequences * counts.max_tokens)


def sequence_sum(values_N: Tensor, tokens: Tokens) -> Tensor:
    """Sum over the trained tokens of each sequence, [S]; carries gradients."""
    zeros_S = torch.zeros(tokens.num_sequences, dtype=values_N.dtype, device=values_N.device)
    return zeros_S.index_add(0, tokens.sequence_N, masked(values_N, tokens.mask_N))


def sequence_average(values_N: Tensor, tokens: Tokens) -> Tensor:
    """Mean over the trained tokens of each sequence, [S]; 0 for a sequence without any. Carries gradients."""
    return sequence_sum(values_N, tokens) / tokens.sequence_length_S.clamp(min=1)
