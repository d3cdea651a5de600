"""`miles convert`: Hugging Face safetensors to Megatron-Core's dist_checkpointing and back, one tensor at a time.

A converted directory has the model's own dtype and every file of the source that is not weights, so that nothing is lost on the way
there and back: the weights are equal bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from miles.core.checkpoint.store import sync_folder
from miles.core.checkpoint.whole import check_new, whole
from miles.core.model.load import load_config
from trainer.megatron.architecture import Architecture, architecture_of
from trainer.megatron.directory import Source, slices, write_weights
from trainer.megatron.layout import Layout
from trainer.megatron.names import Part, parts, shapes
from trainer.megatron.shards import Place, Shards, place_of, write

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".distcp")
_OF_SHARDS = (".metadata", "metadata.json", "common.pt", "complete.json")


@dataclass(frozen=True)
class Conversion:
    """What both directions are told.

    Attributes:
        file_bytes: of one file of weights; as much is in memory, or one tensor where that is larger.
        dtype: of the weights in the target; None leaves them as they are.
        report: called with a line whenever there is something to say.
    """

    source: Path
    target: Path
    file_bytes: int
    dtype: torch.dtype | None
    report: Callable[[str], None]


def to_megatron(conversion: Conversion) -> None:
    """A Hugging Face directory becomes one that dist_checkpointing loads at any layout.

    Raises:
        ValueError: the target exists, the source is no such directory, or the model is none that the `megatron` backend has.
    """
    source = conversion.source
    if not list(source.glob("*.safetensors")):
        raise ValueError(f"{str(source)!r} has no safetensors file: --to megatron reads a Hugging Face model directory")
    architecture = architecture_of(load_config(source))
    opened = Source(source, shapes(architecture))
    tensors = [(place, part, conversion.dtype or opened.dtype(part)) for place, part in _whole(architecture)]
    with _target(conversion, source) as folder:
        write(folder, tensors, opened.read, conversion.file_bytes, conversion.report)


def to_huggingface(conversion: Conversion, model: Path | None) -> None:
    """A dist_checkpointing directory, converted or a checkpoint of a training run, becomes one that transformers and SGLang load.

    Args:
        model: the Hugging Face directory that has the configuration and tokenizer; None where the source has them.
    Raises:
        ValueError: the target exists, the source is no such directory, or it does not hold the model of the configuration.
    """
    source, described = conversion.source, model or conversion.source
    shards = Shards(source)
    if not (described / "config.json").is_file():
        hint = "give the model that the training run started from as --model" if model is None else "--model takes a Hugging Face model directory"
        raise ValueError(f"{str(described)!r} has no config.json: {hint}")
    architecture = architecture_of(load_config(described))
    for place, _ in _whole(architecture):
        shards.dtype(place)  # or refuse before anything is written
    with _target(conversion, described) as folder:
        write_weights(folder, _restored(architecture, shards, conversion), conversion.file_bytes)


def _whole(architecture: Architecture) -> Iterator[tuple[Place, Part]]:
    """The tensors of the model on one rank, layer by layer, and where dist_checkpointing has them."""
    for name, part in parts(architecture, Layout(), 0)[0].items():
        yield place_of(name, architecture.layers, architecture.experts, uniform=architecture.uniform), part


def _restored(architecture: Architecture, shards: Shards, conversion: Conversion) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors: each lies in one tensor of Megatron-Core's, which is read once."""
    sizes = shapes(architecture)
    for place, part in _whole(architecture):
        here = shards.read(place, part)
        found: dict[str, Tensor] = {}
        for block in part.blocks:
            if block.name not in found:
                found[block.name] = torch.empty(sizes[block.name], dtype=conversion.dtype or here.dtype)
            found[block.name][slices(block.there)] = here[slices(block.here)].to(found[block.name].dtype)
        del here
        if "input_layernorm" in block.name:
            conversion.report(f"{block.name.removesuffix('.input_layernorm.weight')} of {architecture.layers}")
        while found:
            name = next(iter(found))
            yield name, found.pop(name)


@contextmanager
def _target(conversion: Conversion, described: Path) -> Iterator[Path]:
    """The folder to write weights into. It becomes the target, whole; all of `described` that is not weights comes with it."""
    target = conversion.target
    check_new(target)
    with whole(target) as partial:
        yield partial
        for file in described.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in _OF_SHARDS:
                shutil.copyfile(file, partial / file.name)
        if conversion.dtype is not None:
            _name_dtype(partial / "config.json", conversion.dtype)
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        sync_folder(partial)
    sync_folder(target.parent)


def _name_dtype(file: Path, dtype: torch.dtype) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # its older name
    config["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")
