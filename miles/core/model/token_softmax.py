"""What a chunk of logits says of its targets, and the gradient that a loss on that has, written in the chunk's own place.

With z = logits / temperature, p = softmax(z) and H the entropy of p:
    dlogprob/dz = onehot - p     and     dH/dz = -p (log p + H)

Rows are taken a few at a time, so that what is made of them stays in the CPU's cache and no second chunk exists. On a CUDA device with
Triton the same is done by the kernels of `miles.core.model.triton_softmax`.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CACHED = 2**18
"""Logits that are worked on at a time: 1 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of C targets, each [C] in float32 (float64): log-probabilities and entropies in nats, and what the gradient needs of the softmax:
    the largest scaled logit, and the sum of exp(z - largest). `exponentials`: where the logits were now stands exp(z - largest)."""

    logprobs_C: Tensor
    entropy_C: Tensor | None
    top_C: Tensor
    sum_C: Tensor
    exponentials: bool = False


def softmax_parts(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """`(exp(logits - their maximum) [N, V], log(sum(exp(logits))) [N])`.

    Engines and trainers share it, so that equal logits give equal log-probabilities whatever the number of rows.
    """
    exp_NV, top_N1, sum_N = _exponentials(logits_NV)
    return exp_NV, _normalizer(top_N1.squeeze(-1), sum_N)


def score_rows(logits_CV: Tensor, targets_C: Tensor, temperature: float, entropy: bool, *, last: bool = False) -> Scores:
    """Scores of the targets (int64) under raw logits of any float dtype.

    The logits stay as they are. With `last`, where nobody but `gradient_rows_` reads them again and no gradient of the entropy is wanted,
    their exponentials may take their place, so that they are not computed twice.
    """
    if _on_triton(logits_CV):
        return _triton().score_rows(logits_CV, targets_C, temperature, entropy)
    dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    # A 16-bit place would round the exponentials.
    last = last and logits_CV.dtype == dtype
    logprobs_C, entropy_C, top_C, sum_C = torch.empty(4, len(logits_CV), dtype=dtype, device=logits_CV.device)
    for rows in _blocks(logits_CV):
        z_BV = _scaled(logits_CV[rows], temperature)
        # The target's logit is read before it may be overwritten.
        target_B = z_BV.gather(1, targets_C[rows, None]).squeeze(1)
        exp_BV, top_B1, sum_C[rows] = _exponentials(z_BV, out=logits_CV[rows] if last and not entropy else None)
        top_C[rows] = top_B1.squeeze(-1)
        normalizer_B = _normalizer(top_C[rows], sum_C[rows])
        logprobs_C[rows] = target_B - normalizer_B
        if entropy:
            # Log-probabilities and not logits: their sum loses nothing to the size of the logits.
            entropy_C[rows] = (z_BV - normalizer_B[:, None]).mul_(exp_BV).sum(-1).div_(-sum_C[rows])
            if last:
                logits_CV[rows] = exp_BV
    return Scores(logprobs_C=logprobs_C, entropy_C=entropy_C if entropy else None, top_C=top_C, sum_C=sum_C, exponentials=last)


def gradient_rows_(logits_CV: Tensor, targets_C: Tensor, scores: Scores, grad_logprobs_C: Tensor, grad_entropy_C: Tensor | None, temperature: float) -> Tensor:
    """`grad_logprobs dlogprob/dlogits + grad_entropy dH/dlogits`, in the place of the raw logits that `scores` are of, and in their dtype.

    It is computed in float32 (float64) and rounded once: of a confident token 1 - p is small, and p itself would round to 1.
    Where the logits are a part of the vocabulary and `scores` are of the whole, a target below 0 is one of another part.
    """
    if _on_triton(logits_CV):
        return _triton().gradient_rows_(logits_CV, targets_C, scores, grad_logprobs_C, grad_entropy_C, temperature)
    to_target_C = grad_logprobs_C / temperature
    to_all_C = to_target_C / -scores.sum_C
    here_C, to_here_C = targets_C.clamp(min=0), to_target_C.where(targets_C >= 0, 0.0)
    for rows in _blocks(logits_CV):
        if scores.exponentials:
            assert grad_entropy_C is None
            logits_CV[rows].mul_(to_all_C[rows, None]).scatter_add_(1, here_C[rows, None], to_here_C[rows, None])
            continue
        z_BV = _scaled(logits_CV[rows], temperature)
        exp_BV = z_BV.sub(scores.top_C[rows, None]).exp_()
        if grad_entropy_C is None:
            exp_BV.mul_(to_all_C[rows, None])
        else:
            assert scores.entropy_C is not None
            to_entropy_B = grad_entropy_C[rows] / (-temperature * scores.sum_C[rows])
            # log p + H, then p (grad_entropy (log p + H) + grad_logprobs)
            shift_B = scores.entropy_C[rows] - _normalizer(scores.top_C[rows], scores.sum_C[rows])
            exp_BV.mul_(z_BV.add(shift_B[:, None]).mul_(to_entropy_B[:, None]).add_(to_all_C[rows, None]))
        logits_CV[rows] = exp_BV.scatter_add_(1, here_C[rows, None], to_here_C[rows, None])
    return logits_CV


def _exponentials(logits_NV: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """`exp(logits - top) [N, V]` (in `out`, which may be the logits), `top [N, 1]` and the sums of the exponentials [N]."""
    if logits_NV.shape[0] == 1:  # the sum of a single row would be split over threads, which rounds differently
        exp_2V, top_21, sum_2 = _exponentials(logits_NV.expand(2, -1))
        exp_NV = exp_2V[:1] if out is None else out.copy_(exp_2V[:1])
        return exp_NV, top_21[:1], sum_2[:1]
    top_N1 = logits_NV.amax(-1, keepdim=True)
    exp_NV = torch.sub(logits_NV, top_N1, out=out).exp_()
    return exp_NV, top_N1, exp_NV.sum(-1)


def _normalizer(top_N: Tensor, sum_N: Tensor) -> Tensor:
    return sum_N.log().add_(top_N)


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    return logits_BV if temperature == 1 else logits_BV / temperature


def _blocks(logits_CV: Tensor) -> list[slice]:
    count, vocabulary = logits_CV.shape
    size = count if logits_CV.is_cuda else max(2, _CACHED // vocabulary)
    return [slice(start, start + size) for start in range(0, count, size)] if count else []


def _on_triton(logits_CV: Tensor) -> bool:
    return logits_CV.is_cuda and logits_CV.dtype != torch.float64 and importlib.util.find_spec("triton") is not None


@functools.cache
def _triton() -> Any:
    from miles.core.model import triton_softmax

    return triton_softmax
