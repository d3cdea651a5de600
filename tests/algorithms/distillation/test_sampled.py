"""The sampled form of the reverse divergence: its expected gradient is the analytic one, over tokens and over spans of text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.distillation.sampled import Spans, sampled_advantages, span_advantages

RNG = np.random.default_rng(1)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def numeric_gradient(function, x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    gradient = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


def spans(span_N: list[int], span_Q: list[int], count: int) -> Spans:
    return Spans(span_N=torch.tensor(span_N), span_Q=torch.tensor(span_Q), count=count)


def test_over_tokens_the_expected_gradient_is_that_of_the_reverse_divergence() -> None:
    logits, teacher = RNG.standard_normal(6), log_softmax(RNG.standard_normal(6) * 2)
    student = torch.tensor(logits, requires_grad=True)
    logprobs_V = student.log_softmax(0)
    advantages_V = sampled_advantages(logprobs_V, torch.tensor(teacher))
    (-logprobs_V.detach().exp() * advantages_V * logprobs_V).sum().backward()

    p = np.exp(log_softmax(logits))
    difference = np.log(p) - teacher
    np.testing.assert_allclose(student.grad.numpy(), p * (difference - (p * difference).sum()), atol=1e-14)  # dKL/dz, by hand


def test_over_spans_the_expected_gradient_is_that_of_the_reverse_divergence_of_texts() -> None:
    """The student writes two letters of {a, b}; the teacher has one token for each of the four words."""
    first, second = RNG.standard_normal(2), RNG.standard_normal((2, 2))
    teacher = log_softmax(RNG.standard_normal(4) * 2).reshape(2, 2)

    def divergence(logits: np.ndarray) -> float:
        words = log_softmax(logits[0])[:, None] + log_softmax(logits[1:])
        return float((np.exp(words) * (words - teacher)).sum())

    logits = torch.tensor(np.stack([first, *second]), requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    for i, j in np.ndindex(2, 2):
        logprobs_N = torch.stack([logits[0].log_softmax(0)[i], logits[1 + i].log_softmax(0)[j]])
        advantages_N, _ = span_advantages(logprobs_N, torch.tensor(teacher[i, j])[None], spans([0, 0], [0], 1))
        loss = loss - logprobs_N.sum().exp().detach() * (advantages_N * logprobs_N).sum()
    loss.backward()
    np.testing.assert_allclose(logits.grad.numpy(), numeric_gradient(divergence, logits.detach().numpy()), atol=1e-8)


def test_spans_of_one_token_are_the_plain_form_bit_for_bit() -> None:
    student, teacher = torch.randn(50), torch.randn(50)
    advantages, share = span_advantages(student, teacher, spans(list(range(50)), list(range(50)), 50))
    plain = sampled_advantages(student, teacher)
    assert torch.equal(advantages, plain)
    assert torch.equal(share, plain)


def test_a_span_is_the_sum_over_its_tokens_and_its_shares_sum_to_it() -> None:
    student, teacher = torch.tensor([-1.0, -2.0, -4.0, -8.0]), torch.tensor([-0.5, -0.5, -16.0])
    advantages, share = span_advantages(student, teacher, spans([0, 0, 1, 1], [0, 0, 1], 2))
    assert advantages.tolist() == [2.0, 2.0, -4.0, -4.0]
    assert share.tolist() == [1.0, 1.0, -2.0, -2.0]


@pytest.mark.parametrize("outside", [float("nan"), -torch.inf])
def test_what_lies_outside_of_spans_counts_for_nothing(outside: float) -> None:
    student, teacher = torch.tensor([outside, -1.0, outside]), torch.tensor([-3.0, outside])
    advantages, share = span_advantages(student, teacher, spans([-1, 0, -1], [0, -1], 1))
    assert advantages.tolist() == share.tolist() == [0.0, -2.0, 0.0]


def test_without_spans_nothing_is_taught() -> None:
    advantages, share = span_advantages(torch.zeros(3), torch.zeros(2), spans([-1] * 3, [-1] * 2, 0))
    assert advantages.tolist() == share.tolist() == [0.0] * 3
