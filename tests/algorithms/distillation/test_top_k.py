"""Divergences over the teacher's likeliest tokens and one outcome for the rest, against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.distillation.full import full_divergence
from algorithms.distillation.top_k import top_k_divergence

RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.standard_normal((3, 6)), RNG.standard_normal((3, 6)) * 2
KINDS = ["forward", "reverse", "jensen"]
BETA = 0.3


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


S, T = softmax(STUDENT), softmax(TEACHER)


def likeliest(k: int) -> np.ndarray:
    return np.argsort(-T, axis=-1)[:, :k]


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(-1)


def merged(p: np.ndarray, k: int) -> np.ndarray:
    kept = np.take_along_axis(p, likeliest(k), -1)
    return np.concatenate([kept, 1 - kept.sum(-1, keepdims=True)], -1)


def by_definition(s: np.ndarray, t: np.ndarray, kind: str) -> np.ndarray:
    m = BETA * t + (1 - BETA) * s
    return {"forward": kl(t, s), "reverse": kl(s, t), "jensen": BETA * kl(t, m) + (1 - BETA) * kl(s, m)}[kind]


def found(k: int, kind: str, student: torch.Tensor | None = None) -> torch.Tensor:
    logprobs = torch.tensor(np.log(np.take_along_axis(T, likeliest(k), -1)))
    return top_k_divergence(torch.tensor(STUDENT) if student is None else student, torch.tensor(likeliest(k)), logprobs, kind, BETA)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_rest_is_one_outcome(k: int, kind: str) -> None:
    np.testing.assert_allclose(found(k, kind).numpy(), by_definition(merged(S, k), merged(T, k), kind), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_are_the_whole_vocabulary(kind: str) -> None:
    np.testing.assert_allclose(found(6, kind).numpy(), by_definition(S, T, kind), rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_it_grows_with_k_and_never_exceeds_the_whole(kind: str) -> None:
    grown = np.stack([found(k, kind).numpy() for k in range(1, 7)])
    assert (np.diff(grown, axis=0) >= -1e-12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_against_finite_differences(kind: str) -> None:
    student = torch.tensor(STUDENT, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: found(3, kind, s), (student,))


@pytest.mark.parametrize("kind", KINDS)
def test_of_all_tokens_the_gradient_is_that_of_the_whole_vocabulary(kind: str) -> None:
    merged_logits, whole_logits = (torch.tensor(STUDENT, requires_grad=True) for _ in range(2))
    found(6, kind, merged_logits).sum().backward()
    full_divergence(whole_logits, torch.tensor(TEACHER), kind, BETA).sum().backward()
    np.testing.assert_allclose(merged_logits.grad.numpy(), whole_logits.grad.numpy(), atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_leaves_nothing_to_others_is_finite(kind: str) -> None:
    """In float32 the two log-probs sum to 1, or to a little more."""
    student = torch.randn(4, 6, requires_grad=True)
    logprobs = torch.tensor([[0.7, 0.3]]).log().expand(4, 2) + 1e-7
    value = top_k_divergence(student * 30, torch.tensor([[0, 3]]).expand(4, 2), logprobs, kind, BETA)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(student.grad).all()
