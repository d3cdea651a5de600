"""Divergences against sums in float64 NumPy, and the sampled form against the gradient of the exact one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.distillation import full_divergence, sampled_advantages, top_k_forward

RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.standard_normal((3, 6)), RNG.standard_normal((3, 6)) * 2


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


S, T = softmax(STUDENT), softmax(TEACHER)


def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * np.log(p / q)).sum(-1)


MIX = 0.3 * T + 0.7 * S


@pytest.mark.parametrize(("kind", "expected"), [("forward", kl(T, S)), ("reverse", kl(S, T)), ("jensen", 0.3 * kl(T, MIX) + 0.7 * kl(S, MIX))])
def test_divergences_against_numpy(kind, expected) -> None:
    np.testing.assert_allclose(full_divergence(torch.tensor(STUDENT), torch.tensor(TEACHER), kind, beta=0.3).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jensen"])
def test_equal_distributions_have_no_divergence(kind) -> None:
    assert full_divergence(torch.tensor(STUDENT), torch.tensor(STUDENT + 3.0), kind).abs().max() < 1e-12


def test_forward_allows_tokens_that_the_teacher_forbids() -> None:
    teacher = torch.tensor(TEACHER)
    teacher[:, 0] = -torch.inf
    student = torch.tensor(STUDENT, requires_grad=True)
    full_divergence(student, teacher, "forward").sum().backward()
    assert torch.isfinite(student.grad).all()


def test_teacher_receives_no_gradient() -> None:
    teacher = torch.tensor(TEACHER, requires_grad=True)
    full_divergence(torch.tensor(STUDENT, requires_grad=True), teacher, "reverse").sum().backward()
    assert teacher.grad is None


def top_k(k: int) -> np.ndarray:
    index = np.argsort(-T, axis=-1)[:, :k]
    pick = lambda p: torch.tensor(np.log(np.take_along_axis(p, index, -1)))  # noqa: E731
    return top_k_forward(pick(S), pick(T)).numpy()


def test_top_k_of_the_whole_vocabulary_is_the_full_divergence() -> None:
    np.testing.assert_allclose(top_k(6), kl(T, S), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_is_the_divergence_with_the_rest_as_one_outcome(k) -> None:
    index = np.argsort(-T, axis=-1)[:, :k]
    merged = [np.concatenate([np.take_along_axis(p, index, -1), 1 - np.take_along_axis(p, index, -1).sum(-1, keepdims=True)], -1) for p in (T, S)]
    np.testing.assert_allclose(top_k(k), kl(*merged), rtol=1e-12)
    assert (top_k(k) <= kl(T, S)).all()


def test_expected_policy_gradient_of_sampled_advantages_is_that_of_the_reverse_divergence() -> None:
    exact = torch.tensor(STUDENT[:1], requires_grad=True)
    full_divergence(exact, torch.tensor(TEACHER[:1]), "reverse").sum().backward()
    sampled = torch.tensor(STUDENT[0], requires_grad=True)
    logprobs_V = sampled.log_softmax(0)
    advantages_V = sampled_advantages(logprobs_V, torch.tensor(np.log(T[0])))
    (-torch.tensor(S[0]) * advantages_V * logprobs_V).sum().backward()
    np.testing.assert_allclose(sampled.grad.numpy(), exact.grad[0].numpy(), atol=1e-14)
