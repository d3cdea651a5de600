"""What the ranks of the `fsdp` backend would refuse of a recipe as they build its model, found on the model without weights, before a rank starts."""

from __future__ import annotations

from pathlib import Path

import torch

from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.load import longest_sequence
from miles.core.model.lora import add_adapters, target_names
from miles.core.model.packed import output_head
from miles.core.model.reward import add_reward_head
from trainer.config import TrainerConfig
from trainer.fsdp.expert_parallel import check_experts
from trainer.fsdp.loading import shell_of
from trainer.fsdp.model import freeze
from trainer.fsdp.tensor_parallel import styles_of
from trainer.split_forward import hilore


def check(model: ModelConfig, trainer: TrainerConfig, lora: LoraConfig | None, *, reward_head: bool = False) -> None:
    """Of a policy, or with `reward_head` a reward model, in a folder.

    Raises:
        ValueError: an output head that cannot be scored, layers that do not divide over tensor ranks or have no batch-invariant version, a pattern of
            `frozen` or a target of `lora` that matches nothing, or a model whose activations cannot be foreseen.
    """
    check_divided(model, trainer, lora)
    if trainer.activations == "hilore":
        hilore.check_operators(exact=model.true_on_policy)
    shell = shell_of(model.path, torch.float32, trust_remote_code=model.trust_remote_code)
    if reward_head:
        add_reward_head(shell, 0)
    else:
        output_head(shell)
    if trainer.tensor_parallel > 1:
        styles_of(shell, trainer.tensor_parallel)
    if trainer.expert_parallel > 1:
        check_experts(shell, trainer.expert_parallel)
    if trainer.activations == "hilore":
        hilore.check(shell, longest_sequence(model))
    if lora is not None:
        target_names(shell, lora)
        if trainer.frozen or model.true_on_policy:
            add_adapters(shell, lora, 0)
    freeze(shell, trainer.frozen)
    if model.true_on_policy:
        make_batch_invariant(shell)


def check_layers(path: str | Path, trainer: TrainerConfig, *, trust_remote_code: bool) -> None:
    """Of another model on the same ranks, such as a critic or a teacher. Raises ValueError as `check`, for layers that do not divide."""
    if trainer.tensor_parallel > 1:
        try:
            styles_of(shell_of(path, torch.float32, trust_remote_code=trust_remote_code), trainer.tensor_parallel)
        except ValueError as error:
            raise ValueError(f"the model in {str(path)!r}: {error}") from error


def check_divided(model: ModelConfig, trainer: TrainerConfig, lora: LoraConfig | None) -> None:
    """Raises ValueError for what does not go with layers that are divided."""
    if trainer.tensor_parallel > 1:
        for wanted, what in ((lora is not None, "[lora]"), (model.true_on_policy, "model.true_on_policy")):
            if wanted:
                raise ValueError(f"trainer.tensor_parallel = {trainer.tensor_parallel} does not go with {what}: leave one of them out")
    if trainer.compile and model.true_on_policy:
        raise ValueError("trainer.compile does not go with model.true_on_policy, whose operators the compiler would replace: leave one of them out")
    if trainer.expert_parallel > 1:
        adapted = lora is not None and bool({"gate_up_proj", "down_proj"} & set(lora.targets))
        for wanted, what in ((adapted, "experts among lora.targets"), (model.true_on_policy, "model.true_on_policy")):
            if wanted:
                raise ValueError(f"trainer.expert_parallel = {trainer.expert_parallel} does not go with {what}: leave one of them out")
