"""Loads a model shard by shard: it is built without weights, divided over ranks, and each rank then reads its own part of every tensor.

No rank ever holds the whole model, and together they read each byte once. Buffers that no file has (rotary frequencies) are computed by the
model's constructor, as transformers does. A fused weight (experts) is read from the many tensors that a checkpoint has in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from miles.core.model.load import load_config
from miles.core.model.lora import base_name
from miles.core.model.sharded import reshard
from miles.core.model.tensor_files import TensorFiles
from trainer.fsdp.slices import checkpoint_blocks
from weight_sync.slices import Block, Ranges, full, shape_of


def shell_of(path: str | Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model in `path` in `dtype` and eval mode, its parameters on the meta device and its buffers as they are to be.

    Raises:
        ValueError: as `load.load_config`, or for an architecture that is no causal language model.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    try:
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ValueError(f"model.path = {str(path)!r} is no causal language model that transformers knows: {error}") from error
    model.tie_weights()  # every assignment within made another parameter
    # As after from_pretrained; later FSDP2 changes the class, by whose name transformers would look for it.
    model._weight_conversions = [c for c in get_model_conversion_mapping(model, add_legacy=False) if type(c).__name__ != "PrefixChange"] or None
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def sources_of(model: PreTrainedModel, files: TensorFiles) -> dict[str, list[Block]] | None:
    """Of each parameter without weights, and each persistent buffer, where to read it. None where files and model do not agree name by name and
    shape by shape, or a conversion is more than cutting and laying together: transformers then knows more, or says what is wrong."""
    found: dict[str, list[Block]] = {}
    names: dict[int, list[str]] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    known = set[str]()
    for aliases in names.values():
        tensor = tensors[aliases[0]]
        if isinstance(tensor, nn.Parameter) and not tensor.is_meta:
            known.update(aliases)  # made here: what the files have in its place is not read
            continue
        stored = [stem for name in aliases if (stem := base_name(name)) is not None]  # adapters stand between a layer and its weight
        try:
            ways = [checkpoint_blocks(model, name, tuple(tensor.shape)) for name in stored]
        except ValueError:
            return None
        known.update(block.name for blocks in ways for block in blocks)
        there = [blocks for blocks in ways if all(files.shapes.get(block.name) == shape_of(block.there) for block in blocks)]
        if not there:
            return None
        found[aliases[0]] = there[0]
    return found if files.shapes.keys() <= known else None


def materialise(model: PreTrainedModel, device: torch.device, home: torch.device | None = None) -> None:
    """Give every parameter without weights its memory, this rank's part alone where it is sharded; ties stay.

    Args:
        device: of the model's computations, and of its buffers. home: where parameters lie; None: there as well.
    """
    home = home or device

    def placed(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=home)
        return tensor if isinstance(tensor, DTensor) else tensor.to(device)

    _swapped(model, placed)


def share(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Let all parameters of `model` but its adapters be those of `base`, divided in the same way, in the same memory. Before `materialise`.

    A part of a sharded tensor that FSDP2 pads, because the ranks do not divide its rows, it copies for each model all the same.
    """
    reshard(base)
    theirs = {base_name(name): parameter for name, parameter in base.named_parameters()}
    shared = {id(parameter): theirs[stored].detach() for name, parameter in model.named_parameters() if (stored := base_name(name)) is not None}
    _swapped(model, lambda tensor: shared.get(id(tensor), tensor))


def _swapped(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> None:
    """`change` every tensor in place: a tied parameter stays one."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        nn.Module._apply(model, change)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@torch.no_grad()
def fill(model: PreTrainedModel, files: TensorFiles, sources: Mapping[str, list[Block]]) -> None:
    """Read this rank's part of everything in `sources`, cast to the dtype it has in memory."""
    tensors = model.state_dict(keep_vars=True)
    for name, blocks in sources.items():
        local, held = _local(tensors[name])
        for block in blocks:
            if local.numel() == 0 or (mine := block.holding(held)) is None:
                continue
            part = files.read(block.name, mine.there).reshape(shape_of(mine.here))
            local[tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(mine.here, held, strict=True))] = part.to(local.dtype)


def _local(tensor: Tensor) -> tuple[Tensor, Ranges]:
    """This rank's part, and which rectangle of the whole it is."""
    if not isinstance(tensor, DTensor):
        return tensor, full(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple((start, start + n) for start, n in zip(offset, shape, strict=True))
