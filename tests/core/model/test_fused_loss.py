"""The fused loss against autograd over whole logits, in float64, and what it keeps for the backward and allocates at all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from miles.core.model import batch_invariant
from miles.core.model.fused_loss import even_parts, fused_loss, whole_parts
from miles.core.model.scoring import score
from miles.core.model.token_softmax import gradient_rows_, score_rows

N, D, V = 37, 16, 301
LENGTHS = [5, 9, 0, 12, 11]  # of the sequences that the N tokens are


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(N, D, dtype=dtype, requires_grad=True), torch.randn(V, D, dtype=dtype, requires_grad=True)
    return hidden_ND, weight_VD, torch.randint(0, V, (N,))


def whole(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    every_NV = torch.log_softmax(hidden_ND @ weight_VD.T / temperature, -1)
    return every_NV.gather(1, targets_N[:, None])[:, 0], -(every_NV.exp() * every_NV).sum(-1)


def of_sequences(logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
    """A loss that no token knows alone: squares of a sequence's sums."""
    return logprobs_N.sum().square() / 50 + (0 if entropy_N is None else entropy_N.sum().square() / 30)


def of_tokens(part: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
    weights_N = torch.linspace(-1, 1, N, dtype=logprobs_N.dtype)[part]
    return (weights_N * logprobs_N.exp()).sum() + (0 if entropy_N is None else (weights_N * entropy_N.sin()).sum())


def sequence_parts(chunk: int) -> list[slice]:
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    return [slice(ends[group[0]], ends[group[-1] + 1]) for group in whole_parts(LENGTHS, chunk)]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int, entropy: bool) -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    logprobs_N, entropy_N = whole(hidden_ND, weight_VD, targets_N, 0.6)
    expected = of_tokens(slice(0, N), logprobs_N, entropy_N if entropy else None)
    expected_grads = torch.autograd.grad(expected, (hidden_ND, weight_VD))
    found = fused_loss(hidden_ND, weight_VD, targets_N, of_tokens, even_parts(N, chunk), temperature=0.6, chunk=chunk, entropy=entropy)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    for grad, expected_grad in zip(torch.autograd.grad(3 * found, (hidden_ND, weight_VD)), expected_grads, strict=True):
        assert (grad - 3 * expected_grad).abs().max() < 1e-12 * (3 * expected_grad).abs().max()


@pytest.mark.parametrize("scale", [1.0, 3.0])  # times 1 the gradient is passed on as it is
def test_a_scaled_loss_has_scaled_gradients(scale: float) -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    expected = torch.autograd.grad(scale * of_tokens(slice(0, N), *whole(hidden_ND, weight_VD, targets_N)), (hidden_ND, weight_VD))
    found = fused_loss(hidden_ND, weight_VD, targets_N, of_tokens, even_parts(N, 9), temperature=1.0, chunk=9, entropy=True)
    for grad, expected_grad in zip(torch.autograd.grad(found, (hidden_ND, weight_VD), torch.tensor(scale).double()), expected, strict=True):
        assert (grad - expected_grad).abs().max() < 1e-12 * expected_grad.abs().max()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exponentials_that_are_kept_in_the_logits_place_give_the_same_bits(temperature: float, dtype: torch.dtype, entropy: bool) -> None:
    """Where the dtype can hold them; bfloat16 logits stay."""
    torch.manual_seed(1)
    logits_CV, targets_C = (torch.randn(9, V) * 20).to(dtype), torch.randint(0, V, (9,))
    grads_C = torch.randn(9, dtype=torch.promote_types(dtype, torch.float32))
    found = []
    for last in (False, True):
        own_CV = logits_CV.clone()
        scores = score_rows(own_CV, targets_C, temperature, entropy, last=last)
        assert torch.equal(own_CV, logits_CV) == (not last or dtype == torch.bfloat16)
        found.append((scores.logprobs_C, scores.entropy_C, gradient_rows_(own_CV, targets_C, scores, grads_C, None, temperature)))
    (logprobs_C, entropy_C, gradient_CV), others = found
    assert torch.equal(logprobs_C, others[0])
    assert torch.equal(gradient_CV, others[2])
    assert entropy_C is None or torch.equal(entropy_C, others[1])


@pytest.mark.parametrize("chunk", [1, 4, 7, 16, 1000])  # sequences of several chunks, one chunk, and several sequences in one
def test_a_loss_of_whole_sequences(chunk: int) -> None:
    hidden_ND, weight_VD, targets_N = inputs()

    def each(part: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
        own = [(start - part.start, end - part.start) for start, end in pairwise(ends) if part.start <= start and end <= part.stop]
        return sum((of_sequences(logprobs_N[a:b], entropy_N[a:b]) for a, b in own), logprobs_N.sum() * 0)

    expected = each(slice(0, N), *whole(hidden_ND, weight_VD, targets_N))
    expected_grads = torch.autograd.grad(expected, (hidden_ND, weight_VD))
    found = fused_loss(hidden_ND, weight_VD, targets_N, each, sequence_parts(chunk), temperature=1.0, chunk=chunk, entropy=True)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)
    for grad, expected_grad in zip(torch.autograd.grad(found, (hidden_ND, weight_VD)), expected_grads, strict=True):
        assert (grad - expected_grad).abs().max() < 1e-12 * expected_grad.abs().max()


def test_a_reported_entropy_is_a_constant_to_the_loss() -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    seen = []

    def loss(part: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
        assert entropy_N is not None
        assert not entropy_N.requires_grad
        seen.append(entropy_N)
        return (logprobs_N * entropy_N).sum()

    logprobs_N, entropy_N = whole(hidden_ND, weight_VD, targets_N)
    expected = torch.autograd.grad((logprobs_N * entropy_N.detach()).sum(), (hidden_ND, weight_VD))
    value = fused_loss(hidden_ND, weight_VD, targets_N, loss, even_parts(N, 10), temperature=1.0, chunk=10, entropy=True, entropy_gradient=False)
    assert torch.allclose(torch.cat(seen), entropy_N, rtol=1e-13)
    for grad, expected_grad in zip(torch.autograd.grad(value, (hidden_ND, weight_VD)), expected, strict=True):
        assert (grad - expected_grad).abs().max() < 1e-12 * expected_grad.abs().max()


def test_log_probs_are_the_scorers_bit_for_bit_with_batch_invariant_products() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.float32)
    expected = score(hidden_ND, weight_VD, targets_N, 0.7, 1000, entropy=True, linear=batch_invariant.linear)
    seen: list[tuple[Tensor, Tensor]] = []

    def loss(part: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
        assert entropy_N is not None
        seen.append((logprobs_N.detach(), entropy_N.detach()))
        return logprobs_N.sum()

    fused_loss(hidden_ND, weight_VD, targets_N, loss, sequence_parts(7), temperature=0.7, chunk=7, entropy=True, linear=batch_invariant.linear)
    assert all(torch.equal(torch.cat(parts), e) for parts, e in zip(zip(*seen, strict=True), expected, strict=True))


def test_the_gradient_of_a_bfloat16_model_is_near_the_float64_one() -> None:
    hidden_ND, weight_VD, targets_N = inputs(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden_ND, weight_VD)]
    expected = torch.autograd.grad(of_tokens(slice(0, N), whole(*exact, targets_N)[0], None), exact)
    value = fused_loss(hidden_ND, weight_VD, targets_N, of_tokens, even_parts(N, 10), temperature=1.0, chunk=10)
    found = torch.autograd.grad(value, (hidden_ND, weight_VD))
    assert value.dtype == torch.float32
    for grad, expected_grad in zip(found, expected, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - expected_grad).norm() < 0.02 * expected_grad.norm()


def test_a_frozen_projection_gets_no_gradient_and_none_is_kept() -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    weight_VD = weight_VD.detach()
    expected = torch.autograd.grad(of_tokens(slice(0, N), whole(hidden_ND, weight_VD, targets_N)[0], None), hidden_ND)[0]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        value = fused_loss(hidden_ND, weight_VD, targets_N, of_tokens, even_parts(N, 4), temperature=1.0, chunk=4)
    assert (torch.autograd.grad(value, hidden_ND)[0] - expected).abs().max() < 1e-12 * expected.abs().max()
    assert max(saved) == N * D


def test_without_tokens_the_loss_is_there_and_its_gradients_are_zero() -> None:
    hidden_ND, weight_VD, targets_N = inputs()
    value = fused_loss(hidden_ND[:0], weight_VD, targets_N[:0], of_tokens, even_parts(0, 4), temperature=1.0, chunk=4, entropy=True)
    hidden_grad, weight_grad = torch.autograd.grad(value, (hidden_ND, weight_VD))
    assert value == 0
    assert not hidden_grad.any()
    assert not weight_grad.any()


@pytest.mark.parametrize("entropy", [False, True])
def test_saved_and_allocated_bytes_do_not_grow_with_tokens_times_vocabulary(entropy: bool) -> None:
    vocabulary, width, chunk = 4000, 8, 32

    def measured(tokens: int) -> tuple[int, int]:
        hidden_ND, weight_VD = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
        targets_N = torch.randint(0, vocabulary, (tokens,))
        saved: list[Tensor] = []

        def step() -> None:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                value = fused_loss(hidden_ND, weight_VD, targets_N, mean, even_parts(tokens, chunk), temperature=1.0, chunk=chunk, entropy=entropy)
            value.backward()

        peak = peak_allocation(step)
        return peak, sum(t.untyped_storage().nbytes() for t in saved)

    def mean(part: slice, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
        return logprobs_N.sum() if entropy_N is None else logprobs_N.sum() + entropy_N.sum()

    (peak, saved), (peak_of_more, saved_of_more) = measured(4 * chunk), measured(16 * chunk)
    a_chunk, projection = 4 * chunk * vocabulary, 4 * vocabulary * width
    assert saved == projection + 4 * 4 * chunk * width
    assert saved_of_more == projection + 4 * 16 * chunk * width
    assert peak < 1.1 * a_chunk + 2 * 2**20 + projection + 20 * 4 * chunk * width  # 2 MiB: the few rows that are worked on at a time
    assert peak_of_more - peak < 12 * chunk * 4 * (width + 20)


def peak_allocation(step: Callable[[], None]) -> int:
    """Bytes that torch had allocated at the worst moment of `step`, beyond what there was before."""
    with profile(profile_memory=True) as found:
        step()
    events = sorted((e for e in found.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(accumulate((e.nbytes() for e in events), initial=0))
