"""A batch of groups as the trainer needs it: flat samples, rewards as tensors, the split into updates, and what can be reported of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from algorithms.contracts import Counts, Covariance, Rewards
from algorithms.entropy_guard import covariance
from algorithms.groups import all_equal
from miles.data.types import Group, Sample, Status


class Batch:
    """The trainable samples of `groups`, S of them. Equal on every rank.

    Attributes:
        samples: in the order of groups. rewards: tensors [S].
        updates: places in `samples` of each optimizer step; a group is never split.
    """

    def __init__(self, groups: Sequence[Group], optimizer_steps: int):
        self.groups = groups
        self.samples: list[Sample] = [s for g in groups for s in g.trainable]
        group_S = np.repeat(np.arange(len(groups)), [len(g.trainable) for g in groups])
        names = sorted({name for s in self.samples for name in s.reward_parts})
        self.rewards = Rewards(
            reward_S=torch.tensor([np.nan if s.reward is None else s.reward for s in self.samples], dtype=torch.float64),
            group_S=torch.from_numpy(group_S.astype(np.int64)),
            length_S=torch.tensor([int(s.loss_mask.sum()) for s in self.samples], dtype=torch.int64),
            parts={name: torch.tensor([s.reward_parts.get(name, np.nan) for s in self.samples], dtype=torch.float64) for name in names},
        )
        shares = np.array_split(np.arange(len(groups)), optimizer_steps)
        self.updates = [np.flatnonzero(np.isin(group_S, part)).tolist() for part in shares]

    def metrics(self, version: int) -> dict[str, float]:
        """Everything that needs no model. `version` is that of the weights before this step."""
        rewards = np.array([s.reward for s in self.samples if s.reward is not None], np.float64)
        lengths = [s.response_length for s in self.samples]
        ages = np.concatenate([version - s.weight_versions[s.loss_mask] for s in self.samples]) if self.samples else np.zeros(0)
        everyone = [s for g in self.groups for s in g.samples]
        return {
            "reward/mean": float(rewards.mean()) if len(rewards) else 0.0,
            "reward/std": float(rewards.std()) if len(rewards) else 0.0,
            "reward/none": float(sum(s.reward is None for s in everyone)),
            "groups/trained": float(len(self.groups)),
            "groups/zero_variance": float(self._zero_variance()),
            "length/mean": float(np.mean(lengths)) if lengths else 0.0,
            "length/max": float(max(lengths, default=0)),
            "length/truncated": float(np.mean([s.status is Status.TRUNCATED for s in self.samples])) if lengths else 0.0,
            "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
            "staleness/max": float(ages.max()) if len(ages) else 0.0,
            "tokens/trained": float(self.rewards.length_S.sum()),
        }

    def _zero_variance(self) -> int:
        equal_S = all_equal(self.rewards.reward_S, ~torch.isnan(self.rewards.reward_S), self.rewards.group_S)
        varied = set(self.rewards.group_S[~equal_S].tolist())
        return len(self.groups) - len(varied)


def count(samples: Sequence[Sample], max_tokens: int) -> Counts:
    """The global normalisers of one optimizer step on `samples`."""
    trained = [int(s.loss_mask.sum()) for s in samples]
    return Counts(tokens=sum(trained), sequences=sum(t > 0 for t in trained), max_tokens=max_tokens)


def weights_of(samples: Sequence[Sample]) -> Tensor | None:
    """The samples' own weights for SFT, float64 [S], 1 where a sample has none; None where none of them has."""
    if not any("weight" in s.metadata for s in samples):
        return None
    return torch.tensor([s.metadata.get("weight", 1.0) for s in samples], dtype=torch.float64)


def covariance_of(samples: Sequence[Sample], advantages_S: Tensor, share: float) -> Covariance:
    """For an entropy guard: of engine log-prob and advantage over the trained tokens of one optimizer step."""
    logprobs_N = np.concatenate([s.logprobs[s.loss_mask] for s in samples])
    length_S = torch.tensor([int(s.loss_mask.sum()) for s in samples])
    return covariance(torch.from_numpy(logprobs_N), advantages_S.repeat_interleave(length_S), share)


def sequence_kl(samples: Sequence[Sample], reference: Sequence[Sequence[float]]) -> Tensor:
    """log(engine / reference) summed over each sample's trained tokens, nats, float64 [S]. `reference` has log-probs [R] of each."""
    sums = [(s.logprobs.astype(np.float64) - np.array(r))[s.loss_mask].sum() for s, r in zip(samples, reference, strict=True)]
    return torch.tensor(sums, dtype=torch.float64)
