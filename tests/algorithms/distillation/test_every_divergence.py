"""Properties of every divergence, over the whole vocabulary and over the teacher's likeliest tokens."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.distillation.full import Divergence, full_divergence
from algorithms.distillation.top_k import top_k_divergence

KINDS = get_args(Divergence)
BETA = 0.3
few = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 2**31)
sizes = st.tuples(st.integers(1, 5), st.integers(2, 9))


def logits_of(seed: int, size: tuple[int, int], spread: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a student and a teacher, float64 [N, V]."""
    student, teacher = np.random.default_rng(seed).standard_normal((2, *size)) * spread
    return torch.tensor(student), torch.tensor(teacher)


def measured(form: str, kind: Divergence, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """[N]; `top`: over all tokens of the teacher but the unlikeliest, which is then the one other outcome, so that it is the same number."""
    if form == "whole":
        return full_divergence(student, teacher, kind, BETA)
    told = teacher.log_softmax(-1).topk(teacher.shape[-1] - 1)
    return top_k_divergence(student, told.indices, told.values, kind, BETA)


def every(test):
    return pytest.mark.parametrize("form", ["whole", "top"])(pytest.mark.parametrize("kind", KINDS)(test))


def gradient(form: str, kind: Divergence, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    leaf = student.clone().requires_grad_()
    measured(form, kind, leaf, teacher).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@every
@few
@given(seed=seeds, size=sizes)
def test_it_is_never_negative_and_both_forms_agree(form, kind, seed, size) -> None:
    student, teacher = logits_of(seed, size)
    found = measured(form, kind, student, teacher)
    assert (found > -1e-12).all()
    np.testing.assert_allclose(found, measured("whole", kind, student, teacher), rtol=1e-9, atol=1e-12)


@every
@few
@given(seed=seeds, size=sizes)
def test_each_token_is_measured_alone(form, kind, seed, size) -> None:
    """So order, packing, micro-batches, chunks and ranks cannot matter."""
    student, teacher = logits_of(seed, size)
    whole = measured(form, kind, student, teacher)
    order = np.random.default_rng(seed).permutation(size[0])
    np.testing.assert_allclose(measured(form, kind, student[order], teacher[order]), whole[order], rtol=1e-12, atol=1e-14)
    alone = torch.cat([gradient(form, kind, student[[i]], teacher[[i]]) for i in range(size[0])])
    np.testing.assert_allclose(alone, gradient(form, kind, student, teacher), rtol=1e-11, atol=1e-14)


@every
@few
@given(seed=seeds, size=sizes, shift=st.sampled_from([-30.0, 5.0, 100.0]))
def test_numbering_of_the_vocabulary_and_a_constant_on_all_logits_change_nothing(form, kind, seed, size, shift) -> None:
    student, teacher = logits_of(seed, size)
    names = np.random.default_rng(seed).permutation(size[1])
    moved = measured(form, kind, student[:, names] + shift, teacher[:, names] - shift)
    np.testing.assert_allclose(moved, measured(form, kind, student, teacher), rtol=1e-9, atol=1e-11)


@every
@few
@given(seed=seeds, size=sizes)
def test_a_step_down_the_gradient_lowers_it(form, kind, seed, size) -> None:
    student, teacher = logits_of(seed, size)
    slope = gradient(form, kind, student, teacher)
    before, after = (measured(form, kind, logits, teacher).sum() for logits in (student, student - 1e-3 * slope))
    assert after < before
    assert float(before - after) == pytest.approx(1e-3 * float(slope.square().sum()), rel=0.05)


@every
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_finite_in_float32_where_one_is_sure_of_what_the_other_rules_out(form, kind, gap) -> None:
    student, teacher = torch.zeros(1, 4), torch.zeros(1, 4)
    student[0, 0], teacher[0, 0] = gap, -gap
    assert torch.isfinite(measured(form, kind, student, teacher)).all()
    assert torch.isfinite(gradient(form, kind, student, teacher)).all()
