"""The critic beside the policy: another model on the same rows and ranks, with an optimizer of its own, that learns each state's return."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.contracts import LossOutput, Rewards, TokenAdvantages
from miles.core.model.config import ModelConfig
from miles.core.model.load import load_config
from miles.core.model.reward import is_reward_model, packed_values
from miles.core.model.sharded import reshard
from miles.core.model.value import add_value_head, load_value_model
from trainer.config import CriticConfig, TrainerConfig
from trainer.fsdp.mesh import Mesh
from trainer.fsdp.model import load_divided, prepare
from trainer.fsdp.optimizer import Optimizer
from trainer.fsdp.update import take_step
from trainer.rows.batch import Batch
from trainer.rows.meters import Meters
from trainer.rows.row import Row
from trainer.rows.schedule import Update
from trainer.rows.share import MicroBatch
from trainer.rows.values import learn_values, loss_of_values
from trainer.split_forward.activations import Activations


class Critic:
    """A training step asks for the values of its whole batch first (`score`), and then lets the critic take its own `step`s.

    Attributes:
        model, optimizer: as the policy's.
    """

    def __init__(self, config: CriticConfig, model: PreTrainedModel, total_steps: int, device: torch.device):
        self._config, self.model, self._device = config, model, device
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
        self, batch: Batch, shares: Sequence[Sequence[MicroBatch]], rows: Sequence[Sequence[Row]], rewards: Rewards, found: TokenAdvantages, mesh: Mesh
    ) -> dict[str, float]:
        """See `learn_values`. Collective."""

        def take(update: Sequence[Row], total: int, meters: Meters) -> Update:
            return take_step(self.model, self.optimizer, update, total, partial(self._loss, total=total), meters, "value/loss")

        meters = Meters(self._device)
        return learn_values(batch, shares, rows, rewards, found, meters, take, lambda meters, total: meters.reduced(total, mesh.data_world, mesh.data_group))

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name, live, as a checkpoint has them."""
        weights = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        return {f"critic.{name}": tensor for name, tensor in (weights | self.optimizer.tensors()).items()}

    def _values(self, row: Row) -> Tensor:
        return packed_values(self.model, row.tokens_T, row.positions_T, row.sequence_T, row.scored_N - 1, row.first_T)

    def _loss(self, row: Row, total: int) -> LossOutput:
        return loss_of_values(row, self._values(row), total=total, clip=self._config.value_clip)


def build_critic(
    config: CriticConfig, policy: ModelConfig, trainer: TrainerConfig, *, master_dtype: torch.dtype, mesh: Mesh, device: torch.device, total_steps: int
) -> Critic:
    """The critic of `policy` on this rank. It computes in the policy's dtype; its operators need not be those of an engine."""
    own = policy.model_copy(update={"path": config.path or policy.path, "true_on_policy": False})
    activations = None if trainer.activations == "keep" else Activations()
    ready = partial(prepare, config=own, master_dtype=master_dtype, mesh=mesh, device=device, activations=activations)
    if is_reward_model(load_config(own.path, trust_remote_code=own.trust_remote_code)):
        return Critic(config, ready(load_value_model(own.path, master_dtype, trust_remote_code=own.trust_remote_code)), total_steps, device)
    return Critic(config, load_divided(own, master_dtype, add_value_head, ready), total_steps, device)
