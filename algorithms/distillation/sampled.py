"""The reverse divergence KL(student || teacher) from sampled tokens alone, as advantages for any policy loss.

With x sampled from the student, grad KL = E[(log student(x) - log teacher(x)) grad log student(x)]: log teacher - log student as an advantage
descends it ("On-Policy Distillation", Thinking Machines, 2025). It is right in expectation and noisy, one number a token where a divergence
over the vocabulary is a whole distribution: on a toy of 50 tokens and a KL of 2 nats, its gradient from 256 answers has a cosine of 0.57 with
the divergence's on the same answers, from 4,096 answers 0.94. It wants more answers a step, or more steps.

A teacher with another tokenizer scores the same text in other tokens. Where both have a boundary at both ends of a span of text, the
span is one action of both, and its log-probability the sum over its tokens. The gradient of the divergence over spans is
E[d(span) grad sum_t log student(token t)]: each of the student's tokens in the span has the advantage of the whole span.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.ratio import as_float


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Which of N student tokens and Q teacher tokens write each of M spans of text.

    Attributes:
        span_N, span_Q: int64, 0..M-1, or -1 for a token that lies in no span. count: M.
    """

    span_N: Tensor
    span_Q: Tensor
    count: int


def sampled_advantages(student_logprobs_N: Tensor, teacher_logprobs_N: Tensor) -> Tensor:
    """log teacher - log student of each sampled token, [N], detached: with these as advantages the expected policy gradient is that
    of -KL(student || teacher) at each token."""
    return (as_float(teacher_logprobs_N) - as_float(student_logprobs_N)).detach()


def span_advantages(student_logprobs_N: Tensor, teacher_logprobs_Q: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """`(advantages_N, share_N)`, detached, 0 outside of spans: log teacher - log student of the token's span, and the token's equal share of it.

    The shares of a span sum to its difference, so they are what is reported. Where every span is one token of both this is `sampled_advantages`,
    bit for bit, twice.

    Example: student tokens "ab", "c" and teacher tokens "a", "bc" write one span with log-probs -1, -2 and -0.5, -0.5: both of the student's
    tokens have the advantage 2, and a share of 1.
    """
    student_N, teacher_Q = as_float(student_logprobs_N).detach(), as_float(teacher_logprobs_Q).detach().to(as_float(student_logprobs_N).dtype)
    inside_N = spans.span_N >= 0
    difference_M = _sums(teacher_Q, spans.span_Q, spans.count) - _sums(student_N, spans.span_N, spans.count)
    size_M = _sums(inside_N.to(student_N.dtype), spans.span_N, spans.count)
    # One more entry, which the tokens outside of spans read, since there may be no span at all.
    place_N = spans.span_N.where(inside_N, spans.count)
    advantages_N = _padded(difference_M, 0.0)[place_N]
    return advantages_N, advantages_N / _padded(size_M, 1.0)[place_N]


def _sums(values: Tensor, span: Tensor, count: int) -> Tensor:
    """Sum over each span, [M]; what stands outside of spans may be NaN."""
    inside = span >= 0
    return values.new_zeros(count).index_add(0, span[inside], values[inside])


def _padded(values_M: Tensor, last: float) -> Tensor:
    return torch.cat([values_M, values_M.new_full((1,), last)])
