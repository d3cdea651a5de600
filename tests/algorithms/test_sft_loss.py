"""SFT's loss against a negative log-likelihood written by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from algorithms.contracts import Counts
from algorithms.sft import nll
from tests.algorithms.loss_batches import Row, count, rows, run


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
