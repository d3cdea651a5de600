"""SFT's loss against a negative log-likelihood written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.contracts import Counts
from algorithms.sft import nll
from tests.algorithms.loss_batches import Row, count, numeric_gradient, rows, run, with_noise_where_masked

few = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 2**31)
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def test_nll_is_the_mean_over_trained_tokens() -> None:
    batch = rows(0, [4, 1, 5])
    loss, gradients, sums = run(nll, batch, count(batch))
    trained = np.concatenate([row.logprobs[row.mask] for row in batch])
    assert loss == pytest.approx(-trained.mean(), rel=1e-13)
    np.testing.assert_allclose(np.concatenate(gradients), -1 / len(trained), rtol=1e-13)
    assert sums["loss/nll"] == pytest.approx(-trained.sum(), rel=1e-13)


def test_an_answer_of_one_token_is_trained() -> None:
    one = np.array([math.log(0.25)])
    loss, gradients, _ = run(nll, [Row(one, one, one, one, one, one, np.array([True]))], Counts(tokens=1, sequences=1, max_tokens=1))
    assert loss == pytest.approx(math.log(4))
    assert gradients[0][0] == -1


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_masked_tokens_may_hold_anything(value) -> None:
    values = np.array([-1.0, value])
    loss, _, _ = run(nll, [Row(*[values] * 6, np.array([True, False]))], Counts(tokens=1, sequences=1, max_tokens=2))
    assert loss == 1.0


def test_nothing_to_train_is_a_loss_of_zero() -> None:
    loss, _, _ = run(nll, [Row(*[np.array([math.nan])] * 6, np.array([False]))], Counts(tokens=0, sequences=0, max_tokens=2))
    assert loss == 0


def test_an_integer_weight_counts_as_that_many_copies() -> None:
    weights = [3, 1, 2]
    batch = [replace(row, advantages=np.full(len(row.mask), w)) for row, w in zip(rows(0, [4, 1, 5]), weights, strict=True)]
    copies = [row for row, w in zip(batch, weights, strict=True) for _ in range(w)]
    total = float(sum(w * row.mask.sum() for row, w in zip(batch, weights, strict=True)))
    loss, gradients, sums = run(nll, batch, replace(count(batch), weight=total))
    plain, each, _ = run(nll, copies, count(copies))
    assert loss == pytest.approx(plain, rel=1e-13)
    for gradient, w, one in zip(gradients, weights, [each[0], each[3], each[4]], strict=True):
        np.testing.assert_allclose(gradient, w * one, rtol=1e-13)
    assert sums["loss/nll"] == pytest.approx(-sum(row.logprobs[row.mask].sum() for row in batch))


def test_without_weights_the_field_they_lie_in_is_not_read() -> None:
    row = Row(*[np.array([-1.0])] * 3, np.array([math.nan]), *[np.array([-1.0])] * 2, np.array([True]))
    assert run(nll, [row], count([row]))[0] == 1.0


@few
@given(seed=seeds, lengths=lengths, cut=st.integers(0, 5), weighted=st.booleans(), value=st.sampled_from([math.nan, -math.inf, 3.0]))
def test_order_padding_and_microbatches_do_not_matter(seed, lengths, cut, weighted, value) -> None:
    batch = [replace(row, advantages=np.abs(row.advantages)) for row in rows(seed, lengths)]
    counts = count(batch)
    if weighted:
        counts = replace(counts, weight=float(sum(row.advantages[row.mask].sum() for row in batch)))
    order = list(np.random.default_rng(seed).permutation(len(batch)))
    noisy = [with_noise_where_masked(batch[i], seed + i, value) for i in order]
    parts = [run(nll, part, counts) for part in (noisy[:cut], noisy[cut:]) if part]
    loss, gradients, sums = run(nll, batch, counts)
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    assert sum(part[2]["loss/nll"] for part in parts) == pytest.approx(sums["loss/nll"], rel=1e-12, abs=1e-12)
    for place, gradient in zip(order, [g for part in parts for g in part[1]], strict=True):
        np.testing.assert_allclose(gradient, gradients[place], rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_equals_finite_differences(weighted) -> None:
    (row,) = (replace(row, advantages=np.arange(1.0, 7.0)) for row in rows(2, [6]))
    counts = replace(count([row]), weight=float(row.advantages[row.mask].sum()) if weighted else None)
    _, gradients, _ = run(nll, [row], counts)
    numeric = numeric_gradient(lambda logprobs: run(nll, [replace(row, logprobs=logprobs)], counts)[0], row.logprobs)
    np.testing.assert_allclose(gradients[0], numeric[row.mask], atol=1e-8)
