"""PPO with a critic, written out with plain transformers and NumPy, one sequence at a time: the oracle of the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from miles.data.types import Group, Sample
from tests.trainer_cases import gradients, gradients_of, make_backend, mixed_groups, plain_logprobs, plain_model

Gradients = dict[str, NDArray[np.float64]]


def reward_model(policy: Path, folder: Path) -> Path:
    """A critic to begin with that is neither the policy nor constant: the policy's body, moved a little, and a random head."""
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
        model.score.weight.normal_(std=0.3)
    model.save_pretrained(folder / "critic")
    return folder / "critic"


def ppo_groups() -> list[Group]:
    """`mixed_groups`, one of whose samples has no reward, and a group of one."""
    groups = mixed_groups()
    first, *others = groups[3].samples
    return [*groups[:3], replace(groups[3], samples=(first.with_reward(None), *others)), replace(groups[0], claim_id=9, samples=groups[0].samples[2:])]


def plain_critic(path: Path) -> Any:
    plain_model(path.parent / "model")  # takes the float32 out of transformers' norms
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").eval()


def plain_values(critic: Any, sample: Sample) -> torch.Tensor:
    """The head after each token that a response token follows, [R]."""
    hidden = critic.model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False).last_hidden_state[0]
    return (hidden @ critic.score.weight[0])[sample.prompt_length - 1 : -1]


def by_definition(rewards: NDArray[np.float64], values: NDArray[np.float64], gamma: float, lam: float) -> NDArray[np.float64]:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    delta = rewards + gamma * np.append(values[1:], 0.0) - values
    return np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))])


def plain_ppo(
    policy_path: Path, critic_path: Path, groups: Sequence[Group], *, gamma: float, lam: float, kl_coef: float = 0.0
) -> tuple[Gradients, Gradients, dict[str, float]]:
    """Gradients of policy and critic in the first step, and its value/ metrics. The KL in the reward is to the policy as it is on disk."""
    policy, critic = plain_model(policy_path), plain_critic(critic_path)
    samples = [s for g in groups for s in g.samples]
    learnt = [s for s in samples if s.reward is not None and s.loss_mask.any()]
    tokens, learnt_tokens = (sum(int(s.loss_mask.sum()) for s in part) for part in (samples, learnt))
    raw, targets, guesses = [], [], []
    for sample in learnt:
        mask = sample.loss_mask
        with torch.no_grad():
            values = plain_values(critic, sample).numpy()[mask]
            kl = sample.logprobs[mask].astype(np.float64) - plain_logprobs(policy, sample).numpy()[mask]
        rewards = -kl_coef * kl
        rewards[-1] += sample.reward
        raw.append(by_definition(rewards, values, gamma, lam))
        targets.append(raw[-1] + values)
        guesses.append(values)
    flat, returns = np.concatenate(raw), np.concatenate(targets)
    loss = 0.0
    for sample, advantages, target in zip(learnt, raw, targets, strict=True):
        mask = torch.from_numpy(sample.loss_mask)
        ratio = (plain_logprobs(policy, sample)[mask] - torch.from_numpy(sample.logprobs).double()[mask]).exp()
        advantage = torch.from_numpy((advantages - flat.mean()) / flat.std())
        (-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum() / tokens).backward()
        error = (plain_values(critic, sample)[mask] - torch.from_numpy(target)).square().sum() / 2 / learnt_tokens
        error.backward()
        loss += float(error.detach())
    # The critic's trunk is the policy's architecture, whose head it has in the place of the language model's own.
    found = {f"model.{name}": p.grad.numpy() for name, p in critic.model.named_parameters()} | {"lm_head.weight": critic.score.weight.grad.numpy()}
    metrics = {
        "value/loss": loss,
        "value/explained_variance": 1 - (returns - np.concatenate(guesses)).var() / returns.var(),
        "value/grad_norm": float(np.sqrt(sum((g**2).sum() for g in found.values()))),
    }
    return {name: p.grad.numpy() for name, p in policy.named_parameters()}, found, metrics


def ppo_step(
    rank: int, world: int, policy: Path, critic: Path, groups: list[Group], trainer: dict[str, Any], algorithm: dict[str, Any]
) -> tuple[Gradients, Gradients, dict[str, float]]:
    """What `plain_ppo` gives, by the backend."""
    backend = make_backend(policy, rank=rank, world=world, trainer=trainer, algorithm={"advantages": "gae"} | algorithm, critic={"path": str(critic)})
    metrics = backend.step_rl(groups).metrics
    assert backend._critic is not None
    return gradients(backend), gradients_of(backend._critic.optimizer), metrics
