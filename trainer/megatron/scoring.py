"""Log-probabilities and entropies where each tensor rank has a part of the vocabulary: no rank ever sees a whole row of logits.

As `miles.core.model.scoring`, the logits of `chunk` tokens exist at a time, in the forward and again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, pad

from miles.core.model.scoring import HeadGradients, check_temperature, chunks
from miles.core.model.token_softmax import Scores, gradient_rows_, score_rows
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
    """Each rank scores its part of the vocabulary as if it were all; `_merged` says what follows for the whole."""

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
        here_N = targets_N - first
        here_N = here_N.where((here_N >= 0) & (here_N < own), -1)
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N, entropy_N, top_N, sum_N = (hidden_ND.new_empty(len(hidden_ND), dtype=dtype) for _ in range(4))
        for rows in chunks(len(hidden_ND), chunk):
            scores = _merged(_scores(hidden_ND[rows], weight_WD[:own], here_N[rows], temperature, entropy), here_N[rows] >= 0, group)
            logprobs_N[rows], top_N[rows], sum_N[rows] = scores.logprobs_C, scores.top_C, scores.sum_C
            if scores.entropy_C is not None:
                entropy_N[rows] = scores.entropy_C
        ctx.save_for_backward(hidden_ND, weight_WD, here_N, entropy_N, top_N, sum_N)
        ctx.own, ctx.temperature, ctx.chunk, ctx.group = own, temperature, chunk, group
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_WD, here_N, entropy_N, top_N, sum_N = ctx.saved_tensors
        weight_VD = weight_WD[: ctx.own]
        grad_logprobs_N = torch.zeros_like(sum_N) if grads[0] is None else grads[0]
        found = HeadGradients(hidden_ND, weight_VD)
        for rows in chunks(len(hidden_ND), ctx.chunk):
            logits_CV = linear(hidden_ND[rows], weight_VD)
            # The log-probs themselves are not needed again.
            scores = Scores(logprobs_C=sum_N[rows], entropy_C=entropy_N[rows], top_C=top_N[rows], sum_C=sum_N[rows])
            of_entropy_C = None if grads[1] is None else grads[1][rows]
            if ctx.own:
                logits_CV = gradient_rows_(logits_CV, here_N[rows], scores, grad_logprobs_N[rows], of_entropy_C, ctx.temperature)
            found.add(rows, logits_CV)
        assert found.weight_VD is not None
        return summed(found.hidden_ND, ctx.group), pad(found.weight_VD, (0, 0, 0, len(weight_WD) - ctx.own)), *[None] * 8


def _scores(hidden_CD: Tensor, weight_VD: Tensor, here_C: Tensor, temperature: float, entropy: bool) -> Scores:
    """Within this part of the vocabulary, which may have no token at all."""
    if len(weight_VD):
        return score_rows(linear(hidden_CD, weight_VD), here_C.clamp(min=0), temperature, entropy)
    zero_C = hidden_CD.new_zeros(len(hidden_CD), dtype=torch.promote_types(hidden_CD.dtype, torch.float32))
    return Scores(logprobs_C=zero_C, entropy_C=zero_C if entropy else None, top_C=torch.full_like(zero_C, -torch.inf), sum_C=zero_C)


def _merged(part: Scores, has_C: Tensor, group: dist.ProcessGroup) -> Scores:
    """Scores in the whole vocabulary. With w the share of the probability that a part has, log p = log p_part + log w, and
    H = sum over parts of w (H_part - log w)."""
    if group.size() == 1:
        return part
    top_C = part.top_C.clone()
    dist.all_reduce(top_C, dist.ReduceOp.MAX, group)
    shrunk_C = part.sum_C * (part.top_C - top_C).exp()
    sum_C = summed(shrunk_C.clone(), group)
    weight_C = shrunk_C / sum_C
    # Not the log of the weight, which is 0 where a part is far less probable than another.
    log_weight_C = part.sum_C.log() - sum_C.log() + (part.top_C - top_C)
    found = [(part.logprobs_C + log_weight_C).where(has_C, 0.0)]
    if part.entropy_C is not None:
        found.append(weight_C * part.entropy_C - torch.special.xlogy(weight_C, weight_C))
    logprobs_C, *entropy_C = summed(torch.stack(found), group)
    return Scores(logprobs_C=logprobs_C, entropy_C=entropy_C[0] if entropy_C else None, top_C=top_C, sum_C=sum_C)
