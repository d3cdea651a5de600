"""Builds the model that a rank trains: made batch-invariant where asked, given what governs its activations, divided over ranks, and loaded shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.fused_layer import fuse_layers
from miles.core.model.load import load_config, load_model
from miles.core.model.lora import add_adapters
from miles.core.model.reward import add_reward_head, reward_shell
from miles.core.model.tensor_files import open_tensor_files
from trainer.fsdp.compiled import compile_layers
from trainer.fsdp.expert_parallel import divide_experts
from trainer.fsdp.loading import fill, materialise, share, shell_of, sources_of
from trainer.fsdp.mesh import Mesh
from trainer.fsdp.tensor_parallel import parallelise
from trainer.split_forward.activations import Activations


def build_model(
    config: ModelConfig,
    *,
    master_dtype: torch.dtype,
    mesh: Mesh,
    device: torch.device,
    activations: Activations | None = None,
    reward_seed: int | None = None,
    lora: LoraConfig | None = None,
    lora_seed: int = 0,
    frozen: Sequence[str] = (),
    base: PreTrainedModel | None = None,
    compiled: bool = False,
) -> PreTrainedModel:
    """The policy (or a reference) on `device`, parameters in `master_dtype`. With `reward_seed` a reward model, its head made from that.
    With `lora` adapters, drawn from `lora_seed`, are all there is to train; parameters whose names match a pattern of `frozen` are not trained.
    `activations` governs what layers keep; without it they keep everything. With `base`, a model of the same `config` with adapters of its own, all
    but the adapters is that one's, in the same memory. `compiled`: its layers are, by torch.compile.

    It stays in eval mode: dropout would make the importance ratio of an on-policy token differ from 1.
    """

    def changed(model: PreTrainedModel) -> PreTrainedModel:
        if reward_seed is not None:
            reward_shell(load_config(config.path, trust_remote_code=config.trust_remote_code), trust_remote_code=config.trust_remote_code)  # or refuse now
            add_reward_head(model, reward_seed)
        if lora is not None:
            add_adapters(model, lora, lora_seed)
        freeze(model, frozen)
        return model

    ready = partial(prepare, config=config, master_dtype=master_dtype, mesh=mesh, device=device, activations=activations, base=base, compiled=compiled)
    if lora is not None and lora.dora:  # its magnitudes are those of the weights, which must be there
        return ready(changed(load_model(config.path, master_dtype, trust_remote_code=config.trust_remote_code)))
    return load_divided(config, master_dtype, changed, ready, shared=base is not None)


def load_divided(
    config: ModelConfig,
    master_dtype: torch.dtype,
    change: Callable[[PreTrainedModel], PreTrainedModel],
    ready: Callable[[PreTrainedModel], PreTrainedModel],
    *,
    shared: bool = False,
) -> PreTrainedModel:
    """`ready(change(model))`, where `ready` divides the model over ranks, and each rank reads its own part: see `trainer.fsdp.loading`.

    What is not stored as the model has it (another format, a quantised one, older names) is read whole, on every rank, as transformers does.
    With `shared`, `ready` gives parameters their values, and buffers alone are read. Raises as `load_model`.
    """
    with open_tensor_files(config.path) as files:
        shell = None if files is None else change(shell_of(config.path, master_dtype, trust_remote_code=config.trust_remote_code))
        sources = None if files is None or shell is None else sources_of(shell, files)
        if files is not None and shell is not None and sources is not None:
            model = ready(shell)
            there = dict(model.named_parameters()) if shared else {}
            fill(model, files, {name: blocks for name, blocks in sources.items() if name not in there})
            return model
    return ready(change(load_model(config.path, master_dtype, trust_remote_code=config.trust_remote_code)))


def prepare(
    model: PreTrainedModel,
    config: ModelConfig,
    *,
    master_dtype: torch.dtype,
    mesh: Mesh,
    device: torch.device,
    activations: Activations | None = None,
    base: PreTrainedModel | None = None,
    compiled: bool = False,
) -> PreTrainedModel:
    """A model, loaded or without weights, made ready to be trained on this rank: see `build_model`. Parameters without weights get their memory,
    this rank's part alone."""
    nn.Module._apply(model, lambda t: t if t.is_meta else t.to(device))
    if config.true_on_policy:
        from miles.core.model.batch_invariant import make_batch_invariant

        make_batch_invariant(model)
    if device.type == "cpu" and not compiled:
        fuse_layers(model)
    if mesh.tensor is not None:
        parallelise(model, mesh.tensor)
    apart = set[nn.Parameter]() if mesh.experts is None else divide_experts(model, mesh.experts)
    if compiled:
        compile_layers(decoder_layers(model))
    if activations is not None:
        activations.attach(decoder_layers(model))
    compute_dtype = compute_dtype_of(config, master_dtype)
    # One rank that computes in its masters' dtype has nothing to gather or cast: FSDP2's hooks and copies cost it a fifth of a step.
    if mesh.world > 1 or compute_dtype != master_dtype or mesh.offload:
        shard(model, mesh=mesh, device=device, compute_dtype=compute_dtype, reduce_dtype=master_dtype, apart=apart)
    if base is not None:
        share(model, base)
    materialise(model, device, torch.device("cpu") if mesh.offload else None)
    return model


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose names match one of `patterns` are not trained. Raises ValueError for a pattern without any, or where none is left to train."""
    for pattern in patterns:
        found = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"trainer.frozen has {pattern!r}, which matches no parameter; the first are {', '.join(list(dict(model.named_parameters()))[:4])}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"trainer.frozen = {list(patterns)} leaves nothing to train")


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


def shard(
    model: PreTrainedModel,
    *,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    apart: set[nn.Parameter] | None = None,
) -> None:
    """`fully_shard` each layer, then the root, over `mesh.fsdp`. Gradients are summed over ranks, never averaged: losses are
    shares of a global mean already. Parameters that stand `apart` are not touched."""
    over = mesh.fsdp or init_device_mesh(device.type, (1,))  # a single rank over itself
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    # Pinned memory is for copies to a GPU, and there is none without one.
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if mesh.offload else OffloadPolicy()
    for module in [*decoder_layers(model), model]:
        fully_shard(module, mesh=over, mp_policy=policy, offload_policy=offload, ignored_params=apart)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum, which a divide factor would otherwise use.
        module.set_force_sum_reduction_for_comms(True)
