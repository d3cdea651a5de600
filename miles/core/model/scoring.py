"""Log-probabilities and entropies of given tokens, without ever holding tokens x vocabulary.

The logits of `chunk` tokens exist at a time, in the forward and again, recomputed, in the backward. To train on a loss that needs nothing
else of the logits, `miles.core.model.fused_loss` does both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

from miles.core.model.token_softmax import Scores, gradient_rows_, score_rows

Linear = Callable[[Tensor, Tensor], Tensor]
"""`(rows [N, D], weight [V, D]) -> [N, V]`. The plain one, or the one of `miles.core.model.batch_invariant`."""


def score(
    hidden_ND: Tensor,
    lm_head_weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    linear: Linear = plain_linear,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (nats) of each target under `softmax(hidden @ weight.T / temperature)`, and that distribution's entropy.

    Example: 3,000 tokens, vocabulary 150,000, chunk 1,024: at most 1,024 x 150,000 logits exist, 0.6 GB instead of 1.8.

    Args:
        hidden_ND: last hidden states, any float dtype; the softmax is float32 (float64 for float64 hidden states).
        lm_head_weight_VD: the bias-free output projection, in the dtype of `hidden_ND`.
        targets_N: int64 token ids.
        entropy_gradient: False where the entropy is only reported: it then has no gradient, which costs two passes over the logits.
    Returns:
        `(logprobs_N, entropy_N or None)` in float32 (float64), differentiable in hidden states and weight.
    Raises:
        ValueError: the temperature is not positive.
    """
    check_temperature(temperature)
    entropy_gradient = entropy and entropy_gradient
    logprobs_N, entropy_N = _Score.apply(hidden_ND, lm_head_weight_VD, targets_N, temperature, chunk, entropy, entropy_gradient, linear)
    return logprobs_N, entropy_N if entropy else None


def check_temperature(temperature: float) -> None:
    """Raises ValueError for a temperature at which there is no distribution."""
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} cannot be scored: it must be above 0 (tokens chosen greedily are scored at 1)")


def scaled_logits(hidden_ND: Tensor, weight_VD: Tensor, temperature: float, linear: Linear) -> Tensor:
    """`hidden @ weight.T / temperature`, [N, V] in float32 (float64 for float64 hidden states)."""
    logits_NV = linear(hidden_ND, weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1 else logits_NV / temperature


class HeadGradients:
    """Gradients of hidden states and output projection, summed up chunk by chunk from those of the logits.

    Args:
        weight: whether the projection is trained; a frozen one costs neither time nor memory.
    """

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, *, weight: bool = True) -> None:
        self._hidden_ND, self._weight_VD = hidden_ND, weight_VD
        self.hidden_ND = torch.empty_like(hidden_ND)
        # A bfloat16 sum over many chunks would lose the later ones.
        self._weight_sum_VD = torch.zeros_like(weight_VD, dtype=torch.promote_types(weight_VD.dtype, torch.float32)) if weight else None

    def add(self, rows: slice, grad_logits_CV: Tensor) -> None:
        self.hidden_ND[rows] = grad_logits_CV @ self._weight_VD
        total_VD = self._weight_sum_VD
        if total_VD is None:
            return
        if total_VD.dtype == grad_logits_CV.dtype:
            total_VD.addmm_(grad_logits_CV.T, self._hidden_ND[rows])
        else:
            total_VD += grad_logits_CV.T @ self._hidden_ND[rows]

    @property
    def weight_VD(self) -> Tensor | None:
        return None if self._weight_sum_VD is None else self._weight_sum_VD.to(self._weight_VD.dtype)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        entropy_gradient: bool,
        linear: Linear,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N, entropy_N, top_N, sum_N = (hidden_ND.new_empty(len(hidden_ND), dtype=dtype) for _ in range(4))
        for rows in chunks(len(hidden_ND), chunk):
            scores = score_rows(linear(hidden_ND[rows], weight_VD), targets_N[rows], temperature, entropy)
            logprobs_N[rows], top_N[rows], sum_N[rows] = scores.logprobs_C, scores.top_C, scores.sum_C
            if scores.entropy_C is not None:
                entropy_N[rows] = scores.entropy_C
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, entropy_N, top_N, sum_N)
        ctx.temperature, ctx.chunk, ctx.linear = temperature, chunk, linear
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, entropy_N, top_N, sum_N = ctx.saved_tensors
        grad_logprobs_N = torch.zeros_like(sum_N) if grads[0] is None else grads[0]
        found = HeadGradients(hidden_ND, weight_VD, weight=ctx.needs_input_grad[1])
        for rows in chunks(len(hidden_ND), ctx.chunk):
            logits_CV = ctx.linear(hidden_ND[rows], weight_VD)
            # The log-probs themselves are not needed again.
            scores = Scores(logprobs_C=sum_N[rows], entropy_C=entropy_N[rows], top_C=top_N[rows], sum_C=sum_N[rows])
            of_entropy_C = None if grads[1] is None else grads[1][rows]
            found.add(rows, gradient_rows_(logits_CV, targets_N[rows], scores, grad_logprobs_N[rows], of_entropy_C, ctx.temperature))
        return found.hidden_ND, found.weight_VD, *[None] * 6


def chunks(count: int, chunk: int) -> list[slice]:
    """0..count cut into slices of `chunk`, the last one shorter."""
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]
