"""Supervised fine-tuning: the negative log-likelihood of the trained tokens, averaged over the step's tokens.

L = -sum over trained tokens of log pi(t) / tokens
"""

from __future__ import annotations

from algorithms.contracts import Counts, LossOutput, Tokens, masked
from algorithms.ratio import as_float


def nll(tokens: Tokens, counts: Counts) -> LossOutput:
    """A `LossFn`; it reads `logprobs_N` and `mask_N` alone. Sums: loss/nll."""
    total = -masked(as_float(tokens.logprobs_N), tokens.mask_N).sum()
    return LossOutput(loss=total / max(counts.tokens, 1), sums={"loss/nll": total.detach()})
