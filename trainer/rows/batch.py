"""A batch of groups as the trainer needs it: flat samples, rewards as tensors, the split into updates, and what can be reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.contracts import Counts, Covariance, Rewards, masked
from algorithms.entropy_guard import covariance
from algorithms.groups import all_equal
from miles.data.types import Group, Sample, Status
from trainer.rows.turns import token_credit


class Batch:
    """The trainable samples of `groups`, S of them. Equal on every rank.

    Attributes:
        samples: in the order of groups; their response tokens, end to end in this order, are the batch's N. lengths: of the responses.
        rewards: tensors [S] and [N].
        updates: places in `samples` of each optimizer step; a group is never split.
    """

    def __init__(self, groups: Sequence[Group], optimizer_steps: int):
        self.groups = groups
        self.samples: list[Sample] = [s for g in groups for s in g.trainable]
        group_S = np.repeat(np.arange(len(groups)), [len(g.trainable) for g in groups])
        self.lengths = [s.response_length for s in self.samples]
        names = sorted({name for s in self.samples for name in s.reward_parts})
        reward_S = torch.tensor([np.nan if s.reward is None else s.reward for s in self.samples], dtype=torch.float64)
        mask_N = torch.from_numpy(_end_to_end([s.loss_mask for s in self.samples], np.bool_))
        sequence_N = torch.arange(len(self.samples)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))
        reward_N, turns = token_credit(self.samples, reward_S, mask_N, sequence_N)
        self.rewards = Rewards(
            reward_S=reward_S,
            group_S=torch.from_numpy(group_S.astype(np.int64)),
            mask_N=mask_N,
            sequence_N=sequence_N,
            reward_N=reward_N,
            turns=turns,
            parts={name: torch.tensor([s.reward_parts.get(name, np.nan) for s in self.samples], dtype=torch.float64) for name in names},
        )
        shares = np.array_split(np.arange(len(groups)), optimizer_steps)
        self.updates = [np.flatnonzero(np.isin(group_S, part)).tolist() for part in shares]

    def metrics(self, version: int) -> dict[str, float]:
        """Everything that needs no model. `version` is that of the weights before this step."""
        rewards = np.array([s.reward for s in self.samples if s.reward is not None], np.float64)
        ages = np.concatenate([version - s.weight_versions[s.loss_mask] for s in self.samples]) if self.samples else np.zeros(0)
        everyone = [s for g in self.groups for s in g.samples]
        return {
            "reward/mean": float(rewards.mean()) if len(rewards) else 0.0,
            "reward/std": float(rewards.std()) if len(rewards) else 0.0,
            "reward/none": float(sum(s.reward is None for s in everyone)),
            "groups/trained": float(len(self.groups)),
            "groups/zero_variance": float(self._zero_variance()),
            "length/mean": float(np.mean(self.lengths)) if self.lengths else 0.0,
            "length/max": float(max(self.lengths, default=0)),
            "length/truncated": float(np.mean([s.status is Status.TRUNCATED for s in self.samples])) if self.lengths else 0.0,
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


def covariance_of(samples: Sequence[Sample], advantages: Sequence[Tensor], share: float) -> Covariance:
    """For an entropy guard: of engine log-prob and advantage ([R] of each sample) over the trained tokens of one optimizer step."""
    logprobs_N = np.concatenate([s.logprobs[s.loss_mask] for s in samples])
    trained = [advantages_R[torch.from_numpy(s.loss_mask)] for s, advantages_R in zip(samples, advantages, strict=True)]
    return covariance(torch.from_numpy(logprobs_N), torch.cat(trained), share)


def token_kl(samples: Sequence[Sample], reference_N: Tensor) -> Tensor:
    """log(engine / reference) of each response token, nats, float64 [N]; 0 at masked ones. `reference_N`: log-probs by the reference."""
    engine_N = torch.from_numpy(_end_to_end([s.logprobs for s in samples], np.float32)).double()
    return masked(engine_N - reference_N, torch.from_numpy(_end_to_end([s.loss_mask for s in samples], np.bool_)))


def _end_to_end(parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    """Also of no parts at all."""
    return np.concatenate([np.zeros(0, dtype), *parts])
