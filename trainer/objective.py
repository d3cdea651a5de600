"""The policy's objective on rows that are scored already: what every trainer backend has in common between a model and an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from algorithms import registry
from algorithms.config import TURN_CREDIT, AlgorithmConfig
from algorithms.contracts import Counts, LossOutput, Rewards, TokenAdvantages, Tokens
from algorithms.kl import penalised
from algorithms.kl_controller import adapted
from algorithms.sft import nll
from miles.data.types import Sample
from trainer.contracts import StepResult
from trainer.rows.batch import Batch, count, covariance_of, token_kl
from trainer.rows.meters import Meters
from trainer.rows.row import Row
from trainer.rows.schedule import Update
from trainer.rows.turns import require_turns


class Objective:
    """`[algorithm]` as functions of batches and rows, with the KL coefficient that may move from step to step."""

    def __init__(self, algorithm: AlgorithmConfig, max_new_tokens: int):
        self.config, self._max_new_tokens = algorithm, max_new_tokens
        self._advantages = registry.advantage(algorithm)
        self._set_kl_coef(algorithm.kl_coef)

    @property
    def reference_in_loss(self) -> bool:
        return self.config.kl_coef > 0 and self.config.kl_in == "loss"

    @property
    def reference_in_reward(self) -> bool:
        return self.config.kl_coef > 0 and self.config.kl_in == "reward"

    @property
    def recompute(self) -> bool:
        """Whether ratios are taken against the trainer's own log-probs at the step's start."""
        return self.config.old_logprobs == "recompute"

    def _set_kl_coef(self, coef: float) -> None:
        self._kl_coef = coef
        self._loss = registry.loss(self.config.model_copy(update={"kl_coef": coef}))

    def advantages(self, batch: Batch, rewards: Rewards) -> TokenAdvantages:
        """Of the batch's tokens. Raises ValueError where the estimator reads turns and a sample says nothing of them."""
        if self.config.advantages in TURN_CREDIT:
            require_turns(batch.samples, self.config.advantages, states=self.config.advantages == "gigpo")
        return self._advantages(rewards)

    def counts(self, samples: Sequence[Sample], advantages: Sequence[Tensor]) -> Counts:
        """The normalisers of one optimizer step on `samples`, whose advantages are [R] each."""
        counts = count(samples, self._max_new_tokens)
        if self.config.entropy_guard != "none" and counts.tokens:
            counts = replace(counts, covariance=covariance_of(samples, advantages, self.config.guard_share))
        return counts

    def penalised(self, batch: Batch, reference_N: Tensor) -> tuple[Rewards, dict[str, float]]:
        """The rewards less the KL of the engine's log-probs from the reference's of the batch's tokens, and what to report of it."""
        kl_N = token_kl(batch.samples, reference_N)
        metrics = {"policy/kl": float(kl_N.sum()) / max(int(batch.rewards.length_S.sum()), 1)}
        return penalised(batch.rewards, kl_N, self._kl_coef), metrics

    def steered(self, result: StepResult) -> StepResult:
        """Where the KL has a target: the next step's coefficient is set, and this step's reported. The metrics are equal on every rank, so it is too."""
        if self.config.kl_target is None:
            return result
        used = self._kl_coef
        if not result.empty and "policy/kl" in result.metrics:
            self._set_kl_coef(adapted(used, result.metrics["policy/kl"], self.config.kl_target))
        return replace(result, metrics=result.metrics | {"policy/kl_coef": used})

    def state(self) -> dict[str, float]:
        """What a checkpoint must have of it."""
        return {} if self.config.kl_target is None else {"kl_coef": self._kl_coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Where `state` says nothing, as that of a run that had no target, the recipe's coefficient stays."""
        if self.config.kl_target is not None and "kl_coef" in state:
            self._set_kl_coef(float(state["kl_coef"]))

    def loss(self, row: Row, logprobs_N: Tensor, entropy_N: Tensor | None, *, counts: Counts, meters: Meters) -> LossOutput:
        tokens = tokens_of(row, logprobs_N, entropy_N, recompute=self.recompute)
        meters.mismatch(tokens)
        return self._loss(tokens, counts)


def sft_loss(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None, *, counts: Counts) -> LossOutput:
    return nll(tokens_of(row, logprobs_N, entropy_N), counts)


def tokens_of(row: Row, logprobs_N: Tensor, entropy_N: Tensor | None, *, recompute: bool = False) -> Tokens:
    """With `recompute` the ratio is taken against the step's start, which for its first update is the row's own scores."""
    old_N = row.rollout_logprobs_N
    if recompute:
        old_N = logprobs_N.detach() if row.start_logprobs_N is None else row.start_logprobs_N
    return Tokens(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        rollout_logprobs_N=row.rollout_logprobs_N,
        advantages_N=row.advantages_N,
        mask_N=row.mask_N,
        sequence_N=row.sequence_N,
        num_sequences=row.num_sequences,
        sequence_length_S=row.sequence_length_S,
        entropy_N=entropy_N,
        reference_logprobs_N=row.reference_logprobs_N,
    )


def result_of(updates: Sequence[Update], metrics: dict[str, float]) -> StepResult:
    metrics = metrics | {
        "optimizer/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
        "optimizer/lr": updates[-1].lr,
        "optimizer/empty_steps": float(sum(not u.applied for u in updates)),
    }
    return StepResult(metrics=metrics, empty=not any(u.applied for u in updates))
