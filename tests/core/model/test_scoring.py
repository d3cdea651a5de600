"""Chunked log-probs and entropies against log_softmax over everything at once."""

from __future__ import annotations

import pytest
import torch

from miles.core.model.scoring import score
from miles.core.model.token_softmax import softmax_parts

N, D, V = 37, 16, 301


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(N, D, dtype=dtype, requires_grad=True), torch.randn(V, D, dtype=dtype, requires_grad=True)
    return hidden_ND, weight_VD, torch.randint(0, V, (N,))


@pytest.mark.parametrize("chunk", [1, 10, 37, 1000])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_do_not_depend_on_the_chunk(chunk: int, entropy: bool) -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    upstream_N = torch.randn(N, dtype=torch.float64)

    every_NV = torch.log_softmax(hidden_ND @ weight_VD.T / 0.6, -1)
    expected = every_NV.gather(1, targets_N[:, None])[:, 0], -(every_NV.exp() * every_NV).sum(-1)
    loss = expected[0] @ upstream_N + (expected[1] @ upstream_N.cos() if entropy else 0)
    expected_grads = torch.autograd.grad(loss, (hidden_ND, weight_VD))

    logprobs_N, entropy_N = score(hidden_ND, weight_VD, targets_N, 0.6, chunk, entropy)
    loss = logprobs_N @ upstream_N + (entropy_N @ upstream_N.cos() if entropy_N is not None else 0)
    grads = torch.autograd.grad(loss, (hidden_ND, weight_VD))

    assert torch.allclose(logprobs_N, expected[0], atol=1e-12)
    assert entropy_N is None if not entropy else torch.allclose(entropy_N, expected[1], atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(grads, expected_grads, strict=True))


def test_the_softmax_of_a_bfloat16_model_is_float32() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.bfloat16)
    logprobs_N, _ = score(hidden_ND, weight_VD, targets_N, 1.0, 16)
    logprobs_N.sum().backward()
    every_NV = torch.log_softmax((hidden_ND @ weight_VD.T).float(), -1)
    assert logprobs_N.dtype == torch.float32
    assert torch.allclose(logprobs_N, every_NV.gather(1, targets_N[:, None])[:, 0], atol=1e-5)
    assert hidden_ND.grad is not None
    assert hidden_ND.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunk", [1, 10, 37, 1000])
def test_a_reported_entropy_has_no_gradient_and_changes_none(chunk: int) -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    upstream_N = torch.randn(N, dtype=torch.float64)
    every_NV = torch.log_softmax(hidden_ND @ weight_VD.T / 0.6, -1)
    expected = torch.autograd.grad(every_NV.gather(1, targets_N[:, None])[:, 0] @ upstream_N, (hidden_ND, weight_VD))

    logprobs_N, entropy_N = score(hidden_ND, weight_VD, targets_N, 0.6, chunk, entropy=True, entropy_gradient=False)
    assert entropy_N is not None
    assert not entropy_N.requires_grad
    assert torch.allclose(entropy_N, -(every_NV.exp() * every_NV).sum(-1), atol=1e-12)
    grads = torch.autograd.grad(logprobs_N @ upstream_N, (hidden_ND, weight_VD))
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(grads, expected, strict=True))


def test_no_softmax_is_kept() -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        score(hidden_ND, weight_VD, targets_N, 1.0, 8, entropy=True)
        score(hidden_ND.detach(), weight_VD.detach(), targets_N, 1.0, 8)
    assert max(sizes) <= max(N * D, V * D)


def test_a_confident_token_of_a_bfloat16_model_keeps_its_small_gradient() -> None:
    # Probability 0.99: 1 - p would be lost if p itself were rounded to bfloat16.
    weight_VD = torch.eye(8, dtype=torch.bfloat16)
    hidden_ND = torch.zeros(1, 8, dtype=torch.bfloat16)
    hidden_ND[0, 3] = 6.5
    logits_NV = hidden_ND.double().requires_grad_()
    expected = torch.autograd.grad(torch.log_softmax(logits_NV, -1)[0, 3], logits_NV)[0]
    hidden_ND.requires_grad_()
    logprobs_N, _ = score(hidden_ND, weight_VD, torch.tensor([3]), 1.0, 8)
    (found,) = torch.autograd.grad(logprobs_N.sum(), hidden_ND)
    assert torch.allclose(found.double(), expected, rtol=0.02)


def test_a_target_of_probability_zero_leaves_everything_finite() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.float32)
    with torch.no_grad():
        hidden_ND[3] *= 1e4
        targets_N[3] = int((hidden_ND[3] @ weight_VD.T).argmin())
    logprobs_N, entropy_N = score(hidden_ND, weight_VD, targets_N, 1.0, 8, entropy=True)
    assert torch.isfinite(logprobs_N).all()
    assert entropy_N is not None
    assert torch.isfinite(entropy_N).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        score(*inputs(), temperature, 8)


@pytest.mark.parametrize("vocabulary", [7, 101, 512, 50_000])
def test_a_row_has_the_same_normaliser_alone_and_among_others(vocabulary: int) -> None:
    logits_NV = torch.randn(40, vocabulary) * 5
    together = softmax_parts(logits_NV)
    for count in (1, 2, 3, 17):
        part = softmax_parts(logits_NV[5 : 5 + count])
        assert all(torch.equal(a, b[5 : 5 + count]) for a, b in zip(part, together, strict=True))
