"""Two models' distributions over the vocabulary, compared token by token without ever holding tokens x vocabulary of a whole batch.

The logits of `chunk` tokens of both models exist at a time, in the forward and again, recomputed, in the backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from torch.utils.checkpoint import checkpoint

from miles.core.model.scoring import scaled_logits

Measure = Callable[[Tensor, Tensor], Tensor]
"""`(logits [C, V], other logits [C, V]) -> [C]`, both float32 (float64) and divided by the temperature."""


def compare(hidden_ND: Tensor, weight_VD: Tensor, other_hidden_NE: Tensor, other_weight_VE: Tensor, measure: Measure, temperature: float, chunk: int) -> Tensor:
    """`measure` of each token's two rows of logits, [N] in float32 (float64), differentiable in `hidden_ND` and `weight_VD`.

    Example: 3,000 tokens, vocabulary 150,000, chunk 256: two blocks of 256 x 150,000 logits and what `measure` makes of them exist at once.

    Args:
        hidden_ND, weight_VD: last hidden states and bias-free output projection of one model.
        other_hidden_NE, other_weight_VE: of the other, over the same vocabulary; its width E may differ, and it gets no gradient.
        measure: each row's own; it must not keep what it is given.
    """

    def measured(hidden_CD: Tensor, other_CE: Tensor) -> Tensor:
        other_CV = scaled_logits(other_CE, other_weight_VE, temperature, plain_linear)
        return measure(scaled_logits(hidden_CD, weight_VD, temperature, plain_linear), other_CV)

    # Without tokens one empty chunk remains: the result must hang on the model, or the backward of its shards would not run.
    starts = range(0, max(len(hidden_ND), 1), chunk)
    parts = [checkpoint(measured, hidden_ND[i : i + chunk], other_hidden_NE[i : i + chunk], use_reentrant=False, preserve_rng_state=False) for i in starts]
    return torch.cat(parts)
