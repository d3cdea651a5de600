"""What an objective is: `advantages(...)` then `loss(...)`, both pure.

Tensors are flat over tokens: all response tokens of all sequences of a micro-batch laid end to end, N of them, with
`sequence_N` saying whose each is. There is no padding, so packing and micro-batch split cannot change a result, and every
normaliser is a global count passed in. Inside an objective everything is float32 (float64 stays float64); masked values never
touch a result, even when they are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class TurnPlaces:
    """The K turns of a batch: stretches of tokens that the policy wrote between two answers of its environment.

    Attributes:
        turn_N: int64, the turn that each response token belongs to, -1 for none. sequence_K: int64, whose turn it is; a sequence's
            turns are in order.
        states: the state in which each turn began, K hashable values; None where it is not known.
    """

    turn_N: Tensor
    sequence_K: Tensor
    states: Sequence[Hashable]


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Rewards of a batch of S sequences in groups, whose N response tokens lie end to end.

    Attributes:
        reward_S: float; NaN where the reward is None (such a sample leaves every baseline and gets advantage 0).
        group_S: int64, the index of each sequence's group, groups numbered from 0.
        mask_N: bool; True where a token is trained. sequence_N: int64, whose it is.
        reward_N: float, the reward of each trained token: `reward_S` laid over its sequence, most of it on the last one.
        parts: name -> float [S]; each reward function on its own, for estimators that normalise them one by one.
        values_N: float, the critic's value of the state in which each token was chosen; None without a critic.
        turns: None where the samples say nothing of turns.
    """

    reward_S: Tensor
    group_S: Tensor
    mask_N: Tensor
    sequence_N: Tensor
    reward_N: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    values_N: Tensor | None = None
    turns: TurnPlaces | None = None

    @property
    def length_S(self) -> Tensor:
        """Trained tokens of each sequence, int64."""
        return torch.bincount(self.sequence_N[self.mask_N], minlength=len(self.reward_S))


@dataclass(frozen=True, kw_only=True)
class Covariance:
    """Of log-prob and advantage over the trained tokens of one step: both means, and the value from which an entropy guard holds a token."""

    logprob_mean: float
    advantage_mean: float
    bound: float


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a loss knows of its whole optimizer step, over all micro-batches and ranks: normalisers first.

    Attributes:
        tokens: trained tokens. sequences: sequences with at least one trained token. max_tokens: the longest allowed
            response, Dr.GRPO's constant.
        weight: sum of the samples' weights over the trained tokens, for weighted SFT; None where every weight is 1.
        covariance: for `algorithm.entropy_guard`; None without one.
    """

    tokens: int
    sequences: int
    max_tokens: int
    weight: float | None = None
    covariance: Covariance | None = None


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One micro-batch of N response tokens of sequences 0..S-1, as the loss sees it.

    Attributes:
        logprobs_N: of the current policy at the sampling temperature; requires grad.
        old_logprobs_N: of the policy that the ratio is taken against (the engine's record, or the trainer's at the step's start).
        rollout_logprobs_N: the engine's record.
        advantages_N: float.
        mask_N: bool; False is never trained and never counted.
        sequence_N: int64. num_sequences: S of this micro-batch.
        sequence_length_S: int64, trained tokens of each sequence (a sequence is never split over micro-batches).
        entropy_N: of the current policy, detached unless the objective asks for its gradient; may be None.
        reference_logprobs_N: of the reference model, or None without one.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    mask_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    sequence_length_S: Tensor
    entropy_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """`loss`: scalar; micro-batch losses of one step add up to the step's loss. `sums`: detached scalars that add up over
    micro-batches and ranks; the trainer divides each by the step's token count and reports it under its name."""

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """What a policy objective says about each token; `registry.loss` masks, aggregates and reports it.

    Attributes:
        loss_N: float, before aggregation; carries the gradient.
        ratio_N: float, the importance ratio, for reports.
        clipped_N: bool, True where clip, gate or mask took the token's gradient away.
    """

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """What an estimator says about each response token of the batch.

    Attributes:
        advantages_N: float; 0 where the token is not trained or its sequence's reward is unknown.
        returns_N: float, what the critic learns; NaN where it has nothing to learn. None from an estimator without a critic.
    """

    advantages_N: Tensor
    returns_N: Tensor | None = None


Advantage = Callable[[Rewards, AlgorithmConfig], "TokenAdvantages | Tensor"]
"""What is registered: rewards of a batch -> advantages of its tokens. A plain Tensor [S] is one advantage for all tokens of a sequence,
0 where the reward is NaN."""

Objective = Callable[[Tokens, AlgorithmConfig], "TokenLoss | Tensor"]
"""What is registered: a policy objective per token. Masked places of its input hold 0. A plain Tensor [N] is a loss without reports."""

AdvantageFn = Callable[[Rewards], TokenAdvantages]
"""An `Advantage` with its configuration bound and its result laid over tokens: what `registry.advantage` returns."""


class LossFn(Protocol):
    def __call__(self, tokens: Tokens, counts: Counts) -> LossOutput: ...


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where `mask` is False, so that neither NaN values nor NaN gradients of masked places get through."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
