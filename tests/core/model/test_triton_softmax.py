"""The Triton kernels, in Triton's interpreter and so on a CPU, against formulas in float64 and against the torch version."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels are not checked here")


def check(vocabulary: int, dtype: torch.dtype) -> None:
    """In a process where Triton interprets. More logits than one block of a kernel, and not a multiple of it."""
    from miles.core.model import token_softmax, triton_softmax

    torch.manual_seed(0)
    rows, temperature = 3, 0.7
    padded_CV = (5 * torch.randn(rows, vocabulary + 9)).to(dtype)
    logits_CV = padded_CV[:, :vocabulary]  # rows that lie apart
    targets_C = torch.tensor([0, vocabulary - 1, vocabulary // 2])
    of_logprob_C, of_entropy_C = torch.tensor([1.0, -0.3, 0.0]), torch.tensor([0.2, 0.0, -1.0])
    exact_CV = logits_CV.double().requires_grad_()
    every_CV = torch.log_softmax(exact_CV / temperature, -1)
    logprobs_C, entropy_C = every_CV.gather(1, targets_C[:, None])[:, 0], -(every_CV.exp() * every_CV).sum(-1)
    for entropy in (False, True):
        found = triton_softmax.score_rows(logits_CV, targets_C, temperature, entropy)
        torch.testing.assert_close(found.logprobs_C.double(), logprobs_C.detach(), rtol=1e-5, atol=1e-5)
        if found.entropy_C is not None:
            torch.testing.assert_close(found.entropy_C.double(), entropy_C.detach(), rtol=1e-5, atol=1e-5)
        loss = logprobs_C @ of_logprob_C.double() + (entropy_C @ of_entropy_C.double() if entropy else 0)
        (expected_CV,) = torch.autograd.grad(loss, exact_CV, retain_graph=True)
        other_CV, own_CV = logits_CV.clone(), logits_CV.clone()
        plain = token_softmax.score_rows(other_CV, targets_C, temperature, entropy)
        options = of_logprob_C, of_entropy_C if entropy else None, temperature
        gradient_CV = triton_softmax.gradient_rows_(own_CV, targets_C, found, *options)
        assert gradient_CV is own_CV
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
        torch.testing.assert_close(gradient_CV.double(), expected_CV, **tolerance)
        torch.testing.assert_close(gradient_CV, token_softmax.gradient_rows_(other_CV, targets_C, plain, *options), **tolerance)
    empty = triton_softmax.score_rows(logits_CV[:0], targets_C[:0], temperature, True)
    assert len(empty.logprobs_C) == 0


def test_the_kernels_agree_with_the_formulas_and_with_torch() -> None:
    command = [sys.executable, "-c", f"import torch; from {__name__} import check; check(301, torch.float32); check(9001, torch.bfloat16)"]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
