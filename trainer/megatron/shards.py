"""Checkpoints of dist_checkpointing written and read one tensor at a time, by one process that has neither ranks nor Megatron-Core.

They are directories of torch.distributed.checkpoint: global tensors in pieces, and `.metadata` that says where each piece lies. Layers
of one kind are stacked, and so are experts: `decoder.layers.mlp.experts.experts.linear_fc2.weight` is [layers, experts, hidden, width].
Entries `_extra_state`, in which Transformer Engine keeps scales of FP8, are neither written nor read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlan, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainer.megatron.names import Part

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d+)\.(.+)")
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_FIRST = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Place:
    """A tensor of the whole model is the entry `index` of the global tensor `key`, along its first `len(index)` dimensions of `stacked` entries."""

    key: str
    index: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()


def place_of(name: str, layers: int, experts: int, *, uniform: bool) -> Place:
    """Where Megatron-Core puts the tensor `name` of a model on one rank; with layers of several kinds (not `uniform`) each has its own key.

    Example: `decoder.layers.3.mlp.linear_fc2.weight` of 8 layers is entry 3 of 8 of `decoder.layers.mlp.linear_fc2.weight`.
    """
    index, stacked = list[int](), list[int]()
    if uniform and (found := _LAYER.fullmatch(name)):
        index.append(int(found[1]))
        stacked.append(layers)
        name = f"decoder.layers.{found[2]}"
    if found := _EXPERT.fullmatch(name):
        index.append(int(found[2]))
        stacked.append(experts)
        name = f"{found[1]}.experts.{found[3]}"
    return Place(name, tuple(index), tuple(stacked))


def write(
    folder: Path,
    tensors: Sequence[tuple[Place, Part, torch.dtype]],
    read: Callable[[Part, torch.dtype], Tensor],
    file_bytes: int,
    report: Callable[[str], None],
) -> None:
    """A dist_checkpointing directory in the folder, which is there. No more than one file's tensors are in memory: about `file_bytes`,
    or a single tensor that is larger. `.metadata`, without which nothing reads the directory, comes last.

    Args:
        read: gives a tensor when it is its turn.
    """
    parts: dict[MetadataIndex, tuple[Part, torch.dtype]] = {}
    stored: dict[str, Any] = {}
    items: list[tuple[int, WriteItem]] = []
    for place, part, dtype in tensors:
        size = torch.Size((*place.stacked, *part.shape))
        chunk = ChunkStorageMetadata(torch.Size((*place.index, *[0] * len(part.shape))), torch.Size((*[1] * len(place.index), *part.shape)))
        entry = stored.setdefault(place.key, TensorStorageMetadata(TensorProperties(dtype=dtype), size, []))
        if entry.properties.dtype != dtype:
            raise ValueError(f"{part.blocks[0].name} has dtype {dtype}, but the same tensor of another layer {entry.properties.dtype}: they are stored as one")
        index = MetadataIndex(place.key, chunk.offsets, len(entry.chunks))
        entry.chunks.append(chunk)
        parts[index] = part, dtype
        items.append((prod(part.shape) * dtype.itemsize, WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, entry.properties, size))))
    writer = FileSystemWriter(folder)
    plans = writer.prepare_global_plan([SavePlan(bucket) for bucket in _buckets(items, file_bytes)])
    results = []
    for number, plan in enumerate(plans):
        results.append(writer.write_data(plan, _Reading(parts, read)).wait())  # type: ignore[arg-type]
        report(f"file {number + 1} of {len(plans)}")
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_FORMAT))
    writer.finish(Metadata(stored), results)


class Shards:
    """A dist_checkpointing directory that is read.

    Args:
        folder: of this module's, of a training run's checkpoint, or of another program with Megatron-Core's names.
    Raises:
        ValueError: it is none of these, or it was never completed.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        if folder.name.endswith(".partial") or not all((folder / name).is_file() for name in (".metadata", "metadata.json")):
            raise ValueError(f"{str(folder)!r} is no complete Megatron checkpoint: give a folder such as RUN/checkpoints/step_00000010, with .metadata in it")
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, True)
        self._stored = metadata.state_dict_metadata
        found = [prefix for prefix in ("", "master.", "model.") if prefix + _FIRST in self._stored]
        if not found:
            raise ValueError(f"{str(folder)!r} has no tensor {_FIRST}: it is no whole model (a run with [lora] keeps its adapters alone)")
        # A training run has the float32 masters, from which narrower weights are made.
        self._prefix = found[0]

    def dtype(self, place: Place) -> torch.dtype:
        """Raises ValueError where the tensor is not there."""
        return self._entry(place).properties.dtype

    def read(self, place: Place, part: Part) -> Tensor:
        """The tensor, [*part.shape]. Only what the part's blocks cover is read, padding is 0; one stored piece at a time is in memory beside it.

        Raises:
            ValueError: it is not there, or pieces are missing.
        """
        entry = self._entry(place)
        full = torch.zeros(part.shape, dtype=entry.properties.dtype)
        reach = tuple(max(block.here[d][1] for block in part.blocks) for d in range(len(part.shape)))
        target = full[tuple(slice(stop) for stop in reach)][(None,) * len(place.index)]
        wanted = ChunkStorageMetadata(torch.Size((*place.index, *[0] * len(reach))), target.shape)
        items = create_read_items_for_chunk_list(self._prefix + place.key, entry, [wanted])
        if sum(prod(item.lengths) for item in items) != prod(target.shape):
            raise ValueError(f"{str(self._folder)!r} does not hold the whole of {place.key}: it has shape {list(entry.size)}, and {list(part.shape)} is wanted")
        self._reader.read_data(LoadPlan(items), _Filling(target)).wait()  # type: ignore[arg-type]
        return full

    def _entry(self, place: Place) -> TensorStorageMetadata:
        entry = self._stored.get(self._prefix + place.key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{str(self._folder)!r} has no tensor {place.key}, which a model of this configuration has")
        if tuple(entry.size[: len(place.stacked)]) != place.stacked:
            raise ValueError(f"{str(self._folder)!r}: {place.key} has shape {list(entry.size)}, but the configuration says {place.stacked} layers or experts")
        return entry


@dataclass(frozen=True)
class _Reading:
    """What torch's writer asks: each tensor when it is to be written."""

    parts: dict[MetadataIndex, tuple[Part, torch.dtype]]
    read: Callable[[Part, torch.dtype], Tensor]

    def resolve_data(self, item: WriteItem) -> Tensor:
        tensor = self.read(*self.parts[item.index])
        assert item.tensor_data is not None
        return tensor.view(item.tensor_data.chunk.sizes)


@dataclass(frozen=True)
class _Filling:
    """What torch's reader asks: where in one tensor a piece belongs."""

    target: Tensor

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        return self.target[tuple(slice(start, start + length) for start, length in zip(item.dest_offsets, item.lengths, strict=True))]

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """It was written where it belongs."""


def _buckets(items: Sequence[tuple[int, WriteItem]], file_bytes: int) -> Iterator[list[WriteItem]]:
    bucket, size = list[WriteItem](), 0
    for own, item in items:
        if bucket and size + own > file_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += own
    if bucket:
        yield bucket
