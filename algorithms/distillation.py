"""Divergences between a student and a teacher, for distillation.

    forward   KL(teacher || student)            covers all that the teacher does
    reverse   KL(student || teacher)            does only what the teacher does
    jensen    beta KL(t || m) + (1 - beta) KL(s || m),   m = beta t + (1 - beta) s     generalised Jensen-Shannon

GKD, arXiv 2306.13649, section 2 and eq. 1; reverse: MiniLLM, arXiv 2306.08543. Where only the sampled tokens are scored by the
teacher, `sampled_advantages` with any policy loss descends the reverse divergence ("On-Policy Distillation", Thinking Machines, 2025).
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
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + _log(beta, teacher), student + _log(1 - beta, student))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def top_k_forward(student_logprobs_NK: Tensor, teacher_logprobs_NK: Tensor) -> Tensor:
    """KL(teacher || student) over the teacher's K likeliest tokens and one more outcome, "any other", [N].

    It never exceeds the divergence over the whole vocabulary and equals it for K = V, because merging outcomes only loses
    information. Without the last outcome, which a plain sum over K tokens leaves out, a student may move mass there for free.

    Args:
        student_logprobs_NK, teacher_logprobs_NK: float [N, K], normalised over the whole vocabulary, of the same tokens.
    """
    student, teacher = as_float(student_logprobs_NK), as_float(teacher_logprobs_NK.detach())
    return _kl(teacher, student) + _kl(_log_rest(teacher), _log_rest(student))


def sampled_advantages(student_logprobs_N: Tensor, teacher_logprobs_N: Tensor) -> Tensor:
    """log teacher - log student of each sampled token, [N], detached: with these as advantages the expected policy gradient is that
    of -KL(student || teacher) at each token."""
    return (as_float(teacher_logprobs_N) - as_float(student_logprobs_N)).detach()


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Sum over the last axis of p (log p - log q), from log-probs; an outcome of probability 0 adds nothing."""
    impossible = torch.isneginf(p)
    safe_p, safe_q = torch.where(impossible, 0.0, p), torch.where(impossible, 0.0, q)
    return torch.where(impossible, 0.0, safe_p.exp() * (safe_p - safe_q)).sum(-1)


def _log_rest(logprobs_NK: Tensor) -> Tensor:
    """[N, 1]: log of the probability that is left, at least a rounding step."""
    left = 1 - logprobs_NK.exp().sum(-1, keepdim=True)
    return left.clamp(min=torch.finfo(left.dtype).tiny).log()


def _log(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device).log()
