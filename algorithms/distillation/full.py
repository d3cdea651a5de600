"""Divergences between a student and a teacher over the whole vocabulary.

    forward   KL(teacher || student)            covers all that the teacher does
    reverse   KL(student || teacher)            does only what the teacher does
    jensen    beta KL(t || m) + (1 - beta) KL(s || m),   m = beta t + (1 - beta) s     generalised Jensen-Shannon

GKD, arXiv 2306.13649, section 2 and eq. 1; reverse: MiniLLM, arXiv 2306.08543.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algorithms.ratio import as_float

Divergence = Literal["forward", "reverse", "jensen"]


def full_divergence(student_logits_NV: Tensor, teacher_logits_NV: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """The divergence at each token over the whole vocabulary, nats, [N]; gradients reach the student alone. `beta` is jensen's, in (0, 1)."""
    student = as_float(student_logits_NV).log_softmax(-1)
    teacher = as_float(teacher_logits_NV.detach()).log_softmax(-1)
    return divergence(student, teacher, kind, beta)


def divergence(student_logprobs_NO: Tensor, teacher_logprobs_NO: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """As `full_divergence`, [N], from the log-probabilities of the same O outcomes, each row of which sums to 1 as probabilities."""
    student, teacher = student_logprobs_NO, teacher_logprobs_NO.detach()
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + _log(beta, teacher), student + _log(1 - beta, student))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Sum over the last axis of p (log p - log q), from log-probs; an outcome of probability 0 adds nothing."""
    impossible = torch.isneginf(p)
    safe_p, safe_q = torch.where(impossible, 0.0, p), torch.where(impossible, 0.0, q)
    return torch.where(impossible, 0.0, safe_p.exp() * (safe_p - safe_q)).sum(-1)


def _log(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device).log()
