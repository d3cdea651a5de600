"""Supervised fine-tuning: the negative log-likelihood of the trained tokens, averaged over the step's tokens.

L = -sum over trained tokens of log pi(t) / tokens                  with weights: -sum of w log pi(t) / sum of w

Weights are a sample's own. A sample of weight 2 counts as if it were there twice, and doubled weights change nothing.
"""

from __future__ import annotations

from algorithms.contracts import Counts, LossOutput, Tokens, masked
from algorithms.ratio import as_float


def nll(tokens: Tokens, counts: Counts) -> LossOutput:
    """A `LossFn`; it reads `logprobs_N` and `mask_N`, and `advantages_N` as weights where `counts.weight` is given. Sums: loss/nll, without weights."""
    nll_N = -masked(as_float(tokens.logprobs_N), tokens.mask_N)
    sums = {"loss/nll": nll_N.detach().sum()}
    if counts.weight is None:
        return LossOutput(loss=nll_N.sum() / max(counts.tokens, 1), sums=sums)
    weight_N = masked(tokens.advantages_N.to(nll_N.dtype), tokens.mask_N)
    return LossOutput(loss=(weight_N * nll_N).sum() / (counts.weight or 1.0), sums=sums)
