"""Properties of every registered policy objective, alone and with every regulariser: a new objective is held to them by being registered."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import registry
from algorithms.config import AlgorithmConfig
from tests.algorithms.loss_batches import GUARD_SHARE, Row, count, numeric_gradient, rows, run, run_tokens, tokens_of, with_noise_where_masked

LOSSES = registry.loss_names()
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum_constant")
# Objectives whose value is not what is differentiated (detached weights): their gradients are tested by formula, each in its own file.
SURROGATES = {"cispo", "gspo_token"}
FULL = {"kl_coef": 0.1, "entropy_coef": 0.02, "clip_dual": 3.0}
CORRECTED = [
    {"loss": "ppo_clip", "old_logprobs": "recompute", "correction": correction, "correction_level": level, "sequence_mask": 0.05}
    for correction in ("importance", "truncate", "clip", "mask")
    for level in ("token", "sequence", "geometric")
]
GUARDED = [{"loss": name, "entropy_guard": guard, "guard_share": GUARD_SHARE} for name in ("ppo_clip", "gspo") for guard in ("clip_cov", "kl_cov")]
VARIANTS = [{"loss": name, **FULL} for name in LOSSES] + CORRECTED + GUARDED
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)
few = settings(max_examples=8, deadline=None)


def label(variant: dict[str, object]) -> str:
    return "-".join(str(variant[k]) for k in ("loss", "correction", "correction_level", "entropy_guard") if k in variant)


def every_variant(test):
    return pytest.mark.parametrize("variant", VARIANTS, ids=label)(test)


def build(variant: dict[str, object], aggregation: str = "token_mean"):
    return registry.loss(AlgorithmConfig(**variant, aggregation=aggregation))


def assert_same(a, b, order: list[int] | None = None) -> None:
    loss_a, gradients_a, sums_a = a
    loss_b, gradients_b, sums_b = b
    assert loss_b == pytest.approx(loss_a, rel=1e-12, abs=1e-12)
    for i, j in enumerate(order or range(len(gradients_a))):
        np.testing.assert_allclose(gradients_b[i], gradients_a[j], rtol=1e-10, atol=1e-13)
    assert sums_a == pytest.approx(sums_b, rel=1e-10, abs=1e-10)


@every_variant
@few
@given(seed=seeds, lengths=lengths, aggregation=st.sampled_from(AGGREGATIONS))
def test_order_of_sequences_does_not_matter(variant, seed, lengths, aggregation) -> None:
    batch = rows(seed, lengths)
    order = list(np.random.default_rng(seed).permutation(len(batch)))
    fn = build(variant, aggregation)
    assert_same(run(fn, batch, count(batch)), run(fn, [batch[i] for i in order], count(batch)), order)


@every_variant
@few
@given(seed=seeds, lengths=lengths, aggregation=st.sampled_from(AGGREGATIONS), value=st.sampled_from([np.nan, np.inf, -np.inf, 3.0]))
def test_masked_tokens_of_any_value_change_nothing(variant, seed, lengths, aggregation, value) -> None:
    batch = rows(seed, lengths)
    noisy = [with_noise_where_masked(row, seed + i, value) for i, row in enumerate(batch)]
    fn = build(variant, aggregation)
    assert_same(run(fn, batch, count(batch)), run(fn, noisy, count(batch)))


@every_variant
@few
@given(seed=seeds, lengths=lengths, aggregation=st.sampled_from(AGGREGATIONS), cut=st.integers(0, 5))
def test_microbatches_add_up(variant, seed, lengths, aggregation, cut) -> None:
    batch = rows(seed, lengths)
    counts, fn = count(batch), build(variant, aggregation)
    pieces = [run(fn, part, counts) for part in (batch[:cut], batch[cut:]) if part]
    joined = (
        sum(p[0] for p in pieces),
        [g for p in pieces for g in p[1]],
        {name: sum(p[2][name] for p in pieces) for name in pieces[0][2]},
    )
    assert_same(run(fn, batch, counts), joined)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if registry.is_by_token(AlgorithmConfig(**v))], ids=label)
@few
@given(seed=seeds, lengths=lengths, aggregation=st.sampled_from(AGGREGATIONS), cut=st.integers(0, 30))
def test_what_looks_at_each_token_alone_adds_up_over_parts_of_sequences(variant, seed, lengths, aggregation, cut) -> None:
    batch = rows(seed, lengths)
    counts, fn = count(batch), build(variant, aggregation)
    parts = [run_tokens(fn, batch, counts, tokens) for tokens in (slice(0, cut), slice(cut, None))]
    loss, gradients, sums = run(fn, batch, counts)
    assert sum(p[0] for p in parts) == pytest.approx(loss, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), np.concatenate(gradients), rtol=1e-10, atol=1e-13)
    assert {name: sum(p[2][name] for p in parts) for name in sums} == pytest.approx(sums, rel=1e-10, abs=1e-10)


def test_what_looks_at_whole_sequences_is_known() -> None:
    by_sequence = {name for name in LOSSES if not registry.is_by_token(AlgorithmConfig(loss=name))}
    assert by_sequence == {"gspo", "gspo_token"}
    assert not registry.is_by_token(AlgorithmConfig(sequence_mask=1.0))
    assert not registry.is_by_token(AlgorithmConfig(loss="tests.my_loss:cut"))


@every_variant
@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_finite_at_extreme_log_ratios_in_float32(variant, gap, advantage) -> None:
    n = 3
    old = np.full(n, -150.0 if gap > 0 else -0.5)
    row = Row(old + gap, old, old - gap / 2, np.full(n, advantage), np.ones(n), old - gap, np.ones(n, bool))
    loss, gradients, sums = run(build(variant), [row], count([row]), torch.float32)
    assert np.isfinite([loss, *gradients[0], *sums.values()]).all()


@every_variant
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_with_every_token_masked_is_empty_not_nan(variant, aggregation) -> None:
    nan = np.full(3, np.nan)
    row = Row(nan, nan, nan, nan, nan, nan, np.zeros(3, bool))
    loss, _, sums = run(build(variant, aggregation), [row], count([row]))
    assert loss == 0
    assert set(sums.values()) == {0.0}


@pytest.mark.parametrize("variant", [{"loss": name} for name in LOSSES] + CORRECTED, ids=label)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_policy_gradient_is_the_plain_policy_gradient(variant, aggregation) -> None:
    batch = [Row(r.logprobs, r.logprobs, r.logprobs, r.advantages, r.entropy, r.reference, r.mask) for r in rows(3, [4, 1, 6])]
    counts = count(batch)
    _, gradients, _ = run(build(variant, aggregation), batch, counts)
    for row, gradient in zip(batch, gradients, strict=True):
        length = max(int(row.mask.sum()), 1)
        share = {"token_mean": counts.tokens, "sequence_mean": counts.sequences * length, "sequence_sum_constant": counts.sequences * counts.max_tokens}
        np.testing.assert_allclose(gradient, -row.advantages[row.mask] / share[aggregation], rtol=1e-12)


@pytest.mark.parametrize(
    "variant", [{"loss": n, "clip_dual": 1.8, "entropy_coef": 0.1} for n in LOSSES if n not in SURROGATES] + CORRECTED + GUARDED, ids=label
)
@pytest.mark.parametrize("seed", range(4))
def test_gradient_equals_finite_differences(variant, seed) -> None:
    batch = rows(seed, [5, 1, 4], spread=0.5)
    counts, fn = count(batch), build(variant)
    _, gradients, _ = run(fn, batch, counts)
    tokens = tokens_of(batch)

    def value(logprobs: np.ndarray) -> float:
        moved = tokens_of(batch)
        with torch.no_grad():
            moved.logprobs_N.copy_(torch.tensor(logprobs))
        return float(fn(moved, counts).loss.detach())

    numeric = numeric_gradient(value, tokens.logprobs_N.detach().numpy().copy())
    np.testing.assert_allclose(np.concatenate(gradients), numeric[tokens.mask_N.numpy()], atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_advantage_of_zero_has_no_loss_and_no_gradient(name) -> None:
    batch = [Row(r.logprobs, r.old, r.rollout, 0 * r.advantages, r.entropy, r.reference, r.mask) for r in rows(1, [4, 3])]
    loss, gradients, _ = run(build({"loss": name}), batch, count(batch))
    assert loss == 0
    assert not np.concatenate(gradients).any()


@pytest.mark.parametrize("name", LOSSES)
def test_scaled_advantages_scale_the_loss(name) -> None:
    batch = rows(5, [4, 3])
    double = [Row(r.logprobs, r.old, r.rollout, 2 * r.advantages, r.entropy, r.reference, r.mask) for r in batch]
    fn = build({"loss": name})
    loss, gradients, _ = run(fn, batch, count(batch))
    loss2, gradients2, _ = run(fn, double, count(batch))
    assert loss2 == pytest.approx(2 * loss, rel=1e-12)
    np.testing.assert_allclose(np.concatenate(gradients2), 2 * np.concatenate(gradients), rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_inputs_are_computed_in_float32(name) -> None:
    batch = rows(2, [4])
    tokens = tokens_of(batch, torch.bfloat16)
    assert build({"loss": name, **FULL})(tokens, count(batch)).loss.dtype == torch.float32
