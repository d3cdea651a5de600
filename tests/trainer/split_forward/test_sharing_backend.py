"""The trainer with `trainer.prompt_sharing` against the trainer without, one rank, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.preference.config import PreferenceConfig
from algorithms.registry import loss_names
from miles.data.types import Group, Sample
from tests.trainer_cases import (
    gradients,
    make_backend,
    make_group,
    make_sample,
    plain_gradients,
    relative_difference,
    share_prompts,
    sharing_groups,
    weights,
)
from trainer.fsdp.backend import FSDPBackend

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12


def both(path: Path, trainer: dict[str, Any] | None = None, **options: Any) -> tuple[FSDPBackend, FSDPBackend]:
    """Without and with sharing."""
    trainer = {"max_tokens_per_microbatch": 60} | (trainer or {})
    return make_backend(path, trainer=trainer, **options), share_prompts(make_backend(path, trainer=trainer | {"prompt_sharing": True}, **options))


def same(metrics: dict[str, float], expected: dict[str, float]) -> None:
    """Equal but for what only sharing reports."""
    assert metrics.keys() - expected.keys() == {"sharing/computed"}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("max_tokens", [1, 24, 8192])
def test_gradients_are_those_of_a_plain_forward_sample_by_sample(model: Path, max_tokens: int) -> None:
    backend = share_prompts(make_backend(model, trainer={"prompt_sharing": True, "max_tokens_per_microbatch": max_tokens}))
    metrics = backend.step_rl(sharing_groups()).metrics
    assert relative_difference(gradients(backend), plain_gradients(model, sharing_groups())) < EXACT
    assert metrics["sharing/computed"] < 0.75


@pytest.mark.parametrize("max_tokens", [60, 8192])
def test_rows_compute_once_what_their_own_sequences_begin_with(model: Path, max_tokens: int) -> None:
    backend = make_backend(model, trainer={"max_tokens_per_microbatch": max_tokens})
    tokens = []
    backend.model.model.embed_tokens.register_forward_hook(lambda module, args, hidden: tokens.append(hidden.shape[1]))
    backend.step_rl(sharing_groups())
    assert relative_difference(gradients(backend), plain_gradients(model, sharing_groups())) < EXACT
    assert sum(tokens) < sum(len(s.tokens) for g in sharing_groups() for s in g.samples)


@pytest.mark.parametrize("loss", loss_names())
def test_every_policy_loss_with_a_reference_an_entropy_bonus_and_two_updates(model: Path, loss: str) -> None:
    """Scores at the step's start, by policy and reference, go the same way."""
    algorithm = {"loss": loss, "kl_coef": 0.1, "entropy_coef": 0.01, "old_logprobs": "recompute"}
    plain, sharing = both(model, {"optimizer_steps_per_batch": 2}, algorithm=algorithm, temperature=0.7)
    for _ in range(2):
        expected = plain.step_rl(sharing_groups()).metrics
        same(sharing.step_rl(sharing_groups()).metrics, expected)


@pytest.mark.parametrize("algorithm", [{"entropy_guard": "clip_cov"}, {"kl_coef": 0.1, "kl_in": "reward"}, {"aggregation": "sequence_mean"}], ids=str)
def test_what_stands_beside_the_loss(model: Path, algorithm: dict[str, Any]) -> None:
    plain, sharing = both(model, algorithm=algorithm)
    expected = plain.step_rl(sharing_groups()).metrics
    same(sharing.step_rl(sharing_groups()).metrics, expected)
    assert relative_difference(gradients(sharing), gradients(plain)) < EXACT


def test_twenty_optimizer_steps_end_at_the_same_weights(model: Path) -> None:
    plain, sharing = both(model, {"lr": 1e-2}, total_steps=20)
    start = weights(plain)
    for _ in range(20):
        plain.step_rl(sharing_groups())
        sharing.step_rl(sharing_groups())
    expected, found = weights(plain), weights(sharing)
    assert max(np.abs(expected[n] - start[n]).max() for n in start) > 0.05
    assert relative_difference(found, expected) < 1e-9


def test_checkpointed_activations(model: Path) -> None:
    plain, sharing = both(model, {"activations": "recompute"})
    plain.step_rl(sharing_groups())
    sharing.step_rl(sharing_groups())
    assert relative_difference(gradients(sharing), gradients(plain)) < EXACT


def test_supervised_fine_tuning_with_loss_on_shared_tokens(model: Path) -> None:
    """Conversations that begin alike and are trained from the second token on: what they share counts for each."""
    opening = make_sample(0, 0, 1, 12)
    samples = [_continued(opening, make_sample(0, i, 1, 4 + i)) for i in range(3)] + [opening, make_sample(1, 0, 3, 6)]
    plain, sharing = both(model)
    expected = plain.step_sft(samples).metrics
    same(sharing.step_sft(samples).metrics, expected)
    assert relative_difference(gradients(sharing), gradients(plain)) < EXACT


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_pairs(model: Path, objective: str) -> None:
    chosen, rejected = ([g.samples[i] for g in sharing_groups()] for i in (0, 2))
    samples = [s for pair in zip(chosen, rejected, strict=True) for s in pair]
    plain, sharing = both(model, pairs=PreferenceConfig(objective=objective))
    for _ in range(2):
        expected = plain.step_pairs(samples).metrics
        same(sharing.step_pairs(samples).metrics, expected)


def test_exact_on_policy_scores_keep_their_bits(model: Path) -> None:
    options = {"model": {"true_on_policy": True}, "dtype": torch.float32}
    plain, sharing = both(model, **options)
    samples = [s for g in sharing_groups() for s in g.samples]
    assert sharing.logprobs(samples) == plain.logprobs(samples)
    recorded = [_recorded(s, logprobs) for s, logprobs in zip(samples, plain.logprobs(samples), strict=True)]
    groups = [make_group(i, recorded[3 * i : 3 * i + 3]) for i in range(4)]
    assert sharing.step_rl(groups).metrics["mismatch/logprob_abs_max"] == 0.0


def test_an_empty_response_and_a_group_of_one(model: Path) -> None:
    groups: list[Group] = [
        make_group(0, [make_sample(0, i, 4, n, reward=float(i)) for i, n in enumerate((0, 3, 5))]),
        make_group(1, [make_sample(1, 0, 6, 4, reward=1.0)]),
    ]
    plain, sharing = both(model, algorithm={"advantages": "reinforce_pp"})
    expected = plain.step_rl(groups).metrics
    same(sharing.step_rl(groups).metrics, expected)


def test_a_critic_sees_whole_sequences(model: Path) -> None:
    plain, sharing = both(model, algorithm={"advantages": "gae"}, critic={"lr": 1e-3})
    for _ in range(2):
        expected = plain.step_rl(sharing_groups()).metrics
        same(sharing.step_rl(sharing_groups()).metrics, expected)


def test_bfloat16_sums_the_prompts_gradients_in_float32(model: Path) -> None:
    """bfloat16 on float32 masters: near the gradient of whole rows, as near as those are to float32's."""
    options: dict[str, Any] = {"dtype": torch.float32}
    exact, _ = both(model, **options)
    plain, sharing = both(model, model={"dtype": "bfloat16"}, **options)
    for backend in (exact, plain, sharing):
        backend.step_rl(sharing_groups())
    gaps = [_distance(gradients(backend), gradients(exact)) for backend in (plain, sharing)]
    assert gaps[1] < 1.5 * gaps[0] < 0.1


def test_a_teacher_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt_sharing = true.*teacher"):
        make_backend(model, trainer={"prompt_sharing": True}, distill={"teacher": str(model)})


def _continued(opening: Sample, more: Sample) -> Sample:
    joined = {name: np.concatenate([getattr(opening, name), getattr(more, name)]) for name in ("loss_mask", "logprobs", "weight_versions")}
    return Sample(**(vars(more) | joined | {"tokens": np.concatenate([opening.tokens, more.response_tokens]), "prompt_length": 1}))


def _recorded(sample: Sample, logprobs: list[float]) -> Sample:
    return Sample(**(vars(sample) | {"logprobs": np.where(sample.loss_mask, np.array(logprobs, np.float32), np.nan)}))


def _distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Relative, all gradients as one vector."""
    difference = sum(float(((found[n] - expected[n]) ** 2).sum()) for n in expected)
    return (difference / sum(float((expected[n] ** 2).sum()) for n in expected)) ** 0.5


def test_adapters_and_a_reference_that_is_the_model_without_them(model: Path) -> None:
    plain, sharing = both(model, {"lr": 1e-2}, algorithm={"kl_coef": 0.1}, lora={"rank": 2})
    for _ in range(3):
        expected = plain.step_rl(sharing_groups()).metrics
        same(sharing.step_rl(sharing_groups()).metrics, expected)
    assert expected["policy/kl"] > 0
