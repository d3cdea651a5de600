"""The KL in the reward and the entropy guard inside a whole step, against plain transformers and NumPy, one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.data.types import Group, Sample
from tests.trainer_cases import (
    gradients,
    make_backend,
    make_group,
    make_sample,
    mixed_groups,
    plain_gradients,
    plain_logprobs,
    plain_model,
    relative_difference,
)
from tests.trainer_pool import Pool

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-9


def divergence(path: Path, groups: list[Group]) -> list[list[float]]:
    """log(engine / reference) of each sample, summed over its trained tokens; the reference is the model as it is on disk."""
    plain = plain_model(path)
    with torch.no_grad():
        return [
            [float((torch.from_numpy(s.logprobs).double() - plain_logprobs(plain, s))[torch.from_numpy(s.loss_mask)].sum()) for s in g.samples] for g in groups
        ]


@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_a_kl_in_the_reward_is_taken_off_before_advantages(model: Path, max_tokens: int) -> None:
    coef, groups = 0.3, mixed_groups()
    backend = make_backend(model, algorithm={"kl_coef": coef, "kl_in": "reward"}, trainer={"max_tokens_per_microbatch": max_tokens})
    metrics = backend.step_rl(groups).metrics
    kl = divergence(model, groups)
    less = [
        make_group(g.claim_id, [s.with_reward(s.reward - coef * k) for s, k in zip(g.samples, row, strict=True)]) for g, row in zip(groups, kl, strict=True)
    ]
    assert relative_difference(gradients(backend), plain_gradients(model, less)) < EXACT
    trained = sum(int(s.loss_mask.sum()) for g in groups for s in g.samples)
    assert metrics["policy/kl"] == pytest.approx(np.sum([k for row in kl for k in row]) / trained, rel=1e-9)


@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_clip_cov_holds_the_same_tokens_however_the_step_is_cut(model: Path, max_tokens: int) -> None:
    share, groups = 0.25, mixed_groups()
    algorithm = {"entropy_guard": "clip_cov", "guard_share": share}
    backend = make_backend(model, algorithm=algorithm, trainer={"max_tokens_per_microbatch": max_tokens})
    backend.step_rl(groups)

    def advantages(group: Group) -> list[float]:
        rewards = np.array([s.reward for s in group.samples])
        return [0.0] * len(rewards) if rewards.std() == 0 else ((rewards - rewards.mean()) / rewards.std(ddof=1)).tolist()

    places = [(g, i, t, a) for g, group in enumerate(groups) for i, a in enumerate(advantages(group)) for t in np.flatnonzero(group.samples[i].loss_mask)]
    logprobs = np.array([groups[g].samples[i].logprobs[t] for g, i, t, _ in places], np.float64)
    each = np.array([a for *_, a in places])
    c = (logprobs - logprobs.mean()) * (each - each.mean())
    held = np.argsort(-c)[: int(share * len(c))]
    assert (c[held] > 0).all()
    masks = {(g, i): s.loss_mask.copy() for g, group in enumerate(groups) for i, s in enumerate(group.samples)}
    for n in held:
        g, i, t, _ = places[n]
        masks[g, i][t] = False
    without = [make_group(g, [replace(s, loss_mask=masks[g, i]) for i, s in enumerate(group.samples)]) for g, group in enumerate(groups)]
    # The oracle divides by the tokens it trains; the step's own count has the held ones in it.
    scale = 1 - len(held) / len(c)
    expected = {name: scale * gradient for name, gradient in plain_gradients(model, without).items()}
    assert relative_difference(gradients(backend), expected) < EXACT


def test_an_entropy_guard_beside_a_teacher_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"entropy_guard = 'kl_cov' ranks tokens by the rewards' advantages"):
        make_backend(model, algorithm={"entropy_guard": "kl_cov"}, distill={"teacher": str(model)})


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_steered_coefficient_follows_the_kl_and_goes_on_after_a_resume(model: Path, tmp_path: Path, kl_in: str) -> None:
    algorithm = {"kl_coef": 0.5, "kl_target": 0.01, "kl_in": kl_in, "kl_estimator": "k1"}
    backend = make_backend(model, algorithm=algorithm, trainer={"lr": 1e-2})
    groups = mixed_groups()
    before = [backend.step_rl(groups).metrics for _ in range(3)]
    backend.save(tmp_path / "step_00000003", {}, asynchronous=False)
    after = backend.step_rl(groups).metrics
    other = make_backend(model, algorithm=algorithm, trainer={"lr": 1e-2})
    other.load(tmp_path / "step_00000003")
    assert other.step_rl(groups).metrics == after
    coef = 0.5
    for metrics in [*before, after]:
        assert metrics["policy/kl_coef"] == pytest.approx(coef, rel=1e-12)
        coef *= 1 + np.clip(metrics["policy/kl"] / 0.01 - 1, -0.2, 0.2) / 10
    assert after["policy/kl_coef"] != 0.5


def rl_gradients(rank: int, world: int, path: Path, groups: list[Group], algorithm: dict[str, Any]) -> dict[str, Any]:
    backend = make_backend(path, rank=rank, world=world, algorithm=algorithm, trainer={"max_tokens_per_microbatch": 24})
    backend.step_rl(groups)
    return gradients(backend)


def sft_gradients(rank: int, world: int, path: Path, samples: list[Sample]) -> dict[str, Any]:
    backend = make_backend(path, rank=rank, world=world)
    backend.step_sft(samples)
    return gradients(backend)


@pytest.mark.full
def test_two_ranks_do_what_one_does(model: Path, two_ranks: Pool) -> None:
    samples = [replace(make_sample(0, i, 3, n), metadata={"weight": 0.5 + i}) for i, n in enumerate((4, 9, 1))]
    for algorithm in (
        {"kl_coef": 0.3, "kl_in": "reward"},
        {"entropy_guard": "clip_cov", "guard_share": 0.25},
        {"entropy_guard": "kl_cov", "guard_share": 0.25},
    ):
        found = two_ranks.run(rl_gradients, model, mixed_groups(), algorithm)
        assert relative_difference(found[0], rl_gradients(0, 1, model, mixed_groups(), algorithm)) < EXACT
    assert relative_difference(two_ranks.run(sft_gradients, model, samples)[0], sft_gradients(0, 1, model, samples)) < EXACT
