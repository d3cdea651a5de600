"""Log-probabilities and entropies where each tensor rank has a part of the vocabulary: no rank ever sees a whole row of logits.

As `miles.core.model.scoring`, the logits of `chunk` tokens exist at a time, in the forward and again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles.core.model.scoring import check_temperature, chunks, scaled_logits
from trainer.megatron.mesh import Mesh, summed


def score_parallel(
    hidden_ND: Tensor,
    weight_WD: Tensor,
    targets_N: Tensor,
    *,
    mesh: Mesh,
    vocabulary: int,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`miles.core.model.scoring.score` over the tensor ranks of `mesh`: equal on each of them. Collective, in the backward as well.

    Args:
        weight_WD: this rank's W rows of the output projection; rows from `vocabulary` on are padding and no token's.
    Raises:
        ValueError: the temperature is not positive.
    """
    check_temperature(temperature)
    first = mesh.place.tensor * len(weight_WD)
    own = max(0, min(len(weight_WD), vocabulary - first))
    arguments = (hidden_ND, weight_WD, targets_N, first, own, temperature, chunk, entropy, entropy and entropy_gradient, mesh.tensor)
    logprobs_N, entropy_N = _ScoreParallel.apply(*arguments)
    return logprobs_N, entropy_N if entropy else None


class _ScoreParallel(torch.autograd.Function):
    """With z the scaled logits, p their softmax over all ranks and H its entropy: dlogprob/dz = onehot - p, dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_WD: Tensor,
        targets_N: Tensor,
        first: int,
        own: int,
        temperature: float,
        chunk: int,
        entropy: bool,
        entropy_gradient: bool,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N, normalizer_N, entropy_N = (hidden_ND.new_empty(len(hidden_ND), dtype=dtype) for _ in range(3))
        for rows in chunks(len(hidden_ND), chunk):
            logits_CV = scaled_logits(hidden_ND[rows], weight_WD[:own], temperature, torch.nn.functional.linear)
            top_C = logits_CV.amax(-1) if own else logits_CV.new_full((len(logits_CV),), -torch.inf)
            if group.size() > 1:
                dist.all_reduce(top_C, dist.ReduceOp.MAX, group)
            logits_CV = logits_CV - top_C[:, None]
            exp_CV = logits_CV.exp()
            here_CV, has_C = _local(targets_N[rows], first, own)
            target_C = (logits_CV.gather(1, here_CV).squeeze(1) if own else torch.zeros_like(top_C)).where(has_C, 0.0)
            sum_C, target_C, energy_C = summed(torch.stack((exp_CV.sum(-1), target_C, (exp_CV * logits_CV).sum(-1))), group)
            log_C = sum_C.log()
            logprobs_N[rows] = target_C - log_C
            normalizer_N[rows] = log_C + top_C
            if entropy:
                entropy_N[rows] = log_C - energy_C / sum_C
        ctx.save_for_backward(hidden_ND, weight_WD, targets_N, normalizer_N, entropy_N)
        ctx.first, ctx.own, ctx.temperature, ctx.chunk, ctx.group = first, own, temperature, chunk, group
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_WD, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        grad_logprobs_N = torch.zeros_like(normalizer_N) if grads[0] is None else grads[0]
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        grad_weight_WD = torch.zeros_like(weight_WD, dtype=normalizer_N.dtype)
        weight_VD = weight_WD[: ctx.own]
        for rows in chunks(len(hidden_ND), ctx.chunk) if ctx.own else []:
            logprobs_CV = scaled_logits(hidden_ND[rows], weight_VD, ctx.temperature, torch.nn.functional.linear) - normalizer_N[rows, None]
            softmax_CV = logprobs_CV.exp()
            factor_C = grad_logprobs_N[rows]
            gradient_CV = softmax_CV * -factor_C[:, None]
            here_CV, has_C = _local(targets_N[rows], ctx.first, ctx.own)
            gradient_CV.scatter_add_(1, here_CV, factor_C.where(has_C, 0.0)[:, None])
            if grads[1] is not None:
                gradient_CV -= softmax_CV * (logprobs_CV + entropy_N[rows, None]) * grads[1][rows, None]
            gradient_CV = (gradient_CV / ctx.temperature).to(weight_VD.dtype)
            grad_hidden_ND[rows] = gradient_CV @ weight_VD
            grad_weight_WD[: ctx.own] += gradient_CV.T @ hidden_ND[rows]
        return summed(grad_hidden_ND, ctx.group), grad_weight_WD.to(weight_WD.dtype), *[None] * 8


def _local(targets_C: Tensor, first: int, own: int) -> tuple[Tensor, Tensor]:
    """Each target's column here [C, 1], 0 where it is another rank's, and whether it is here [C]."""
    columns_C = targets_C - first
    has_C = (columns_C >= 0) & (columns_C < own)
    return columns_C.where(has_C, 0)[:, None], has_C
