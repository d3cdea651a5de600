"""PPO's step: policy and critic against plain transformers, the critic's head start, its checkpoints, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.core.checkpoint.store import CheckpointError
from miles.data.types import Group, Status
from tests.critic_cases import plain_ppo, ppo_groups, ppo_step, reward_model
from tests.trainer_cases import make_backend, make_group, make_sample, mixed_groups, relative_difference, weights
from trainer.fsdp.backend import FSDPBackend

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-9
GAE = {"advantages": "gae", "gamma": 0.97, "gae_lambda": 0.9}


@pytest.fixture(scope="module")
def critic(model: Path) -> Path:
    return reward_model(model, model.parent)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_a_step_of_policy_and_critic_is_ppos(model: Path, critic: Path, kl_coef: float) -> None:
    algorithm = GAE | ({"kl_coef": kl_coef, "kl_in": "reward"} if kl_coef else {})
    policy, value, metrics = ppo_step(0, 1, model, critic, ppo_groups(), {}, algorithm)
    expected = plain_ppo(model, critic, ppo_groups(), gamma=0.97, lam=0.9, kl_coef=kl_coef)
    assert relative_difference(policy, expected[0]) < EXACT
    assert relative_difference(value, expected[1]) < EXACT
    assert {name: metrics[name] for name in expected[2]} == pytest.approx(expected[2], rel=1e-9)


def test_tool_tokens_between_actions_change_nothing_but_what_the_models_read(model: Path, critic: Path) -> None:
    """A masked token at the end of a response is read by no later one: with it or without, the step is the same."""
    samples = [make_sample(0, i, 3, 6, reward=float(i), masked=[5]) for i in range(2)]
    cut = [replace(s, tokens=s.tokens[:-1], **{k: getattr(s, k)[:-1] for k in ("loss_mask", "logprobs", "weight_versions")}) for s in samples]
    with_tool, without = (ppo_step(0, 1, model, critic, [make_group(0, part)], {}, GAE) for part in (samples, cut))
    assert relative_difference(with_tool[0], without[0]) < EXACT
    assert relative_difference(with_tool[1], without[1]) < EXACT


def ppo_backend(model: Path, critic: dict[str, Any], **options: Any) -> FSDPBackend:
    return make_backend(model, algorithm=GAE, critic=critic, **options)


def critic_weights(backend: FSDPBackend) -> dict[str, np.ndarray]:
    assert backend._critic is not None
    return {name: tensor.clone().numpy() for name, tensor in backend._critic.tensors().items() if ".model." in name}


def test_values_of_a_critic_made_of_the_policy_begin_at_zero(model: Path) -> None:
    """So the advantages are the rewards' own: with lambda = 1 each token has its sequence's."""
    backend = make_backend(model, algorithm=GAE | {"gae_lambda": 1.0, "gamma": 1.0, "whiten": False}, critic={})
    groups = [make_group(0, [make_sample(0, i, 3, 4, reward=float(i)) for i in range(3)])]
    metrics = backend.step_rl(groups).metrics
    assert metrics["value/loss"] == pytest.approx((0 + 1 + 4) / 3 / 2, rel=1e-12)
    assert metrics["value/explained_variance"] == 0.0


def test_the_policy_waits_while_the_critic_has_its_head_start(model: Path) -> None:
    backend = ppo_backend(model, {"head_start": 2}, trainer={"schedule": "linear"})
    moves, rates = [], []
    for _ in range(3):
        policy, value = weights(backend), critic_weights(backend)
        result = backend.step_rl(mixed_groups())
        after = weights(backend), critic_weights(backend)
        moves.append([any(not np.array_equal(b[n], a[n]) for n in b) for b, a in zip((policy, value), after, strict=True)])
        rates.append(result.metrics["optimizer/lr"])
        assert result.empty == (not moves[-1][0])
    assert moves == [[False, True], [False, True], [True, True]]
    assert rates == pytest.approx([9e-4, 8e-4, 7e-4])


def test_a_critic_learns_the_rewards_of_its_batch(model: Path) -> None:
    backend = ppo_backend(model, {"lr": 1e-2, "head_start": 99, "value_clip": float("inf")})
    found = [backend.step_rl(mixed_groups()).metrics for _ in range(25)]
    assert found[-1]["value/loss"] < 0.2 * found[0]["value/loss"]
    assert found[-1]["value/explained_variance"] > 0.7


def test_several_optimizer_steps_are_held_by_the_clip_around_the_values_at_the_start(model: Path, critic: Path) -> None:
    """Two updates on the same samples; the first moves values by more than the clip allows."""
    group = make_group(0, [make_sample(0, i, 3, 5, reward=5.0) for i in range(2)])
    groups = [group, replace(group, claim_id=1)]
    metrics = {}
    for clip in (1e-3, 9.0):
        backend = ppo_backend(model, {"path": str(critic), "lr": 1e-2, "value_clip": clip}, trainer={"optimizer_steps_per_batch": 2})
        metrics[clip] = backend.step_rl(groups).metrics
    assert metrics[1e-3]["value/clip_fraction"] > 0.3
    assert metrics[9.0]["value/clip_fraction"] == 0.0
    assert metrics[1e-3]["value/loss"] > metrics[9.0]["value/loss"]


def test_a_resumed_critic_goes_on_bit_for_bit(model: Path, critic: Path, tmp_path: Path) -> None:
    options = {"path": str(critic), "lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "clip_norm": 1.0, "head_start": 2}
    backend = ppo_backend(model, options, dtype=torch.float32)
    backend.step_rl(mixed_groups())
    backend.save(tmp_path / "step_00000001", {}, asynchronous=False)
    other = ppo_backend(model, options, dtype=torch.float32)
    other.load(tmp_path / "step_00000001")
    for _ in range(2):
        assert other.step_rl(mixed_groups()).metrics == backend.step_rl(mixed_groups()).metrics
    one, two = backend._state(), other._state()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_a_checkpoint_without_a_critic_is_no_start_for_one(model: Path, tmp_path: Path) -> None:
    plain = make_backend(model)
    plain.save(tmp_path / "step_00000000", {}, asynchronous=False)
    with pytest.raises(CheckpointError, match=r"tensor 'critic\.model\..*': the checkpoint lacks it"):
        ppo_backend(model, {}).load(tmp_path / "step_00000000")


def all_masked() -> list[Group]:
    return [make_group(0, [make_sample(0, i, 3, 4, reward=float(i), masked=range(4)) for i in range(2)])]


def all_unknown() -> list[Group]:
    return [make_group(0, [make_sample(0, i, 3, 4) for i in range(2)])]


def all_failed() -> list[Group]:
    return [make_group(0, [replace(make_sample(0, i, 3, 4, reward=float(i)), status=Status.FAILED) for i in range(2)])]


@pytest.mark.parametrize("groups", [all_masked(), all_unknown(), all_failed()])
def test_a_batch_that_teaches_nothing_moves_nothing(model: Path, critic: Path, groups: list[Group]) -> None:
    backend = ppo_backend(model, {"path": str(critic)})
    policy, value = weights(backend), critic_weights(backend)
    metrics = backend.step_rl(groups).metrics
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics["value/empty_steps"] == 1.0
    assert all(np.array_equal(policy[n], w) for n, w in weights(backend).items())
    assert all(np.array_equal(value[n], w) for n, w in critic_weights(backend).items())


def test_an_estimator_that_gives_a_critic_nothing_to_learn_is_refused(model: Path) -> None:
    backend = make_backend(model, algorithm={"advantages": "grpo"}, critic={})
    with pytest.raises(ValueError, match="gives the critic no returns to learn"):
        backend.step_rl(mixed_groups())
