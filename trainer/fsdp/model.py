"""Builds the model that a rank trains: loaded, made batch-invariant where asked, given what governs its activations, and sharded with FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.fused_layer import fuse_layers
from miles.core.model.load import load_config, load_model
from miles.core.model.lora import add_adapters
from miles.core.model.reward import add_reward_head, reward_shell
from trainer.split_forward.activations import Activations


def build_model(
    config: ModelConfig,
    *,
    master_dtype: torch.dtype,
    world: int,
    device: torch.device,
    activations: Activations | None = None,
    reward_seed: int | None = None,
    lora: LoraConfig | None = None,
    lora_seed: int = 0,
) -> PreTrainedModel:
    """The policy (or a reference) on `device`, parameters in `master_dtype`. With `reward_seed` a reward model, its head made from that.
    With `lora` adapters, drawn from `lora_seed`, are all there is to train. `activations` governs what layers keep; without it they keep everything.

    It stays in eval mode: dropout would make the importance ratio of an on-policy token differ from 1.
    """
    model = load_model(config.path, master_dtype, trust_remote_code=config.trust_remote_code)
    if reward_seed is not None:
        reward_shell(load_config(config.path, trust_remote_code=config.trust_remote_code), trust_remote_code=config.trust_remote_code)  # or refuse now
        add_reward_head(model, reward_seed)
    if lora is not None:
        add_adapters(model, lora, lora_seed)
    return prepare(model, config, master_dtype=master_dtype, world=world, device=device, activations=activations)


def prepare(
    model: PreTrainedModel, config: ModelConfig, *, master_dtype: torch.dtype, world: int, device: torch.device, activations: Activations | None = None
) -> PreTrainedModel:
    """A model that was loaded, made ready to be trained on this rank: see `build_model`."""
    nn.Module.to(model, device)
    if config.true_on_policy:
        from miles.core.model.batch_invariant import make_batch_invariant

        make_batch_invariant(model)
    fuse_layers(model)
    if activations is not None:
        activations.attach(decoder_layers(model))
    compute_dtype = compute_dtype_of(config, master_dtype)
    # One rank that computes in its masters' dtype has nothing to gather or cast: FSDP2's hooks and copies cost it a fifth of a step.
    if world > 1 or compute_dtype != master_dtype:
        shard(model, world=world, device=device, compute_dtype=compute_dtype, reduce_dtype=master_dtype)
    return model


def compute_dtype_of(config: ModelConfig, master_dtype: torch.dtype) -> torch.dtype:
    """bfloat16 where the recipe says so; else the masters' own."""
    return torch.bfloat16 if config.dtype == "bfloat16" else master_dtype


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the model class itself names them.

    Raises:
        ValueError: the class does not say which of its modules are blocks.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not name its layers (_no_split_modules is {sorted(names)}), so it can be neither sharded nor recomputed by layer"
        )
    return layers


def shard(model: PreTrainedModel, *, world: int, device: torch.device, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """`fully_shard` each layer, then the root, over all ranks. Gradients are summed over ranks, never averaged: losses are
    shares of a global mean already."""
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for module in [*decoder_layers(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum, which a divide factor would otherwise use.
        module.set_force_sum_reduction_for_comms(True)
