"""Divergences over whole vocabularies against sums in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.distillation.full import full_divergence

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
