"""Divergences where the teacher tells its K likeliest tokens alone: those and one more outcome, "any other".

Merging outcomes only loses information, so such a divergence never exceeds that over the whole vocabulary, and equals it for K = V.
Without the last outcome, which a plain sum over K tokens leaves out, a student may move mass there for free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.distillation.full import Divergence, divergence
from algorithms.ratio import as_float


def top_k_divergence(student_logits_NV: Tensor, top_ids_NK: Tensor, top_logprobs_NK: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """The divergence at each token over K + 1 outcomes, nats, [N]; gradients reach the student alone.

    Example: a teacher with top_ids [5, 2] and log-probs of [0.6, 0.3], and a student with probabilities 0.5 and 0.1 there, are compared
    as [0.6, 0.3, 0.1] and [0.5, 0.1, 0.4].

    Args:
        top_ids_NK: int64, distinct in each row. top_logprobs_NK: float, of the teacher, normalised over the whole vocabulary.
        kind, beta: as in `full_divergence`.
    """
    student_NV = as_float(student_logits_NV)
    top_logprobs_NK = top_logprobs_NK.detach()
    teacher_NK = as_float(top_logprobs_NK).to(student_NV.dtype)
    normalizer_N1 = student_NV.logsumexp(-1, keepdim=True)
    student_NK = student_NV.gather(-1, top_ids_NK) - normalizer_N1
    if top_ids_NK.shape[-1] == student_NV.shape[-1]:
        return divergence(student_NK, teacher_NK, kind, beta)
    # The student's rest from its own logits: one minus a sum would lose a small rest to rounding.
    student_rest_N1 = student_NV.scatter(-1, top_ids_NK, -torch.inf).logsumexp(-1, keepdim=True) - normalizer_N1
    student, teacher = torch.cat([student_NK, student_rest_N1], -1), torch.cat([teacher_NK, _log_rest(teacher_NK, top_logprobs_NK.dtype)], -1)
    return divergence(student, teacher, kind, beta)


def _log_rest(logprobs_NK: Tensor, told: torch.dtype) -> Tensor:
    """[N, 1]: log of the probability that is left. A rest below the rounding of what was told in dtype `told` cannot be known."""
    left_N1 = 1 - logprobs_NK.exp().sum(-1, keepdim=True)
    return left_N1.clamp(min=torch.finfo(told).eps).log()
