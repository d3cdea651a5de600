"""A model's distribution over the vocabulary, compared token by token without ever holding tokens x vocabulary of a whole batch.

The logits of `chunk` tokens exist at a time, in the forward and again, recomputed, in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from torch.utils.checkpoint import checkpoint

from miles.core.model.scoring import scaled_logits

Measure = Callable[..., Tensor]
"""`(logits [C, V], what stands beside those C tokens ...) -> [C]`; logits are float32 (float64) and divided by the temperature."""


def compare(hidden_ND: Tensor, weight_VD: Tensor, measure: Measure, beside: Sequence[Tensor], temperature: float, chunk: int) -> Tensor:
    """`measure` of each token's logits and what they are compared with, [N] in float32 (float64), differentiable in `hidden_ND` and `weight_VD`.

    Example: 3,000 tokens, vocabulary 150,000, chunk 256, beside them another model's hidden states, of which `measure` makes logits: two
    blocks of 256 x 150,000 and what `measure` makes of them exist at once.

    Args:
        hidden_ND, weight_VD: last hidden states and bias-free output projection.
        measure: each row's own; it must not keep what it is given.
        beside: tensors [N, ...], without gradient.
    """

    def measured(hidden_CD: Tensor, *beside_C: Tensor) -> Tensor:
        return measure(scaled_logits(hidden_CD, weight_VD, temperature, plain_linear), *beside_C)

    # Without tokens one empty chunk remains: the result must hang on the model, or the backward of its shards would not run.
    rows = [slice(start, start + chunk) for start in range(0, max(len(hidden_ND), 1), chunk)]
    parts = [checkpoint(measured, hidden_ND[r], *(values[r] for values in beside), use_reentrant=False, preserve_rng_state=False) for r in rows]
    return torch.cat(parts)
