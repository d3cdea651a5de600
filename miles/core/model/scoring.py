"""Log-probabilities and entropies of given tokens, without ever holding tokens x vocabulary in float32.

The logits of `chunk` tokens exist at a time, in the forward and again, recomputed, in the backward. Where all of them together are
few (`KEPT`), the forward leaves what the backward needs, and nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear

KEPT = 2**22
"""Tokens x vocabulary up to which softmaxes are kept for the backward: 16 MiB in float32."""

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
    4,000 tokens, vocabulary 512: their softmaxes, 8 MB, stay until the backward.

    Args:
        hidden_ND: last hidden states, any float dtype; the softmax is float32 (float64 for float64 hidden states).
        lm_head_weight_VD: the bias-free output projection, in the dtype of `hidden_ND`.
        targets_N: int64 token ids.
        entropy_gradient: False where the entropy is only reported: it then has no gradient, which costs three passes over the logits.
    Returns:
        `(logprobs_N, entropy_N or None)` in float32 (float64), differentiable in hidden states and weight.
    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} cannot be scored: it must be above 0 (tokens chosen greedily are scored at 1)")
    entropy_gradient = entropy and entropy_gradient
    logprobs_N, entropy_N = _Score.apply(hidden_ND, lm_head_weight_VD, targets_N, temperature, chunk, entropy, entropy_gradient, linear)
    return logprobs_N, entropy_N if entropy else None


def softmax_parts(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """`(exp(logits - their maximum) [N, V], log(sum(exp(logits))) [N])`.

    Engines and trainers share it, so that equal logits give equal log-probabilities whatever the number of rows.
    """
    exp_NV, _, normalizer_N = _softmax(logits_NV)
    return exp_NV, normalizer_N


def _softmax(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_parts` with the sums of the exponentials [N] between."""
    if logits_NV.shape[0] == 1:  # the sum of a single row would be split over threads, which rounds differently
        exp_2V, sum_2, normalizer_2 = _softmax(logits_NV.expand(2, -1))
        return exp_2V[:1], sum_2[:1], normalizer_2[:1]
    top_N1 = logits_NV.amax(-1, keepdim=True)
    exp_NV = (logits_NV - top_N1).exp_()
    sum_N = exp_NV.sum(-1)
    return exp_NV, sum_N, sum_N.log().add_(top_N1.squeeze(-1))


def scaled_logits(hidden_ND: Tensor, weight_VD: Tensor, temperature: float, linear: Linear) -> Tensor:
    """`hidden @ weight.T / temperature`, [N, V] in float32 (float64 for float64 hidden states)."""
    logits_NV = linear(hidden_ND, weight_VD)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1 else logits_NV / temperature


class _Score(torch.autograd.Function):
    """With z the scaled logits, e = exp(z - max z), s the sum of e, p = e / s and H the entropy:
    dlogprob/dz = onehot - p = -(e - s onehot) / s and dH/dz = -p (log p + H).

    The factors of a row are applied to hidden states, which are narrower than logits.
    """

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
        sum_N, logprobs_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=dtype) for _ in range(3))
        keep = any(ctx.needs_input_grad) and not entropy_gradient and len(hidden_ND) * len(weight_VD) <= KEPT
        kept = []
        for rows in _chunks(len(hidden_ND), chunk):
            logits_CV = scaled_logits(hidden_ND[rows], weight_VD, temperature, linear)
            exp_CV, sum_C, normalizer_C = _softmax(logits_CV)
            sum_N[rows] = sum_C
            logprobs_N[rows] = logits_CV.gather(1, targets_N[rows, None]).squeeze(1) - normalizer_C
            if entropy:
                # Log-probabilities and not logits: their sum loses nothing to the size of the logits.
                entropy_N[rows] = logits_CV.sub_(normalizer_C[:, None]).mul_(exp_CV).sum(-1).div_(-sum_C)
            if keep:
                kept.append(_difference(exp_CV, sum_C, targets_N[rows]).to(weight_VD.dtype))
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, sum_N, entropy_N, *kept)
        ctx.temperature, ctx.chunk, ctx.linear = temperature, chunk, linear
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, sum_N, entropy_N, *kept = ctx.saved_tensors
        grad_logprobs_N = torch.zeros_like(sum_N) if grads[0] is None else grads[0]
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=sum_N.dtype)
        # dloss/dz = factor x gradient
        factor_N1 = (grad_logprobs_N / sum_N if grads[1] is None else torch.ones_like(sum_N)).div_(-ctx.temperature)[:, None]
        for number, rows in enumerate(_chunks(len(hidden_ND), ctx.chunk)):
            hidden_CD = hidden_ND[rows]
            if kept:
                gradient_CV = kept[number]
            else:
                logits_CV = scaled_logits(hidden_CD, weight_VD, ctx.temperature, ctx.linear)
                exp_CV, sum_C, normalizer_C = _softmax(logits_CV)
                if grads[1] is not None:
                    of_entropy_CV = logits_CV.sub_((normalizer_C - entropy_N[rows])[:, None]).mul_(exp_CV).mul_((grads[1][rows] / sum_C)[:, None])
                gradient_CV = _difference(exp_CV, sum_C, targets_N[rows])
                if grads[1] is not None:
                    gradient_CV.mul_((grad_logprobs_N[rows] / sum_C)[:, None]).add_(of_entropy_CV)
                gradient_CV = gradient_CV.to(weight_VD.dtype)
            grad_hidden_ND[rows] = (gradient_CV @ weight_VD) * factor_N1[rows]
            grad_weight_VD += gradient_CV.T @ (hidden_CD * factor_N1[rows]).to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), *[None] * 6


def _difference(exp_CV: Tensor, sum_C: Tensor, targets_C: Tensor) -> Tensor:
    """`exp - sum x onehot(target)`, in the place of `exp`."""
    return exp_CV.scatter_add_(1, targets_C[:, None], -sum_C[:, None])


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]
