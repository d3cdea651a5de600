"""Sampling against a plain NumPy oracle, and its distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollout.engines.sampling import RowParams, choose, key_of, uniforms

V = 23


def params(temperature: list[float], top_k: list[int], top_p: list[float]) -> RowParams:
    return RowParams.of(np.array(temperature, np.float64), np.array(top_k, np.int64), np.array(top_p, np.float64))


def kept(probs: NDArray[np.float64], top_k: int, top_p: float) -> list[int]:
    """Tokens from the likeliest on (the lower id first among equals): at most top_k, and no more once top_p is reached."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    chosen, mass = [], 0.0
    for token in order:
        if chosen and ((top_k and len(chosen) >= top_k) or (top_p < 1 and mass >= top_p)):
            break
        chosen.append(token)
        mass += probs[token]
    return chosen


def oracle(logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
    allowed = set(kept(probs, top_k, top_p))
    masked = [probs[token] if token in allowed else 0.0 for token in range(len(probs))]
    below, target = 0.0, uniform * sum(masked)
    for token, probability in enumerate(masked):
        below += probability
        if below > target:
            return token
    raise AssertionError


ROW = st.tuples(st.sampled_from([0.0, 0.3, 1.0, 1.7]), st.sampled_from([0, 1, 2, 5, 22, 23, 100]), st.sampled_from([1.0, 0.999, 0.5, 0.1, 1e-6]))


@settings(max_examples=150, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.booleans())
def test_each_row_is_sampled_as_the_oracle_samples_it_alone(rows: list[tuple[float, int, float]], seed: int, exact: bool) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.normal(size=(len(rows), V)) * 3).astype(np.float32)
    draws = generator.random(len(rows))
    tokens, logprobs = choose(torch.from_numpy(logits), params(*(list(column) for column in zip(*rows, strict=True))), torch.from_numpy(draws), exact)
    assert tokens.tolist() == [oracle(logit, *row, draw) for logit, row, draw in zip(logits, rows, draws, strict=True)]
    for logit, (temperature, _, _), token, logprob in zip(logits, rows, tokens, logprobs, strict=True):
        scaled = logit.astype(np.float64) / (temperature or 1.0)
        assert float(logprob) == pytest.approx(scaled[token] - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max(), abs=1e-5)


def test_equal_logits_are_told_apart_by_their_ids() -> None:
    logits = torch.zeros(64, 8)
    draws = torch.from_numpy(uniforms(np.full(64, key_of(1)), np.arange(64)))
    assert set(choose(logits, params([1.0] * 64, [3] * 64, [1.0] * 64), draws)[0].tolist()) == {0, 1, 2}
    assert set(choose(logits, params([1.0] * 64, [0] * 64, [0.5] * 64), draws)[0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-52])
def test_a_token_of_probability_zero_is_never_chosen(draw: float) -> None:
    logits = torch.tensor([[-torch.inf, -200.0, 1.0, 0.3, -200.0, -torch.inf]] * 2)
    tokens, _ = choose(logits, params([1.0, 0.1], [0, 0], [1.0, 1.0]), torch.full((2,), draw, dtype=torch.float64))
    assert set(tokens.tolist()) <= {2, 3}


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.3, 6, 1.0), (1.0, 0, 0.7)])
def test_frequencies_are_the_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square over 40,000 draws; the bound is passed by chance once in 10,000 runs, and the seeds are fixed."""
    from scipy.stats import chi2

    count = 40_000
    logits = np.random.default_rng(3).normal(size=V).astype(np.float32)
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled) / np.exp(scaled).sum()
    allowed = kept(probs, top_k, top_p)
    expected = probs[allowed] / probs[allowed].sum() * count
    keys = np.array([key_of(seed) for seed in range(count)])
    draws = torch.from_numpy(uniforms(keys, np.full(count, 17)))
    tokens, _ = choose(torch.from_numpy(logits).expand(count, -1), params([temperature] * count, [top_k] * count, [top_p] * count), draws)
    found = np.bincount(tokens.numpy(), minlength=V)
    assert found.sum() == found[allowed].sum()
    statistic = ((found[allowed] - expected) ** 2 / expected).sum()
    assert statistic < chi2.ppf(1 - 1e-4, len(allowed) - 1)


def test_random_numbers_are_uniform_over_seeds_and_over_places() -> None:
    from scipy.stats import kstest

    over_places = uniforms(np.full(20_000, key_of(5)), np.arange(20_000))
    over_seeds = uniforms(np.array([key_of(seed) for seed in range(20_000)]), np.zeros(20_000, np.int64))
    assert kstest(over_places, "uniform").pvalue > 1e-4
    assert kstest(over_seeds, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(over_places[:-1], over_places[1:])[0, 1]) < 0.03
    assert len(np.unique(np.concatenate([over_places, over_seeds]))) == 39_999  # seed 5 at place 0 is in both


def test_random_numbers_stay_below_one_and_take_any_seed() -> None:
    assert uniforms(np.array([2**64 - 1], np.uint64), np.array([0])).max() < 1
    assert len({int(key_of(seed)) for seed in (0, 1, -1, 2**63, 2**64 - 2, 10**30)}) == 6


def test_a_large_batch_is_chosen_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, draws = torch.randn(10, V, generator=generator), torch.rand(10, generator=generator, dtype=torch.float64)
    rows = params([0.0, 0.5] * 5, [0, 3] * 5, [1.0] * 10)
    whole = choose(logits, rows, draws)
    monkeypatch.setattr("rollout.engines.sampling._CHUNK_ELEMENTS", 3 * V)
    assert all(torch.equal(a, b) for a, b in zip(choose(logits, rows, draws), whole, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    logits = torch.zeros(2, V)
    logits[1, 4] = value
    with pytest.raises(ValueError, match="not finite"):
        choose(logits, params([1.0, 1.0], [0, 0], [1.0, 1.0]), torch.zeros(2, dtype=torch.float64))
