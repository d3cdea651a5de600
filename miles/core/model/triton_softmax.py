"""`miles.core.model.token_softmax` for CUDA, as two Triton kernels: not measured on a GPU; checked in Triton's interpreter alone.

One program a row. The forward reads the row once, with a running maximum, and writes five numbers; the backward reads it once more and
writes the gradient over it. So a chunk of bfloat16 logits is never held in float32.

To be imported only where Triton is there, and used where CUDA is (or `TRITON_INTERPRET=1`). `scripts/bench/logprobs.py --device cuda` measures it.
The running maximum: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; the entropy's sum is carried alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from miles.core.model.token_softmax import Scores

BLOCK = 4096
"""Logits of a row that are read at a time."""


def score_rows(logits_CV: Tensor, targets_C: Tensor, temperature: float, entropy: bool) -> Scores:
    """As `token_softmax.score_rows`, for float32 and 16-bit logits whose rows are contiguous."""
    assert logits_CV.stride(1) == 1
    logprobs_C, entropy_C, top_C, sum_C = torch.empty(4, len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    if len(logits_CV):
        _score[(len(logits_CV),)](
            logits_CV, targets_C, logprobs_C, entropy_C, top_C, sum_C, logits_CV.stride(0), logits_CV.shape[1], temperature, ENTROPY=entropy, BLOCK=BLOCK
        )
    return Scores(logprobs_C=logprobs_C, entropy_C=entropy_C if entropy else None, top_C=top_C, sum_C=sum_C)


def gradient_rows_(logits_CV: Tensor, targets_C: Tensor, scores: Scores, grad_logprobs_C: Tensor, grad_entropy_C: Tensor | None, temperature: float) -> Tensor:
    """As `token_softmax.gradient_rows_`."""
    assert logits_CV.stride(1) == 1
    unused_C = scores.sum_C
    entropy_C, of_entropy_C = (unused_C, unused_C) if grad_entropy_C is None or scores.entropy_C is None else (scores.entropy_C, grad_entropy_C.contiguous())
    if len(logits_CV):
        _gradient[(len(logits_CV),)](
            logits_CV,
            targets_C,
            scores.top_C,
            scores.sum_C,
            entropy_C,
            grad_logprobs_C.contiguous(),
            of_entropy_C,
            logits_CV.stride(0),
            logits_CV.shape[1],
            temperature,
            ENTROPY=of_entropy_C is not unused_C,
            BLOCK=BLOCK,
        )
    return logits_CV


@triton.jit
def _score(logits, targets, logprobs, entropies, tops, sums, stride, vocabulary, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)  # sum of exp(z - top) (z - top)
    for first in range(0, vocabulary, BLOCK):
        place = first + tl.arange(0, BLOCK)
        z = tl.load(start + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(top, tl.max(z, 0))
        # Of the first block there is nothing to carry over, and -inf less -inf would be NaN.
        moved = tl.where(total > 0, top - higher, 0.0)
        keep = tl.exp(moved)
        below = tl.where(place < vocabulary, z - higher, 0.0)
        exp = tl.where(place < vocabulary, tl.exp(below), 0.0)
        if ENTROPY:
            weighted = keep * (weighted + moved * total) + tl.sum(exp * below, 0)
        total = keep * total + tl.sum(exp, 0)
        top = higher
    target = tl.load(start + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, target - (tl.log(total) + top))
    tl.store(tops + row, top)
    tl.store(sums + row, total)
    if ENTROPY:
        tl.store(entropies + row, tl.log(total) - weighted / total)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, targets, tops, sums, entropies, grad_logprobs, grad_entropies, stride, vocabulary, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target, top, total = tl.load(targets + row), tl.load(tops + row), tl.load(sums + row)
    of_logprob = tl.load(grad_logprobs + row) / temperature
    for first in range(0, vocabulary, BLOCK):
        place = first + tl.arange(0, BLOCK)
        below = tl.load(start + place, mask=place < vocabulary, other=0.0).to(tl.float32) / temperature - top
        p = tl.exp(below) / total
        gradient = of_logprob * (tl.where(place == target, 1.0, 0.0) - p)
        if ENTROPY:
            of_entropy = tl.load(grad_entropies + row) / temperature
            gradient -= of_entropy * p * (below - tl.log(total) + tl.load(entropies + row))
        tl.store(start + place, gradient.to(logits.dtype.element_ty), mask=place < vocabulary)
