"""Log-probabilities and entropies of given tokens, without ever holding tokens x vocabulary in float32.

The logits of `chunk` tokens exist at a time, in the forward and again, recomputed, in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

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
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (nats) of each target under `softmax(hidden @ weight.T / temperature)`, and that distribution's entropy.

    Example: 3,000 tokens, vocabulary 150,000, chunk 1,024: at most 1,024 x 150,000 logits exist, 0.6 GB instead of 1.8.

    Args:
        hidden_ND: last hidden states, any float dtype; the softmax is float32 (float64 for float64 hidden states).
        lm_head_weight_VD: the bias-free output projection, in the dtype of `hidden_ND`.
        targets_N: int64 token ids.
    Returns:
        `(logprobs_N, entropy_N or None)` in float32 (float64), both differentiable in hidden states and weight.
    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} cannot be scored: it must be above 0 (tokens chosen greedily are scored at 1)")
    logprobs_N, entropy_N = _Score.apply(hidden_ND, lm_head_weight_VD, targets_N, temperature, chunk, entropy, linear)
    return logprobs_N, entropy_N if entropy else None


def softmax_parts(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """`(exp(logits - their maximum) [N, V], log(sum(exp(logits))) [N])`.

    Engines and trainers share it, so that equal logits give equal log-probabilities whatever the number of rows.
    """
    if logits_NV.shape[0] == 1:  # the sum of a single row would be split over threads, which rounds differently
        exp_2V, normalizer_2 = softmax_parts(logits_NV.expand(2, -1))
        return exp_2V[:1], normalizer_2[:1]
    top_N1 = logits_NV.amax(-1, keepdim=True)
    exp_NV = (logits_NV - top_N1).exp_()
    return exp_NV, exp_NV.sum(-1).log_().add_(top_N1.squeeze(-1))


def scaled_logits(hidden_ND: Tensor, weight_VD: Tensor, temperature: float, linear: Linear) -> Tensor:
    """`hidden @ weight.T / temperature`, [N, V] in float32 (float64 for float64 hidden states)."""
    logits_NV = linear(hidden_ND, weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1 else logits_NV / temperature


class _Score(torch.autograd.Function):
    """With z the scaled logits, p their softmax and H the entropy: dlogprob/dz = onehot - p and dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, chunk: int, entropy: bool, linear: Linear
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        normalizer_N, logprobs_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=dtype) for _ in range(3))
        for rows in _chunks(len(hidden_ND), chunk):
            logits_CV = scaled_logits(hidden_ND[rows], weight_VD, temperature, linear)
            _, normalizer_C = softmax_parts(logits_CV)
            normalizer_N[rows] = normalizer_C
            logprobs_N[rows] = logits_CV.gather(1, targets_N[rows, None]).squeeze(1) - normalizer_C
            if entropy:
                logprobs_CV = logits_CV.sub_(normalizer_C[:, None])
                entropy_N[rows] = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, normalizer_N, entropy_N)
        ctx.temperature, ctx.chunk, ctx.entropy, ctx.linear = temperature, chunk, entropy, linear
        ctx.set_materialize_grads(True)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs_N, grad_entropy_N = grads
        hidden_ND, weight_VD, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=normalizer_N.dtype)
        for rows in _chunks(len(hidden_ND), ctx.chunk):
            hidden_CD = hidden_ND[rows]
            logprobs_CV = scaled_logits(hidden_CD, weight_VD, ctx.temperature, ctx.linear).sub_(normalizer_N[rows, None])
            probs_CV = logprobs_CV.exp()
            if ctx.entropy:
                scale_CV = logprobs_CV.add_(entropy_N[rows, None]).mul_(grad_entropy_N[rows, None]).add_(grad_logprobs_N[rows, None])
                grad_CV = probs_CV.mul_(scale_CV).neg_()
            else:
                grad_CV = probs_CV.mul_(-grad_logprobs_N[rows, None])
            grad_CV.scatter_add_(1, targets_N[rows, None], grad_logprobs_N[rows, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(weight_VD.dtype)
            grad_hidden_ND[rows] = grad_CV @ weight_VD
            grad_weight_VD += grad_CV.T @ hidden_CD
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None, None, None


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]
