"""Hugging Face directories read in slices and written in shards: no rank holds more of a model than its own part of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from miles.core.checkpoint.whole import whole
from miles.core.model.config import ModelConfig
from miles.core.model.load import tokenizer_of
from trainer.megatron.names import Part

SHARD_BYTES = 4 * 2**30
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX = "model.safetensors.index.json"


class Source:
    """The safetensors files of a model directory.

    Args:
        expected: names and shapes of the architecture's tensors.
    Raises:
        ValueError: the directory has no safetensors file, or its tensors are not those expected; the first is named.
    """

    def __init__(self, path: str | Path, expected: Mapping[str, tuple[int, ...]]):
        folder = Path(path)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not files:
            raise ValueError(f"model.path = {str(path)!r} has no safetensors file, which trainer.backend = 'megatron' reads: save the model there as such")
        self._open = [safe_open(file, framework="pt") for file in files]
        self._file: dict[str, Any] = {name: file for file in self._open for name in file.keys()}  # noqa: SIM118 - not a dict
        for name, shape in expected.items():
            found = tuple(self._file[name].get_slice(name).get_shape()) if name in self._file else None
            if found != shape:
                state = "is missing" if found is None else f"has shape {list(found)}"
                raise ValueError(f"model.path = {str(path)!r}: tensor {name} {state}, but its configuration says {list(shape)}")
        # A tied head may be stored all the same.
        for name in sorted(self._file.keys() - expected.keys() - {"lm_head.weight"}):
            raise ValueError(f"model.path = {str(path)!r} has a tensor that trainer.backend = 'megatron' does not know: {name}")

    def dtype(self, part: Part) -> torch.dtype:
        """Of its blocks. Raises ValueError where they differ."""
        found = {self._file[block.name].get_slice(block.name).get_dtype(): block.name for block in part.blocks}
        if len(found) > 1:
            raise ValueError(f"{' and '.join(found.values())} have dtypes {' and '.join(found)}, but Megatron-Core has them in one tensor")
        return _DTYPES[next(iter(found))]

    def read(self, part: Part, dtype: torch.dtype) -> Tensor:
        """A rank's tensor on the CPU: only the bytes of its blocks are read."""
        tensor = torch.zeros(part.shape, dtype=dtype)
        for block in part.blocks:
            there = self._file[block.name].get_slice(block.name)
            tensor[slices(block.here)] = there[slices(block.there)].to(dtype)
        return tensor


def slices(ranges: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in ranges)


def write_directory(folder: Path, tensors: Iterable[tuple[str, Tensor]], model: ModelConfig, config: PretrainedConfig, dtype: torch.dtype) -> None:
    """Weights, configuration and tokenizer, as transformers and SGLang load them. The folder appears whole, in place of one that was there."""
    with whole(folder) as partial:
        write_weights(partial, ((name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors))
        config.dtype = dtype
        config.save_pretrained(partial)
        if (Path(model.path) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(model.path).save_pretrained(partial)
        tokenizer_of(model).save_pretrained(partial)


def write_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = SHARD_BYTES) -> None:
    """Safetensors files in the folder. `tensors`, on the CPU and nobody else's, are taken one at a time, and written whenever they fill a file."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
            shards.append(list(pending))
            pending.clear()

    for name, tensor in tensors:
        if size + tensor.nbytes > file_bytes:
            flush()
            size = 0
        pending[name] = tensor.contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    _name_shards(folder, shards, total)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    """The names that transformers looks for, known only when all are written."""
    if len(shards) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        where |= dict.fromkeys(names, file)
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2))
