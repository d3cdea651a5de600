"""Each policy objective against numbers worked by hand: value, gradient on the log-probs, and which tokens count as clipped."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from algorithms import registry
from algorithms.config import AlgorithmConfig
from tests.algorithms.loss_batches import Row, count, run, tokens_of


def row_of(ratios: list[float], advantages: list[float], old: list[float] | float = 0.2) -> Row:
    """Tokens of probability `old` before and `old * ratio` now."""
    old_N = np.log(np.broadcast_to(old, len(ratios)))
    new_N = old_N + np.log(ratios)
    return Row(new_N, old_N, old_N, np.array(advantages, float), np.ones(len(ratios)), old_N, np.ones(len(ratios), bool))


def per_token(row: Row, **options) -> tuple[np.ndarray, np.ndarray, float]:
    """Summed loss, gradient per token, clipped tokens: aggregation is undone."""
    loss, gradients, sums = run(registry.loss(AlgorithmConfig(**options)), [row], count([row]))
    return loss * len(row.mask), gradients[0] * len(row.mask), sums["policy/clip_fraction"]


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    row = row_of([2.0, 0.5, 1.1], [1.0, -2.0, 3.0])
    loss, gradient, clipped = per_token(row, loss="cispo", clip_low=0.2, clip_high=0.28)
    weights = np.array([1.28, 0.8, 1.1]) * row.advantages
    np.testing.assert_allclose(gradient, -weights, rtol=1e-12)
    assert loss == pytest.approx(-(weights * row.logprobs).sum(), rel=1e-12)
    assert clipped == 2


def test_reinforce_ignores_the_ratio() -> None:
    _, gradient, clipped = per_token(row_of([5.0, 0.1], [1.0, -2.0]), loss="reinforce")
    np.testing.assert_allclose(gradient, [-1.0, 2.0], rtol=1e-12)
    assert clipped == 0


def test_importance_is_the_unclipped_surrogate() -> None:
    loss, gradient, _ = per_token(row_of([3.0, 0.5], [1.0, -2.0]), loss="importance")
    assert loss == pytest.approx(-3.0 + 1.0, rel=1e-12)
    np.testing.assert_allclose(gradient, [-3.0, 1.0], rtol=1e-12)


def test_sapo_gate_by_hand() -> None:
    row = row_of([1.5, 1.5], [1.0, -1.0])
    loss, gradient, _ = per_token(row, loss="sapo", gate_positive=1.0, gate_negative=2.0)
    up, down = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-1.0))
    assert loss == pytest.approx(-4 * up + 2 * down, rel=1e-12)
    np.testing.assert_allclose(gradient, [-4 * up * (1 - up) * 1.5, 4 * down * (1 - down) * 1.5], rtol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_ratio_is_the_geometric_mean(name) -> None:
    row = row_of([1.3, 1.0, 0.9], [2.0, 2.0, 2.0])
    mean = (1.3 * 1.0 * 0.9) ** (1 / 3)
    loss, gradient, clipped = per_token(row, loss=name, clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx(-3 * 2 * mean, rel=1e-12)
    np.testing.assert_allclose(gradient, -2 * mean * np.ones(3), rtol=1e-12)
    assert clipped == 0


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_clips_whole_sequences(name) -> None:
    loss, gradient, clipped = per_token(row_of([2.0, 1.0, 0.9], [2.0, 2.0, 2.0]), loss=name, clip_low=0.1, clip_high=0.1)
    assert loss == pytest.approx(-3 * 2 * 1.1, rel=1e-12)
    assert not gradient.any()
    assert clipped == 3


def test_gspo_token_gives_each_token_its_own_advantage() -> None:
    mean = (1.2 * 1.0) ** 0.5
    _, gradient, _ = per_token(row_of([1.2, 1.0], [3.0, -1.0]), loss="gspo_token")
    np.testing.assert_allclose(gradient, [-3 * mean, mean], rtol=1e-12)


# Probabilities 0.2 -> 0.2 * ratio: total variation |0.2 (ratio - 1)|, bound 0.15.
@pytest.mark.parametrize(
    ("ratio", "advantage", "held"),
    [
        (2.0, 1.0, True),  # moved by 0.2, upwards, further up
        (1.5, 1.0, False),  # moved by 0.1
        (2.0, -1.0, False),  # leads back in
        (0.2, -1.0, True),  # moved by 0.16, downwards, further down
        (0.2, 1.0, False),  # leads back in
        (0.5, -1.0, False),  # moved by 0.1
    ],
)
def test_dppo_tv_holds_what_would_leave_the_region(ratio, advantage, held) -> None:
    loss, gradient, clipped = per_token(row_of([ratio], [advantage]), loss="dppo_tv", clip_low=0.15, clip_high=0.15)
    assert clipped == held
    assert gradient[0] == pytest.approx(0.0 if held else -ratio * advantage)
    assert loss == pytest.approx(0.0 if held else -ratio * advantage)


def test_dppo_trains_a_rare_token_that_ppo_would_clip() -> None:
    rare = row_of([3.0], [1.0], old=0.001)
    assert per_token(rare, loss="dppo_tv", clip_low=0.15, clip_high=0.15)[1][0] == pytest.approx(-3.0)
    assert per_token(rare, loss="ppo_clip")[1][0] == 0.0


@pytest.mark.parametrize(("ratio", "bound_over_divergence", "held"), [(2.0, 0.99, True), (2.0, 1.01, False), (0.3, 0.99, False)])
def test_dppo_kl_bounds_the_binary_divergence(ratio, bound_over_divergence, held) -> None:
    p, q = 0.2, 0.2 * ratio
    divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    bound = divergence * bound_over_divergence
    assert per_token(row_of([ratio], [1.0]), loss="dppo_kl", clip_low=bound, clip_high=bound)[2] == held


def weighted(log_weights: list[list[float]], **options) -> list[np.ndarray]:
    """Gradient over the plain one, token by token: the weight that the correction gave."""
    batch = []
    for log_weight in log_weights:
        plain = row_of([1.0] * len(log_weight), [1.0] * len(log_weight))
        batch.append(Row(plain.logprobs, plain.old, plain.old - np.array(log_weight), plain.advantages, plain.entropy, plain.reference, plain.mask))
    counts = count(batch)
    _, gradients, _ = run(registry.loss(AlgorithmConfig(old_logprobs="recompute", **options)), batch, counts)
    return [-g * counts.tokens for g in gradients]


LOG = [[math.log(3.0), math.log(0.25), 0.0], [math.log(1.5)]]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [[1, 1, 1], [1]]),
        ("importance", [[3, 0.25, 1], [1.5]]),
        ("truncate", [[2, 0.25, 1], [1.5]]),
        ("clip", [[2, 0.5, 1], [1.5]]),
        ("mask", [[0, 0, 1], [1.5]]),
    ],
)
def test_token_corrections_by_hand(correction, expected) -> None:
    got = weighted(LOG, correction=correction, correction_low=0.5, correction_high=2.0)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize(("level", "expected"), [("sequence", [[0.75] * 3, [1.5]]), ("geometric", [[0.75 ** (1 / 3)] * 3, [1.5]])])
def test_corrections_over_the_sequence_by_hand(level, expected) -> None:
    got = weighted(LOG, correction="importance", correction_level=level)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_sequence_mask_takes_whole_sequences_out() -> None:
    got = weighted(LOG, correction="mask", correction_level="sequence", correction_low=0.8, correction_high=2.0)
    assert not got[0].any()
    assert got[1].all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "trained"),
    [
        (0.5, -1.0, False),  # log 2 away, to be unlearnt
        (0.5, 1.0, True),  # as far away, but to be learnt
        (0.9, -1.0, True),  # near
        (2.0, -1.0, True),  # the policy likes it more than the engine did
    ],
)
def test_off_policy_sequence_masking(ratio, advantage, trained) -> None:
    _, gradient, clipped = per_token(row_of([ratio, ratio], [advantage] * 2), loss="importance", sequence_mask=0.4)
    assert bool(gradient.all()) is trained
    assert clipped == (0 if trained else 2)


def test_decoupled_ppo_clips_against_the_proximal_and_weighs_by_the_behaviour_policy() -> None:
    # Current over proximal 1.1 lies inside the clip; proximal over behaviour is 4.
    old = np.log([0.2])
    row = Row(old + math.log(1.1), old, old - math.log(4.0), np.array([1.0]), np.ones(1), old, np.ones(1, bool))
    loss, gradient, clipped = per_token(row, loss="ppo_clip", old_logprobs="recompute", correction="importance")
    assert (loss, gradient[0], clipped) == pytest.approx((-4.4, -4.4, 0.0))


def tree_policy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tree of 3 states and 2 actions: state 0, then state 1 or 2 by the first action. Log-probs [4 paths, 2 tokens], rewards [4]."""
    log_pi = torch.log_softmax(logits, dim=1)
    paths = torch.stack([torch.stack([log_pi[0, a], log_pi[1 + a, b]]) for a in (0, 1) for b in (0, 1)])
    return paths, torch.tensor([1.0, 0.2, -0.5, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("name", registry.loss_names())
def test_expected_gradient_is_the_true_policy_gradient_on_an_enumerated_tree(name) -> None:
    logits = torch.tensor([[0.3, -0.2], [0.1, 0.5], [-0.4, 0.2]], dtype=torch.float64, requires_grad=True)
    paths, reward = tree_policy(logits)
    (truth,) = torch.autograd.grad(-(paths.sum(1).exp() * reward).sum(), logits, retain_graph=True)
    loss_fn = registry.loss(AlgorithmConfig(loss=name))
    total = torch.zeros((), dtype=torch.float64)
    for path in range(4):
        sampled = paths[path].detach().numpy()
        row = Row(sampled, sampled, sampled, np.full(2, float(reward[path])), np.ones(2), sampled, np.ones(2, bool))
        tokens = replace(tokens_of([row]), logprobs_N=paths[path])
        # Token mean over 2 tokens; the expectation is over what the policy samples.
        total = total + np.exp(sampled.sum()) * 2 * loss_fn(tokens, count([row])).loss
    (got,) = torch.autograd.grad(total, logits)
    np.testing.assert_allclose(got.numpy(), truth.numpy(), atol=1e-14)
