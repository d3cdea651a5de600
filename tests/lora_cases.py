"""Adapters that are not zero, and peft on plain transformers as their oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, distribute_tensor

from algorithms.kl import MAX_WEIGHT
from miles.data.types import Group
from tests.trainer_cases import clipped_losses, gradients, make_backend, plain_logprobs, plain_model

LORA = {"rank": 3, "alpha": 5}


def stir(backend: Any, rank: int = 0, factor: float = 1.0) -> None:
    """Adapters far from zero, the same on every split: with B = 0, as they begin, A would have no gradient."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate((n, p) for n, p in backend.model.named_parameters() if p.requires_grad):
            size = tuple(parameter.shape)
            full = torch.randn(size, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 0.3 * factor
            full = (1 + 0.3 * full if "magnitude" in name else full).to(parameter.dtype)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else full)


def lora_gradients(rank: int, world: int, path: Path, groups: Sequence[Group], options: dict[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Of the first optimizer step from stirred adapters."""
    backend = make_backend(path, rank=rank, world=world, **({"lora": LORA} | options))
    backend.model.config._experts_implementation = "eager"  # where there are experts: the default one has no float64
    stir(backend, rank)
    backend.step_rl(groups)
    return gradients(backend)


def peft_model(path: Path, dtype: torch.dtype = torch.float64, *, lora: dict[str, Any], adapters: dict[str, torch.Tensor] | None = None) -> Any:
    """peft's own wrapper on plain transformers, with stirred adapters or those given under names of its file."""
    targets: dict[str, Any] = {"target_modules": "all-linear"}
    if "gate_up_proj" in lora.get("targets", []):
        targets = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    config = peft.LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], use_rslora=lora.get("rslora", False), use_dora=lora.get("dora", False), **targets)
    model = peft.get_peft_model(plain_model(path, dtype), config)
    if adapters is None:
        holder = type("Holder", (), {"model": model.base_model.model})
        stir(holder)
    else:
        found: Any = peft.set_peft_model_state_dict(model, adapters)
        assert not found.unexpected_keys
        assert not [name for name in found.missing_keys if "lora" in name]
    return model.eval()


def peft_gradients(path: Path, groups: Sequence[Group], lora: dict[str, Any], kl_coef: float = 0.0) -> dict[str, NDArray[np.float64]]:
    """Of GRPO's clipped token-mean loss and, with `kl_coef`, a penalty whose gradient is that of the
    KL divergence from the model without its adapter, estimated on tokens of another policy; sample by sample."""
    model = peft_model(path, lora=lora)
    tokens = sum(int(s.loss_mask.sum()) for g in groups for s in g.samples)
    for sample, new, ratio, loss in clipped_losses(model, groups):
        if kl_coef:
            with torch.no_grad(), model.disable_adapter():
                apart = plain_logprobs(model, sample)[torch.from_numpy(sample.loss_mask)]
            loss = loss + kl_coef * (ratio.detach().clamp(max=MAX_WEIGHT) * (new - apart).square() / 2).sum()
        (loss / tokens).backward()
    return {name.removeprefix("base_model.model."): p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
