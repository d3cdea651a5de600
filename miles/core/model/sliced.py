"""Loads a model shard by shard: it is built without weights, divided over ranks, and each rank then reads its own part of every tensor.

No rank ever holds the whole model, and together they read each byte once. Buffers that no file has (rotary frequencies) are computed by the
model's constructor, as transformers does. A fused weight (experts) is read from the many tensors that a checkpoint has in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from miles.core.model.load import load_config
from miles.core.model.lora import base_name
from miles.core.model.tensor_files import Box, TensorFiles

_SMALL = 64
"""Conversions are looked at on a tensor whose dimensions behind the first are shrunk to this."""


@dataclass(frozen=True)
class Source:
    """Where the parts of one tensor in memory lie on disk: by name, the box of it that this tensor of the file is."""

    boxes: Mapping[str, Box]


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


def sources_of(model: PreTrainedModel, files: TensorFiles) -> dict[str, Source] | None:
    """Of each parameter without weights, and each persistent buffer, where to read it. None where files and model do not agree name by name and
    shape by shape, or a conversion is more than cutting and laying together: transformers then knows more, or says what is wrong."""
    found: dict[str, Source] = {}
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
        sources = [source for name in stored if (source := _source(model, name, tuple(tensor.shape))) is not None]
        known.update(name for source in sources for name in source.boxes)
        there = [source for source in sources if all(files.shapes.get(name) == shape for name, shape in _shapes(source, files).items())]
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

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # in place: a tied parameter stays one
    try:
        nn.Module._apply(model, placed)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@torch.no_grad()
def fill(model: PreTrainedModel, files: TensorFiles, sources: Mapping[str, Source]) -> None:
    """Read this rank's part of everything in `sources`, cast to the dtype it has in memory."""
    tensors = model.state_dict(keep_vars=True)
    for name, source in sources.items():
        tensor = tensors[name]
        local, here = _local(tensor)
        for file_name, box in source.boxes.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, here, strict=True)]
            if any(start >= stop for start, stop in common):
                continue
            there = [(start - origin, stop - origin) for (start, stop), (origin, _) in zip(common, box, strict=True)]
            shape = files.shapes[file_name]
            kept = there if len(shape) == len(box) else [r for r, (a, b) in zip(there, box, strict=True) if b - a > 1]
            part = files.read(file_name, kept).reshape([stop - start for start, stop in common])
            local[tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(common, here, strict=True))] = part.to(local.dtype)


def _local(tensor: Tensor) -> tuple[Tensor, Box]:
    """This rank's part, and which box of the whole it is."""
    if not isinstance(tensor, DTensor):
        return tensor, [(0, n) for n in tensor.shape]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), [(start, start + n) for start, n in zip(offset, shape, strict=True)]


def _shapes(source: Source, files: TensorFiles) -> dict[str, tuple[int, ...]]:
    """The shapes that the files' tensors must have. A part of one slice may lack that dimension there."""
    shapes = {}
    for name, box in source.boxes.items():
        whole = tuple(stop - start for start, stop in box)
        short = tuple(n for n in whole if n > 1)
        shapes[name] = short if len(files.shapes.get(name, whole)) == len(short) else whole
    return shapes


def _source(model: PreTrainedModel, name: str, shape: tuple[int, ...]) -> Source | None:
    """None where a conversion does more than cut: seen by what it makes of a tensor that holds its own coordinates."""
    parts = revert_weight_conversion(model, {name: torch.empty(shape, device="meta")})
    if [tuple(part.shape) for part in parts.values()] == [shape]:
        return Source({only: [(0, n) for n in shape] for only in parts})
    factor = [1 if d == 0 or n % _SMALL else n // _SMALL for d, n in enumerate(shape)]
    small = [n // f for n, f in zip(shape, factor, strict=True)]
    boxes: dict[str, list[tuple[int, int]]] = {part: [] for part in parts}
    seen: dict[str, list[Tensor]] = {part: [] for part in parts}
    for d, n in enumerate(small):
        for part, values in revert_weight_conversion(model, {name: _coordinate(0, n, d, small)}).items():
            boxes[part].append((int(values.min()), int(values.max()) + 1))
            seen[part].append(values)
    for part, box in boxes.items():
        extents = [stop - start for start, stop in box]
        cut = all(v.numel() == prod(extents) for v in seen[part])
        if not cut or not all(torch.equal(v.reshape(extents), _coordinate(*box[d], d, extents)) for d, v in enumerate(seen[part])):
            return None
    if sum(prod(stop - start for start, stop in box) for box in boxes.values()) != prod(small):
        return None
    return Source({part: [(start * f, stop * f) for (start, stop), f in zip(box, factor, strict=True)] for part, box in boxes.items()})


def _coordinate(start: int, stop: int, dimension: int, shape: Sequence[int]) -> Tensor:
    """A tensor that says of each of its places where it lies in one dimension."""
    return torch.arange(start, stop).view([-1 if dimension == d else 1 for d in range(len(shape))]).expand(list(shape))
