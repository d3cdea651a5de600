"""The critic beside the policy: another model on the same rows and ranks, with an optimizer of its own, that learns each state's return."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.contracts import LossOutput, Rewards, TokenAdvantages
from algorithms.value import explained_variance, value_loss
from miles.core.model.config import ModelConfig
from miles.core.model.reward import packed_values
from miles.core.model.sharded import reshard
from miles.core.model.value import load_value_model
from trainer.config import CriticConfig, TrainerConfig
from trainer.fsdp.model import prepare
from trainer.fsdp.optimizer import Optimizer
from trainer.fsdp.update import take_step
from trainer.rows.batch import Batch
from trainer.rows.meters import Meters
from trainer.rows.row import Row, own_part
from trainer.rows.schedule import Update
from trainer.rows.share import MicroBatch
from trainer.split_forward.activations import Activations


class Critic:
    """A training step asks for the values of its whole batch first (`score`), and then lets the critic take its own `step`s.

    Attributes:
        model, optimizer: as the policy's.
    """

    def __init__(self, config: CriticConfig, model: PreTrainedModel, total_steps: int):
        self._config, self.model = config, model
        self.optimizer = Optimizer(model, config, total_steps)

    def alone(self, version: int) -> bool:
        """Whether the step after `version` ones is the critic's alone."""
        return version < self._config.head_start

    def score(self, row: Row) -> Tensor:
        """The value of the state in which each response token was chosen, [N], without a graph. Collective."""
        with torch.no_grad():
            values_N = self._values(row)
        reshard(self.model)
        return values_N

    def step(
        self, batch: Batch, shares: Sequence[Sequence[MicroBatch]], rows: Sequence[Sequence[Row]], rewards: Rewards, found: TokenAdvantages, world: int
    ) -> dict[str, float]:
        """One optimizer step for each of `batch.updates`; what there is to report. Collective.

        Args:
            shares, rows: of this rank, for each update; the rows get their `values_N` and `returns_N` here.
            rewards: with the values at the step's start. found: with the returns, NaN where there is nothing to learn.
        Raises:
            ValueError: the estimator gives no returns.
        """
        values_N, returns_N = rewards.values_N, found.returns_N
        assert values_N is not None
        if returns_N is None:
            raise ValueError("algorithm.advantages gives the critic no returns to learn: leave [critic] out, or return TokenAdvantages with returns_N")
        values, returns = values_N.split(batch.lengths), returns_N.split(batch.lengths)
        meters, updates, everything = Meters(self.model.device), list[Update](), 0
        for places, micros, update in zip(batch.updates, shares, rows, strict=True):
            for micro, row in zip(micros, update, strict=True):
                row.values_N, row.returns_N = own_part(micro, values, meters.device), own_part(micro, returns, meters.device)
            total = sum(int((~returns[i].isnan()).sum()) for i in places)
            updates.append(take_step(self.model, self.optimizer, update, total, partial(self._loss, total=total), meters, "value/loss"))
            everything += total
        learnt_N = ~returns_N.isnan()
        return meters.reduced(everything, world) | {
            "value/explained_variance": explained_variance(values_N[learnt_N], returns_N[learnt_N]),
            "value/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
            "value/lr": updates[-1].lr,
            "value/empty_steps": float(sum(not u.applied for u in updates)),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name, live, as a checkpoint has them."""
        weights = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        return {f"critic.{name}": tensor for name, tensor in (weights | self.optimizer.tensors()).items()}

    def _values(self, row: Row) -> Tensor:
        return packed_values(self.model, row.tokens_T, row.positions_T, row.sequence_T, row.scored_N - 1)

    def _loss(self, row: Row, total: int) -> LossOutput:
        assert row.values_N is not None
        assert row.returns_N is not None
        learnt_N = row.mask_N & ~row.returns_N.isnan()
        return value_loss(self._values(row), row.values_N, row.returns_N, learnt_N, total, self._config.value_clip)


def build_critic(
    config: CriticConfig, policy: ModelConfig, trainer: TrainerConfig, *, master_dtype: torch.dtype, world: int, device: torch.device, total_steps: int
) -> Critic:
    """The critic of `policy` on this rank. It computes in the policy's dtype; its operators need not be those of an engine."""
    own = policy.model_copy(update={"path": config.path or policy.path, "true_on_policy": False})
    model = load_value_model(own.path, master_dtype, trust_remote_code=own.trust_remote_code)
    activations = None if trainer.activations == "keep" else Activations()
    return Critic(config, prepare(model, own, master_dtype=master_dtype, world=world, device=device, activations=activations), total_steps)
