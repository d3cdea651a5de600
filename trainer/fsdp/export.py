"""What leaves the trainer: full tensors under their checkpoint names, one at a time, and whole Hugging Face directories."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from miles.core.model.config import ModelConfig
from miles.core.model.load import load_config, load_tokenizer
from weight_sync.contracts import TensorSpec


def specs(model: PreTrainedModel, dtype: torch.dtype) -> list[TensorSpec]:
    """Names, shapes and dtypes of everything `tensors` can give. Tied tensors come once, as in a checkpoint."""
    exported = {name: part for own, tensor in _own(model) for name, part in _converted(model, own, torch.empty_like(tensor, device="meta")).items()}
    return [TensorSpec(name, tuple(part.shape), str(dtype).removeprefix("torch.")) for name, part in exported.items()]


def tensors(model: PreTrainedModel, names: Sequence[str], dtype: torch.dtype, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Full tensors in the order of `names`; on ranks other than 0 they are empty. Collective: every rank takes every step.

    On one rank in the masters' own dtype a tensor is the parameter itself: copy it before the next training step.
    """
    source = {name: own for own, tensor in _own(model) for name in _converted(model, own, torch.empty_like(tensor, device="meta"))}
    parameters = dict(_own(model))
    held: tuple[str, dict[str, Tensor]] = ("", {})
    for name in names:
        if name not in source:
            raise ValueError(f"the model has no tensor {name!r}")
        own = source[name]
        if held[0] != own:
            # One parameter may be several tensors of a checkpoint (fused experts): gather it once.
            full = _full(parameters[own])
            held = (own, _converted(model, own, full.to(dtype)) if rank == 0 else {})
        yield name, held[1][name] if rank == 0 else torch.empty(0, dtype=dtype)


def write(model: PreTrainedModel, config: ModelConfig, folder: Path, dtype: torch.dtype, rank: int) -> None:
    """A directory that transformers and SGLang load: weights in `dtype`, config, tokenizer. It appears whole. Collective."""
    state = {}
    for own, tensor in _own(model):
        full = _full(tensor)
        if rank == 0:
            state[own] = full.to("cpu", dtype)
    if rank != 0:
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model_config = load_config(config.path, trust_remote_code=config.trust_remote_code)
    model_config.dtype = dtype
    # A fresh shell: FSDP2 changes the class of the model it wraps, and its name would be written as the architecture.
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(model_config, trust_remote_code=config.trust_remote_code)
    shell.generation_config = model.generation_config
    shell.save_pretrained(partial, state_dict=state)
    load_tokenizer(config.tokenizer or config.path, trust_remote_code=config.trust_remote_code).save_pretrained(partial)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)


def _own(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers under the names they have in memory, tied ones once."""
    seen: set[int] = set()
    own = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own.append((name, tensor.detach()))
    return own


def _converted(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor in memory -> the tensors a checkpoint has for it (a fused expert weight is many)."""
    return revert_weight_conversion(model, {name: tensor})


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
